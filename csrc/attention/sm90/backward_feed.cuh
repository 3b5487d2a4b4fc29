#pragma once

#include "backward_shape.cuh"
#include "order.cuh"

// The threads of the backward kernel that move data: one takes tickets and brings keys and values,
// one brings queries and dO, one takes dK and dV away.
namespace distca::attention::sm90 {

// Run by run, so that the queries in use stay in cache; in a run as many heads at once as give
// every multiprocessor several items, the longest first.
__device__ __forceinline__ BackwardItem item_of(int32_t ticket,
                                                const BackwardArguments& arguments) {
  const KeyBlock* any = arguments.blocks + ticket / arguments.heads_kv;
  const int32_t first = any->first_of_run, count = any->num_of_run;
  const HeadGroup group =
      head_group(ticket - first * arguments.heads_kv, count, arguments.heads_kv, 1);
  const KeyBlock& block = arguments.blocks[first + group.in_group / group.num_heads];
  return {block.k_row,
          block.num_rows,
          group.first_head + group.in_group % group.num_heads,
          (block.last_tile - block.first_tile) * arguments.heads_per_key,
          block.first_tile,
          block.last_tile};
}

template <typename Shape>
struct BackwardFeed {
  using Memory = BackwardMemory<Shape>;
  using Keys = typename Shape::Keys;
  using Queries = typename Shape::Queries;

  const BackwardArguments& arguments;
  uint32_t shared;

  __device__ __forceinline__ uint32_t barrier(uint32_t which, uint32_t i) const {
    return shared + Memory::barrier(which, i);
  }

  // The n-th item, once it is known; num_rows is -1 after the last.
  __device__ __forceinline__ const BackwardItem& item(uint32_t n) const {
    barrier_wait(barrier(kItemFull, n), phase_of(n));
    return in_block<BackwardItem>(Memory::kItems)[n & 1];
  }

  __device__ __forceinline__ void load_keys(const CUtensorMap* map, uint32_t full, uint32_t to,
                                            const RowRange& rows) {
    barrier_arrive_expecting(full, Keys::kBytes);
    load_tile<Keys>(shared + to, map, rows, full);
  }

  __device__ __forceinline__ void load_queries(uint32_t i, int32_t index, const RowRange& rows) {
    constexpr uint32_t kVector = Memory::kVectorBytes;
    const uint32_t full = barrier(kQueryFull, i);
    const float* stats =
        arguments.row_stats + static_cast<int64_t>(index) * 3 * stats_pitch(Shape::kRows);
    barrier_arrive_expecting(full, Queries::kBytes + (Shape::kDeterministic ? 3 : 2) * kVector);
    load_tile<Queries>(shared + Memory::query(i), &arguments.q, rows, full);
    copy_bytes_to_shared(shared + Memory::stats(i), stats, 2 * kVector, full);
    if constexpr (Shape::kDeterministic) {
      copy_bytes_to_shared(shared + Memory::quanta(i), stats + 2 * stats_pitch(Shape::kRows),
                           kVector, full);
    }
  }

  __device__ __forceinline__ void load_grad_out(uint32_t i, const RowRange& rows) {
    barrier_arrive_expecting(barrier(kGradOutFull, i), Queries::kBytes);
    load_tile<Queries>(shared + Memory::grad_out(i), &arguments.grad_out, rows,
                       barrier(kGradOutFull, i));
  }

  // Takes the next ticket when the last queries of the item before have been asked for: early
  // enough to hide the way of the keys, late enough to leave work to blocks that are ahead, and not
  // before the other thread has read that item.
  __device__ __forceinline__ void bring_keys() {
    for (uint32_t n = 0;; ++n) {
      if (n > 0) barrier_wait_idle(barrier(kItemAsked, n - 1), phase_of(n - 1));
      const int32_t ticket = atomicAdd(arguments.ticket, 1);
      BackwardItem next{.num_rows = -1};
      if (ticket < arguments.num_items) next = item_of(ticket, arguments);
      barrier_wait(barrier(kSlotEmpty, n), phase_of(n) ^ 1);
      in_block<BackwardItem>(Memory::kItems)[n & 1] = next;
      barrier_arrive(barrier(kItemFull, n));
      if (next.num_rows < 0) return;
      const RowRange rows{next.key_head, next.k_row, next.num_rows};
      load_keys(&arguments.k, barrier(kKeyFull, n), Memory::key(n), rows);
      load_keys(&arguments.v, barrier(kValueFull, n), Memory::value(n), rows);
    }
  }

  __device__ __forceinline__ void bring_tile(uint32_t i, int32_t t, int32_t head) {
    const QueryTile tile = arguments.tiles[t];
    const RowRange rows{head, tile.q_row, tile.num_rows};
    const int32_t index = t * arguments.heads_q + head;
    const uint32_t was_free = phase_of(i) ^ 1;
    barrier_wait(barrier(kQueryEmpty, i), was_free);
    in_block<StagedTile>(Memory::kTiles)[i & 1] = {tile.position, tile.k_begin, tile.k_end, index};
    load_queries(i, index, rows);
    barrier_wait(barrier(kGradOutEmpty, i), was_free);
    load_grad_out(i, rows);
  }

  __device__ __forceinline__ void bring_queries() {
    uint32_t i = 0;
    for (uint32_t n = 0;; ++n) {
      const BackwardItem& from = item(n);  // read again as needed: registers are few
      if (from.num_rows < 0) return;
      int32_t t = from.first_tile, head = from.key_head * arguments.heads_per_key;
#pragma unroll 1
      for (const uint32_t end = i + from.num_tiles; i != end; ++i) {
        bring_tile(i, t, head);
        if (++t == from.last_tile) {
          t = from.first_tile;
          ++head;
        }
      }
      barrier_arrive(barrier(kItemAsked, n));
    }
  }

  // dK and dV stand where the item's keys and values were.
  __device__ __forceinline__ void take_grads() {
    for (uint32_t n = 0;; ++n) {
      const BackwardItem from = item(n);
      if (from.num_rows < 0) return;
      const RowRange rows{from.key_head, from.k_row, from.num_rows};
      barrier_wait_idle(barrier(kSlotStaged, n), phase_of(n));
      store_tile<Keys>(&arguments.dv, rows, shared + Memory::value(n));
      store_tile<Keys>(&arguments.dk, rows, shared + Memory::key(n));
      copies_commit();
      copies_wait_read();
      barrier_arrive(barrier(kSlotEmpty, n));
    }
  }
};

}  // namespace distca::attention::sm90
