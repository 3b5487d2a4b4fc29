#pragma once

#include <type_traits>

#include "backward_feed.cuh"
#include "backward_sums.cuh"
#include "backward_wide.cuh"
#include "backward_wide_feed.cuh"
#include "launch.cuh"

// Persistent blocks take tickets, each for an item: a block of keys and a kv head. The item's keys,
// values, dK and dV stay on the multiprocessor, while all query tiles that see the keys pass by, of
// every task and every query head of the kv head. So dK and dV are written once. Two warpgroups own
// 64 keys each. Scores are computed transposed, S^T = K Q^T, so that P^T and dS^T feed dV += P^T dO
// and dK += dS^T Q from registers. dS also goes to shared memory. Both warpgroups read it there for
// dQ^T = K^T dS^T, one tile later, so that neither waits for the other. dQ is added up in global
// memory: in float32, or in deterministic mode in fixed point (see backward_rows.cuh). With heads
// wider than 128, a block takes 64 keys at a time (backward_wide.cuh), and two blocks work as a
// pair (backward_pair.cuh).
namespace distca::attention::sm90 {

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Memory = BackwardMemory<Shape>;
  const uint32_t shared = shared_address(in_block(0));
  if (shared % kPanelAlignment != 0) __trap();
  if (threadIdx.x == 0) init_barriers<Shape>(shared);
  write_ones<Shape>();
  if constexpr (Shape::kIsWide) {
    __syncwarp();
    cluster_sync();
  } else {
    __syncthreads();
  }
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    give_registers<Shape::kFeedRegisters>();
    using Feed = std::conditional_t<Shape::kIsWide, WideFeed<Shape>, NarrowFeed<Shape>>;
    Feed feed{{{arguments, shared}}};
    if constexpr (Shape::kIsWide) {
      if (threadIdx.x == 0) feed.take_items();
      if (threadIdx.x == 32) feed.bring_tiles();
      if (threadIdx.x == 64) feed.send_grad_scores();
      if (threadIdx.x == 96) feed.bring_partner_keys();
    } else {
      if (threadIdx.x == 0) feed.bring_keys();
      if (threadIdx.x == 32) feed.bring_queries();
      if (threadIdx.x == 64) feed.take_grads();
    }
  } else {
    take_registers<Shape::kKeyRegisters>();
    using Warpgroup = std::conditional_t<Shape::kIsWide, WideWarpgroup<Shape>, KeyWarpgroup<Shape>>;
    Warpgroup keys{{{arguments, shared},
                    warpgroup - 1,
                    static_cast<int>(threadIdx.x % 128) / 32,
                    in_register(threadIdx.x % 32),
                    score_log2<Shape>(arguments)}};
    keys.run();
  }
  if constexpr (Shape::kIsWide) {  // the partner may still send or arrive
    __syncwarp();
    cluster_sync();
  }
#endif
}

template <typename Shape>
void launch(const BackwardCall& call, cudaStream_t stream) {
  constexpr uint32_t kSharedBytes = BackwardMemory<Shape>::kBytes;
  const auto heads_q = static_cast<int32_t>(call.q.heads);
  const auto heads_kv = static_cast<int32_t>(call.k.heads);
  static_assert(Shape::kBlocks * Shape::kKeyRows == kKeyBlockRows);
  const int32_t num_items = call.tiles.num_blocks * heads_kv;
  const Blocks blocks = blocks_for(num_items, call.flops, call.shares_device, Shape::kBlocks);
  const BackwardArguments arguments{
      .q = make_ragged_map(call.q, Shape::kRows),
      .k = make_ragged_map(call.k, Shape::kKeyRows),
      .v = make_ragged_map(call.v, Shape::kKeyRows),
      .grad_out = make_ragged_map(call.grad_out, Shape::kRows),
      .staged_dk = Shape::kIsWide ? CUtensorMap{} : make_ragged_map(call.dk, Shape::kKeyRows),
      .staged_dv = Shape::kIsWide ? CUtensorMap{} : make_ragged_map(call.dv, Shape::kKeyRows),
      .dk = call.dk,
      .dv = call.dv,
      .tiles = call.tiles.tiles,
      .blocks = call.tiles.blocks,
      .ticket = call.ticket,
      .num_items = num_items,
      .num_in_turn = blocks.num_in_turn,
      .heads_q = heads_q,
      .heads_kv = heads_kv,
      .heads_per_key = heads_q / heads_kv,
      .row_stats = call.row_stats,
      .dq_sums = call.dq_sums,
      .window = call.window,
      .softmax_scale = call.softmax_scale,
      .cap = softcap_of(call)};
  launch_kernel(backward_kernel<Shape>,
                {blocks.count, Shape::kThreads, kSharedBytes, Shape::kBlocks}, stream, arguments);
}

// The backward kernel for capped scores, without what surrounds it.
void backward_capped(const BackwardCall& call, cudaStream_t stream);

}  // namespace distca::attention::sm90
