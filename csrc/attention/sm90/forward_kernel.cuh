#pragma once

#include "forward_feed.cuh"
#include "forward_warpgroup.cuh"
#include "launch.cuh"

// Persistent blocks take tickets, a (tile, head) each, longest first. One thread turns tickets into
// jobs, and another copies queries, keys and values to shared memory. Warpgroups of 64 query rows
// each compute softmax(Q K^T) V, one block of keys after another. The softmax of a block of keys
// overlaps the product of the block before it, and the products of other warpgroups. The first
// scores of a job are computed while the previous job's results are written.
namespace distca::attention::sm90 {

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Memory = ForwardMemory<Shape>;
  using Barriers = ForwardBarriers<Shape>;
  const uint32_t shared = shared_address(in_block(0));
  const uint32_t barriers = shared + Memory::kBarriers;
  if (shared % kPanelAlignment != 0) __trap();
  if (threadIdx.x == 0) {
    constexpr uint32_t kWarps = 4 * Shape::kWarpgroups;
    constexpr uint32_t kStorers = Shape::kHoldsQueries ? Shape::kWarpgroups : 0;
    for (uint32_t i = 0; i < Barriers::kCount; ++i) {
      const bool is_empty = (i >= Barriers::kQueryEmpty && i < Barriers::kKeyFull) ||
                            (i >= Barriers::kKeyEmpty && i < Barriers::kValueFull) ||
                            (i >= Barriers::kValueEmpty && i < Barriers::kJobFull);
      const bool by_storers = Shape::kHoldsQueries && i < Barriers::kKeyFull;
      const uint32_t num_arrivals = i >= Barriers::kJobEmpty ? kWarps + 1 + kStorers
                                    : !is_empty              ? 1
                                    : by_storers             ? kStorers
                                                             : kWarps;
      barrier_init(ring_at(barriers, i).barrier(0), num_arrivals);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    give_registers<Shape::kProducerRegisters>();
    ForwardProducer<Shape> producer{arguments, shared, barriers};
    if (threadIdx.x == 0) producer.run();
    if (threadIdx.x == 32) take_tickets<Shape>(arguments, barriers);
    if constexpr (Shape::kHoldsQueries) {
      static_assert(2 + Shape::kWarpgroups <= 4);
      if (threadIdx.x >= 64) store_results<Shape>(arguments, shared, barriers);
    }
  } else {
    take_registers<Shape::kRegisters>();
    ForwardConsumer<Shape> consumer{arguments,
                                    shared,
                                    barriers,
                                    warpgroup - 1,
                                    static_cast<int>(threadIdx.x % 128) / 32,
                                    static_cast<int>(threadIdx.x % 32),
                                    score_log2<Shape>(arguments)};
    consumer.run();
  }
#endif
}

template <typename Shape>
void launch(const ForwardCall& call, cudaStream_t stream) {
  static_assert(Shape::kRows == forward_tile_rows(Shape::kHeadDim));
  constexpr uint32_t kSharedBytes = ForwardMemory<Shape>::kBytes;
  const auto heads_q = static_cast<int32_t>(call.q.heads);
  const int32_t num_items = call.tiles.num_tiles * heads_q;
  const Blocks blocks = blocks_for(num_items, call.flops, call.shares_device);
  const ForwardArguments arguments{
      .q = make_ragged_map(call.q, 64),
      .k = make_ragged_map(call.k, Shape::kKeyRows),
      .v = make_ragged_map(call.v, Shape::kKeyRows),
      .staged_out = Shape::kHoldsQueries ? make_ragged_map(call.out, 64) : CUtensorMap{},
      .whole_k = make_plain_map(call.k, Shape::kKeyRows),
      .whole_v = make_plain_map(call.v, Shape::kKeyRows),
      .out = call.out,
      .tiles = call.tiles.tiles,
      .ticket = call.ticket,
      .fronts = call.fronts,
      .lse = call.lse,
      .num_items = num_items,
      .num_in_turn = blocks.num_in_turn,
      .heads_q = heads_q,
      .heads_per_key = static_cast<int32_t>(call.q.heads / call.k.heads),
      .window = call.window,
      .softmax_scale = call.softmax_scale,
      .cap = softcap_of(call)};
  launch_kernel(forward_kernel<Shape>, {blocks.count, Shape::kThreads, kSharedBytes}, stream,
                arguments);
}

template <typename T, int kHeadDim, int kValueDim>
struct ShapeOf;
template <typename T>
struct ShapeOf<T, 64, 64> : ForwardShape<T, 64, 64, 64, 4, 4, 112, 32> {};
template <typename T>
struct ShapeOf<T, 128, 128> : ForwardShape<T, 128, 128, 128, 3, 2, 232, 40> {};
template <typename T>
struct ShapeOf<T, 192, 128> : ForwardShape<T, 192, 128, 128, 2, 2, 232, 40> {};
template <typename T>
struct ShapeOf<T, 192, 192> : ForwardShape<T, 192, 192, 112, 2, 2, 232, 40> {};
template <typename T>
struct ShapeOf<T, 256, 256> : ForwardShape<T, 256, 256, 80, 2, 2, 232, 40> {};

void forward_capped(const ForwardCall& call, cudaStream_t stream);

}  // namespace distca::attention::sm90
