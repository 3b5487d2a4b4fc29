#include <algorithm>

#include "backward_feed.cuh"
#include "backward_sums.cuh"
#include "launch.cuh"

// Persistent blocks take tickets, a (key block, kv head) each. An item's keys, values, dK and dV
// stay; all query tiles that see the keys pass by, of every task and of every query head of the kv
// head, so that dK and dV are written once. Two warpgroups own 64 keys each. Scores are computed
// transposed, S^T = K Q^T, so that P^T and dS^T feed dV += P^T dO and dK += dS^T Q from registers;
// dS also goes to shared memory, where both warpgroups take it for dQ^T = K^T dS^T one tile later,
// so that neither waits for the other. dQ is added up in global memory: in float32, or
// deterministic in fixed point (see backward_rows.cuh).
namespace distca::attention::sm90 {
namespace {

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Memory = BackwardMemory<Shape>;
  const uint32_t shared = shared_address(in_block(0));
  if ((shared & 1023) != 0) __trap();
  const bool forms_stats = Shape::kVisiting && arguments.parts[1].arrivals.flags;
  if (threadIdx.x == 0) init_barriers(shared + Memory::kBarriers, forms_stats);
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    give_registers<Shape::kFeedRegisters>();
    BackwardFeed<Shape> feed{arguments, shared};
    if (threadIdx.x == 0) feed.bring_keys();
    if (threadIdx.x == 32) feed.bring_queries();
    if (threadIdx.x == 64) feed.take_grads();
    if constexpr (Shape::kVisiting) {
      if (threadIdx.x >= 96 && forms_stats) feed.bring_stats();
    }
  } else {
    take_registers<Shape::kKeyRegisters>();
    KeyWarpgroup<Shape> keys{arguments,
                             shared,
                             warpgroup - 1,
                             static_cast<int>(threadIdx.x % 128) / 32,
                             static_cast<int>(threadIdx.x % 32),
                             arguments.softmax_scale * kLog2E};
    keys.run();
  }
#endif
}

// A part without key blocks leaves its maps empty: nothing reads them.
template <typename Shape>
BackwardItems items_of(const BackwardPart& part, int32_t* ticket, int32_t first_tile) {
  const auto heads_kv = static_cast<int32_t>(part.k.heads);
  BackwardItems items{.tiles = part.tiles.tiles,
                      .blocks = part.tiles.blocks,
                      .ticket = ticket,
                      .num_items = part.tiles.num_blocks * heads_kv,
                      .heads_kv = heads_kv,
                      .first_sum = first_tile * static_cast<int32_t>(part.q.heads),
                      .lse = part.lse,
                      .delta = part.delta,
                      .arrivals = part.arrivals};
  if (items.num_items == 0) return items;
  items.q = make_ragged_map(part.q, Shape::kRows);
  items.k = make_ragged_map(part.k, kKeyBlockRows);
  items.v = make_ragged_map(part.v, kKeyBlockRows);
  items.grad_out = make_ragged_map(part.grad_out, Shape::kRows);
  items.dk = make_ragged_map(part.dk, kKeyBlockRows);
  items.dv = make_ragged_map(part.dv, kKeyBlockRows);
  return items;
}

template <typename Shape>
BackwardItems home_items(const BackwardCall& call) {
  return items_of<Shape>(call.home, call.tickets, 0);
}
template <typename Shape>
BackwardItems visiting_items(const BackwardCall& call) {
  return items_of<Shape>(call.visiting, call.tickets + 1, call.home.tiles.num_tiles);
}

template <typename Shape>
void launch(const BackwardCall& call, const BackwardItems& first, const BackwardItems& second,
            cudaStream_t stream) {
  constexpr uint32_t kSharedBytes = BackwardMemory<Shape>::kBytes;
  const auto heads_q = static_cast<int32_t>(call.home.q.heads);
  const auto heads_kv = static_cast<int32_t>(call.home.k.heads);
  const BackwardArguments arguments{.parts = {first, second},
                                    .heads_q = heads_q,
                                    .heads_kv = heads_kv,
                                    .heads_per_key = heads_q / heads_kv,
                                    .row_stats = call.row_stats,
                                    .dq_sums = call.dq_sums,
                                    .window = call.window,
                                    .softmax_scale = call.softmax_scale};
  const int num_blocks = std::min(first.num_items + second.num_items, num_multiprocessors());
  launch_kernel(backward_kernel<Shape>, {num_blocks, Shape::kThreads, kSharedBytes}, stream,
                arguments);
}

void check_arrivals(const BackwardCall& call) {
  if (!call.visiting.arrivals.flags) return;
  if (!call.visiting.delta || call.deterministic) {
    throw std::invalid_argument(
        "visiting rows are waited for without delta or in deterministic mode, which both need them "
        "before the kernel starts; give delta, or launch when all rows are here");
  }
}

}  // namespace

BackwardSizes backward_sizes(const BackwardCall& call) {
  const RowTensor& q = call.home.q;
  const DeviceTiles &home = call.home.tiles, &visiting = call.visiting.tiles;
  const int64_t num_tiles = (int64_t{home.num_tiles} + visiting.num_tiles) * q.heads;
  const int64_t num_runs = int64_t{home.num_runs} + visiting.num_runs;
  const int32_t rows = backward_tile_rows(q.head_dim);
  return {.dq_sums = num_tiles * rows * computed_head_dim(q.head_dim) * 4,
          .row_stats = num_tiles * 3 * 4 * stats_pitch(rows),
          .bounds = num_runs * call.home.k.heads * 2 * 4};
}

void backward(const BackwardCall& call, cudaStream_t stream) {
  check_arrivals(call);
  prepare_rows(call, stream);
  by_element_and_head_dim(call.home.q, [&]<typename T, int kHeadDim>() {
    if (call.deterministic) {
      using Shape = BackwardShape<T, kHeadDim, true, false>;
      launch<Shape>(call, home_items<Shape>(call), {}, stream);
      launch<Shape>(call, visiting_items<Shape>(call), {}, stream);
    } else if (call.visiting.tiles.num_blocks > 0) {
      using Shape = BackwardShape<T, kHeadDim, false, true>;
      launch<Shape>(call, home_items<Shape>(call), visiting_items<Shape>(call), stream);
    } else {
      using Shape = BackwardShape<T, kHeadDim, false, false>;
      launch<Shape>(call, home_items<Shape>(call), {}, stream);
    }
  });
  finish_dq(call, stream);
}

}  // namespace distca::attention::sm90
