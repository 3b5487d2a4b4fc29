#pragma once

#include "backward_shape.cuh"
#include "order.cuh"
#include "turns.cuh"

// The warps of the backward kernel that move data: a thread of one takes tickets and brings keys
// and values, of one brings queries and dO, of one takes dK and dV away.
namespace distca::attention::sm90 {

// Run by run, so that the queries in use stay in cache; in a run as many heads at once as give
// every multiprocessor several items, the longest first.
template <typename Shape>
__device__ __forceinline__ BackwardItem item_of(int32_t number,
                                                const BackwardArguments& arguments) {
  constexpr int32_t kKeyRows = Shape::kKeyRows;
  constexpr int32_t kParts = kKeyBlockRows / kKeyRows;  // of a block
  static_assert(!Shape::kSkipsUnseen || kKeyRows == kKeyPartRows);
  const KeyBlock* any = arguments.blocks + number / (arguments.heads_kv * kParts);
  const int32_t first = any->first_of_run, count = any->num_of_run;
  const HeadGroup group = head_group(number - first * kParts * arguments.heads_kv, count * kParts,
                                     arguments.heads_kv, 1);
  const int32_t part = group.in_group / group.num_heads;
  const KeyBlock& block = arguments.blocks[first + part / kParts];
  const int32_t first_row = part % kParts * kKeyRows;
  int32_t first_tile = block.first_tile, last_tile = block.last_tile;
  if constexpr (Shape::kSkipsUnseen) {
    if (first_row == 0) {
      last_tile -= block.unseen_by_first;
    } else {
      first_tile += block.unseen_by_second;
    }
  }
  return {block.k_row + first_row,
          kParts == 1 ? block.num_rows : max(0, min(kKeyRows, block.num_rows - first_row)),
          group.first_head + group.in_group % group.num_heads,
          (last_tile - first_tile) * arguments.heads_per_key,
          first_tile,
          last_tile};
}

__device__ __forceinline__ RowRange rows_of(const BackwardItem& item) {
  return {item.key_head, item.k_row, item.num_rows};
}

template <typename Shape>
struct BackwardFeed {
  using Memory = BackwardMemory<Shape>;
  using Keys = typename Shape::Keys;
  using Values = typename Shape::Values;
  using Queries = typename Shape::Queries;
  using GradOuts = typename Shape::GradOuts;

  const BackwardArguments& arguments;
  uint32_t shared;

  __device__ __forceinline__ Ring<2> ring(BackwardBarrier which) const {
    return ring_at(shared + Memory::kBarriers, which);
  }
  __device__ __forceinline__ Ring<Shape::kStages> stage_ring(BackwardBarrier which) const {
    return ring_at<Shape::kStages>(shared + Memory::kBarriers, which);
  }
  __device__ __forceinline__ Ring<Shape::kSlots> slot_ring(BackwardBarrier which) const {
    return ring_at<Shape::kSlots>(shared + Memory::kBarriers, which);
  }

  __device__ __forceinline__ BackwardItem& item_slot(uint32_t n) const {
    return in_block<BackwardItem>(Memory::kItems)[Ring<Shape::kSlots>::stage(n)];
  }

  // The n-th item, once it is known; num_rows is -1 after the last.
  __device__ __forceinline__ const BackwardItem& item(uint32_t n) const {
    slot_ring(kItemFull).wait(n);
    return item_slot(n);
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
    const Turn turn(arguments.num_in_turn);
    for (uint32_t n = 0;; ++n) {
      if (n > 0) slot_ring(kItemAsked).wait_idle(n - 1);
      const int32_t number = turn.is_over() ? arguments.num_items : atomicAdd(arguments.ticket, 1);
      slot_ring(kSlotEmpty).wait_before(n);
      BackwardItem& item = item_slot(n);
      item.num_rows = -1;
      if (number < arguments.num_items) item = item_of<Shape>(number, arguments);
      slot_ring(kItemFull).arrive(n);
      if (item.num_rows < 0) return;
      bring<Keys>(&arguments.k, slot_ring(kKeyFull).barrier(n), Memory::key(n), rows_of(item));
      bring<Values>(&arguments.v, slot_ring(kValueFull).barrier(n), Memory::value(n),
                    rows_of(item));
    }
  }

  // Statistics as prepare_rows left them.
  __device__ __forceinline__ void load_stats(uint32_t i, int32_t index) {
    constexpr uint32_t kVector = Memory::kVectorBytes;
    const uint32_t full = stage_ring(kQueryFull).barrier(i);
    const float* stats = arguments.row_stats + int64_t{index} * 3 * stats_pitch(Shape::kRows);
    barrier_arrive_expecting(full, (Shape::kDeterministic ? 3 : 2) * kVector);
    copy_bytes_to_shared(shared + Memory::stats(i), stats, 2 * kVector, full);
    if constexpr (Shape::kDeterministic) {
      copy_bytes_to_shared(shared + Memory::quanta(i), stats + 2 * stats_pitch(Shape::kRows),
                           kVector, full);
    }
  }

  __device__ __forceinline__ void bring_tile(uint32_t i, int32_t t, int32_t head) {
    const QueryTile tile = arguments.tiles[t];
    const RowRange rows{head, tile.q_row, tile.num_rows};
    const int32_t index = t * arguments.heads_q + head;
    stage_ring(kQueryEmpty).wait_before(i);
    in_block<StagedTile>(Memory::kTiles)[Ring<Shape::kStages>::stage(i)] = {
        tile.position, tile.k_begin, tile.k_end, index};
    bring<Queries>(&arguments.q, stage_ring(kQueryFull).barrier(i), Memory::query(i), rows);
    load_stats(i, index);
    stage_ring(kGradOutEmpty).wait_before(i);
    bring<GradOuts>(&arguments.grad_out, stage_ring(kGradOutFull).barrier(i), Memory::grad_out(i),
                    rows);
  }

  // Item by item, the i-th tile of all. What the item says is read again as needed: registers are
  // few.
  __device__ __forceinline__ void bring_queries() {
    uint32_t i = 0;
    for (uint32_t n = 0;; ++n) {
      const BackwardItem& from = item(n);
      if (from.num_rows < 0) return;
      int32_t t = from.first_tile, head = from.key_head * arguments.heads_per_key;
#pragma unroll 1
      for (const uint32_t last = i + from.num_tiles; i != last; ++i) {
        bring_tile(i, t, head);
        if (++t == from.last_tile) {
          t = from.first_tile;
          ++head;
        }
      }
      slot_ring(kItemAsked).arrive(n);
    }
  }

  // dK and dV stand where the item's keys and values were.
  __device__ __forceinline__ void take_grads() {
    for (uint32_t n = 0;; ++n) {
      const BackwardItem from = item(n);
      if (from.num_rows < 0) return;
      const RowRange rows = rows_of(from);
      slot_ring(kSlotStaged).wait_idle(n);
      store_tile<Values>(&arguments.dv, rows, shared + Memory::value(n));
      store_tile<Keys>(&arguments.dk, rows, shared + Memory::key(n));
      copies_commit();
      copies_wait_read();
      slot_ring(kSlotEmpty).arrive(n);
    }
  }
};

}  // namespace distca::attention::sm90
