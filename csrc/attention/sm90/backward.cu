#include "backward_kernel.cuh"

namespace distca::attention::sm90 {
namespace {

void backward_plain(const BackwardCall& call, cudaStream_t stream) {
  by_element_and_widths(call, [&]<typename T, int kHeadDim, int kValueDim>() {
    if (call.deterministic) {
      launch<BackwardShape<T, kHeadDim, kValueDim, true>>(call, stream);
    } else {
      launch<BackwardShape<T, kHeadDim, kValueDim, false>>(call, stream);
    }
  });
}

}  // namespace

BackwardSizes backward_sizes(const BackwardCall& call) {
  const int64_t num_tiles = call.tiles.num_tiles * call.q.heads;
  const int32_t width = computed_widths(call.q.head_dim, call.v.head_dim, call.softcap).queries;
  const int32_t rows = backward_tile_rows(width);
  return {.dq_sums = num_tiles * rows * width * 4,
          .row_stats = num_tiles * row_stats_bytes(rows),
          .bounds = call.tiles.num_runs * call.k.heads * 2 * 4};
}

void backward(const BackwardCall& call, cudaStream_t stream) {
  prepare_rows(call, stream);
  if (call.tiles.num_blocks > 0) {
    call.softcap == 0.f ? backward_plain(call, stream) : backward_capped(call, stream);
  }
  finish_dq(call, stream);
}

}  // namespace distca::attention::sm90
