#pragma once

#include "backward_shape.cuh"
#include "order.cuh"

// The warps of the backward kernel that move data: a thread of one takes tickets and brings keys
// and values, of one brings queries and dO, of one takes dK and dV away; one brings row statistics.
namespace distca::attention::sm90 {

// Run by run, so that the queries in use stay in cache; in a run as many heads at once as give
// every multiprocessor several items, the longest first.
template <bool kVisiting>
__device__ __forceinline__ BackwardItem item_of(int32_t number,
                                                const BackwardArguments& arguments) {
  const int32_t part = kVisiting && number >= arguments.parts[0].num_items;
  if (part == 1) number -= arguments.parts[0].num_items;
  const KeyBlock* blocks = arguments.parts[part].blocks;
  const KeyBlock* any = blocks + number / arguments.heads_kv;
  const int32_t first = any->first_of_run, count = any->num_of_run;
  const HeadGroup group =
      head_group(number - first * arguments.heads_kv, count, arguments.heads_kv, 1);
  const KeyBlock& block = blocks[first + group.in_group / group.num_heads];
  return {block.k_row,
          block.num_rows,
          group.first_head + group.in_group % group.num_heads,
          (block.last_tile - block.first_tile) * arguments.heads_per_key,
          block.first_tile,
          block.last_tile,
          part,
          block.run};
}

__device__ __forceinline__ RowRange rows_of(const BackwardItem& item) {
  return {item.key_head, item.k_row, item.num_rows};
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

  __device__ __forceinline__ const BackwardItems& part_of(const BackwardItem& item) const {
    return arguments.parts[Shape::kVisiting ? item.part : 0];
  }

  // The n-th item, once it is known; num_rows is -1 after the last.
  __device__ __forceinline__ const BackwardItem& item(uint32_t n) const {
    barrier_wait(barrier(kItemFull, n), phase_of(n));
    return in_block<BackwardItem>(Memory::kItems)[n & 1];
  }

  template <typename Tile>
  __device__ __forceinline__ void bring(const CUtensorMap* map, uint32_t full, uint32_t to,
                                        const RowRange& rows) {
    barrier_arrive_expecting(full, Tile::kBytes);
    load_tile<Tile>(shared + to, map, rows, full);
  }

  // Takes the next ticket when the last queries of the item before have been asked for: early
  // enough to hide the way of the keys, late enough to leave work to blocks that are ahead, and not
  // before the other thread has read that item.
  __device__ __forceinline__ void bring_keys() {
    for (uint32_t n = 0;; ++n) {
      if (n > 0) barrier_wait_idle(barrier(kItemAsked, n - 1), phase_of(n - 1));
      const int32_t ticket = take_ticket<Shape::kVisiting>(arguments.parts);
      const int32_t number = settle_item<Shape::kVisiting>(ticket, arguments.parts);
      barrier_wait(barrier(kSlotEmpty, n), phase_of(n) ^ 1);
      BackwardItem& item = in_block<BackwardItem>(Memory::kItems)[n & 1];
      item.num_rows = -1;
      if (number != kNoItem) {
        item = item_of<Shape::kVisiting>(number, arguments);
        if constexpr (Shape::kVisiting) await(arguments.parts[item.part].arrivals, item.run);
      }
      barrier_arrive(barrier(kItemFull, n));
      if (item.num_rows < 0) return;
      const BackwardItems& part = part_of(item);
      bring<Keys>(&part.k, barrier(kKeyFull, n), Memory::key(n), rows_of(item));
      bring<Keys>(&part.v, barrier(kValueFull, n), Memory::value(n), rows_of(item));
    }
  }

  // Calls bring(i, part, tile, head) for the i-th tile of all, item by item, and end(n) after those
  // of the n-th. What the item says is read again as needed: registers are few.
  template <typename Bring, typename End>
  __device__ __forceinline__ void for_each_tile(const Bring& bring, const End& end) {
    uint32_t i = 0;
    for (uint32_t n = 0;; ++n) {
      const BackwardItem& from = item(n);
      if (from.num_rows < 0) return;
      if constexpr (Shape::kVisiting) fence_arrivals();
      int32_t t = from.first_tile, head = from.key_head * arguments.heads_per_key;
#pragma unroll 1
      for (const uint32_t last = i + from.num_tiles; i != last; ++i) {
        bring(i, from.part, t, head);
        if (++t == from.last_tile) {
          t = from.first_tile;
          ++head;
        }
      }
      end(n);
    }
  }

  // Statistics as prepare_rows left them.
  __device__ __forceinline__ void load_stats(uint32_t i, int32_t index) {
    constexpr uint32_t kVector = Memory::kVectorBytes;
    const uint32_t full = barrier(kQueryFull, i);
    const float* stats = arguments.row_stats + int64_t{index} * 3 * stats_pitch(Shape::kRows);
    barrier_arrive_expecting(full, (Shape::kDeterministic ? 3 : 2) * kVector);
    copy_bytes_to_shared(shared + Memory::stats(i), stats, 2 * kVector, full);
    if constexpr (Shape::kDeterministic) {
      copy_bytes_to_shared(shared + Memory::quanta(i), stats + 2 * stats_pitch(Shape::kRows),
                           kVector, full);
    }
  }

  __device__ __forceinline__ void bring_tile(uint32_t i, const BackwardItems& part, int32_t t,
                                             int32_t head) {
    const QueryTile tile = part.tiles[t];
    const RowRange rows{head, tile.q_row, tile.num_rows};
    const int32_t index = part.first_sum + t * arguments.heads_q + head;
    const uint32_t was_free = phase_of(i) ^ 1;
    barrier_wait(barrier(kQueryEmpty, i), was_free);
    in_block<StagedTile>(Memory::kTiles)[i & 1] = {tile.position, tile.k_begin, tile.k_end, index};
    bring<Queries>(&part.q, barrier(kQueryFull, i), Memory::query(i), rows);
    if (!Shape::kVisiting || !part.arrivals.flags) load_stats(i, index);
    barrier_wait(barrier(kGradOutEmpty, i), was_free);
    bring<Queries>(&part.grad_out, barrier(kGradOutFull, i), Memory::grad_out(i), rows);
  }

  __device__ __forceinline__ void bring_queries() {
    // Places of tensor maps that are known when compiled take no registers.
    const auto bring = [&](uint32_t i, int32_t part, int32_t t, int32_t head) {
      if (Shape::kVisiting && part == 1) {
        bring_tile(i, arguments.parts[1], t, head);
      } else {
        bring_tile(i, arguments.parts[0], t, head);
      }
    };
    for_each_tile(bring, [&](uint32_t n) { barrier_arrive(barrier(kItemAsked, n)); });
  }

  // Statistics of rows that come while the kernel runs, as prepare_rows has them of others; by a
  // warp. The first 32 are read before their place is free, the others while the queries themselves
  // are on their way.
  __device__ __forceinline__ void form_stats(uint32_t i, const BackwardItems& part, int32_t t,
                                             int32_t head) {
#pragma unroll 1
    for (int row = threadIdx.x % 32; row < Shape::kRows; row += 32) {
      float lse = -INFINITY, delta = 0.f;
      if (row < part.tiles[t].num_rows) {
        const int64_t at = int64_t{part.tiles[t].q_row + row} * arguments.heads_q + head;
        lse = load_in_order(part.lse + at);
        delta = load_in_order(part.delta + at);
      }
      barrier_wait(barrier(kQueryEmpty, i), phase_of(i) ^ 1);
      float* to = in_block<float>(Memory::stats(i)) + stats_index<Shape::kRows>(row);
      to[0] = lse == -INFINITY ? INFINITY : lse * kLog2E;
      to[stats_pitch(Shape::kRows)] = -delta;
    }
    arrive_as_warp(barrier(kQueryFull, i));
  }

  // Only where visiting rows come while the kernel runs.
  __device__ __forceinline__ void bring_stats() {
    const auto bring = [&](uint32_t i, int32_t part, int32_t t, int32_t head) {
      if (part == 1) form_stats(i, arguments.parts[1], t, head);
    };
    for_each_tile(bring, [&](uint32_t n) { arrive_as_warp(barrier(kItemAsked, n)); });
  }

  // dK and dV stand where the item's keys and values were.
  __device__ __forceinline__ void take_grads() {
    for (uint32_t n = 0;; ++n) {
      const BackwardItem from = item(n);
      if (from.num_rows < 0) return;
      const RowRange rows = rows_of(from);
      barrier_wait_idle(barrier(kSlotStaged, n), phase_of(n));
      const BackwardItems& part = part_of(from);
      store_tile<Keys>(&part.dv, rows, shared + Memory::value(n));
      store_tile<Keys>(&part.dk, rows, shared + Memory::key(n));
      copies_commit();
      copies_wait_read();
      barrier_arrive(barrier(kSlotEmpty, n));
    }
  }
};

}  // namespace distca::attention::sm90
