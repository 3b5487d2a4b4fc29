#pragma once

#include "backward_shape.cuh"
#include "order.cuh"
#include "turns.cuh"

// The warps of the backward kernel that move data. One thread of each does the work. Up to head_dim
// 128, the first warp takes tickets and brings keys and values, the second brings queries and dO,
// and the third stores dK and dV. Above 128, the first takes tickets, the second brings keys,
// values, queries and dO, the third sends dS to the partner, and the fourth brings columns of the
// partner's keys.
namespace distca::attention::sm90 {

// Returns the item of ticket `number`. Items are ordered run by run, so that the queries in use
// stay in cache. In a run, as many heads are taken at once as give every multiprocessor several
// items, longest first. A pair takes two items with one ticket, one for each `rank`.
template <typename Shape>
__device__ __forceinline__ BackwardItem item_of(int32_t number, const BackwardArguments& arguments,
                                                uint32_t rank) {
  constexpr int32_t kKeyRows = Shape::kKeyRows;
  const KeyBlock* any = arguments.blocks + number / arguments.heads_kv;
  const int32_t first = any->first_of_run, count = any->num_of_run;
  const HeadGroup group = head_group(number - first * arguments.heads_kv, count, arguments.heads_kv,
                                     1, Shape::kItemsOfGroup);
  const KeyBlock& block = arguments.blocks[first + group.in_group / group.num_heads];
  const int32_t first_row = static_cast<int32_t>(rank) * kKeyRows;
  const int32_t partner_row = static_cast<int32_t>(1 - rank) * kKeyRows;
  return {block.k_row + first_row,
          max(0, min(kKeyRows, block.num_rows - first_row)),
          block.k_row + partner_row,
          max(0, min(kKeyRows, block.num_rows - partner_row)),
          group.first_head + group.in_group % group.num_heads,
          (block.last_tile - block.first_tile) * arguments.heads_per_key,
          block.first_tile,
          block.last_tile};
}

// Where a tile of queries and dO goes: uses of stages, and offsets in shared memory.
template <typename QueryUse, typename GradOutUse>
struct TilePlace {
  QueryUse query_use;
  GradOutUse grad_out_use;
  uint32_t queries;
  uint32_t grad_outs;
};

// What the feeds of narrow and wide shapes share.
template <typename Shape>
struct BackwardFeed : BackwardThread<Shape> {
  using Thread = BackwardThread<Shape>;
  using Thread::arguments, Thread::grad_out_ring, Thread::shared, Thread::stage_ring;
  using Memory = BackwardMemory<Shape>;
  using Keys = typename Shape::Keys;
  using Values = typename Shape::Values;
  using Queries = typename Shape::Queries;
  using GradOuts = typename Shape::GradOuts;

  // `full` also expects `more_bytes`, which the caller must copy.
  template <typename Tile>
  __device__ __forceinline__ void bring(const CUtensorMap* map, uint32_t full, uint32_t to,
                                        const RowRange& rows, uint32_t more_bytes = 0) {
    barrier_arrive_expecting(full, Tile::kBytes + more_bytes);
    load_tile<Tile>(shared + to, map, rows, full);
  }

  __device__ __forceinline__ int32_t take_ticket(const Turn& turn) const {
    return turn.is_over() ? arguments.num_items : atomicAdd(arguments.ticket, 1);
  }

  // Copies the statistics of tile i.
  __device__ __forceinline__ void bring_stats(uint32_t full, uint32_t i, const uint8_t* stats) {
    barrier_arrive_expecting(full, Memory::kStatsBytes);
    copy_bytes_to_shared(shared + Memory::stats(i), stats, Memory::kStatsBytes, full);
  }

  // Brings tile t of a query head. `i` counts the tiles of all items. The barrier of queries also
  // counts the rows' statistics, and that of dO their quanta. Once the stage of dO is empty, both
  // warpgroups have read the quanta that are replaced. Statistics have two stages. With three
  // stages of queries, a stage may be empty before the statistics of tile i - 2 have been read. So
  // these are replaced last, after a wait for that tile. If is_early(), keys have taken a stage
  // since that tile. Tile i then gets that tile's stage, which has been found empty already.
  template <typename Place, typename IsEarly>
  __device__ __forceinline__ void bring_tile(const Place& place, uint32_t i, int32_t t,
                                             int32_t head, IsEarly is_early) {
    constexpr uint32_t kQuantaBytes = Shape::kDeterministic ? Memory::kQuantaBytes : 0;
    const QueryTile tile = arguments.tiles[t];
    const RowRange rows{head, tile.q_row, tile.num_rows};
    const int32_t index = t * arguments.heads_q + head;
    // in_register keeps the compiler from computing the address before it is needed.
    const auto stats = [&] {
      return arguments.row_stats + int64_t{in_register(index)} * row_stats_bytes(Shape::kRows);
    };
    const auto query_empty = stage_ring(kQueryEmpty);
    const auto query_full = stage_ring(kQueryFull);
    query_empty.wait_before(place.query_use);
    Thread::staged_tile(query_full.stage(place.query_use)) = {tile.position, tile.k_begin,
                                                              tile.k_end, index};
    const uint32_t full = query_full.barrier(place.query_use);
    bring<Queries>(&arguments.q, full, place.queries, rows);
    if constexpr (Shape::kStages == kStatStages) bring_stats(full, i, stats());
    grad_out_ring(kGradOutEmpty).wait_before(place.grad_out_use);
    const uint32_t grad_out_full = grad_out_ring(kGradOutFull).barrier(place.grad_out_use);
    bring<GradOuts>(&arguments.grad_out, grad_out_full, place.grad_outs, rows, kQuantaBytes);
    if constexpr (Shape::kDeterministic) {
      copy_bytes_to_shared(shared + Memory::quanta(i), stats() + quanta_offset(Shape::kRows),
                           kQuantaBytes, grad_out_full);
    }
    if constexpr (Shape::kStages > kStatStages) {
      if (!is_early()) query_empty.wait_before(place.query_use.next());
      bring_stats(full, i, stats());
    }
  }

  // Calls visit(t, head) for every tile of an item. The item is read from shared memory whenever it
  // is needed, because registers are few.
  template <typename Visit>
  __device__ __forceinline__ void for_tiles(const BackwardItem& from, Visit visit) {
    if (from.num_tiles == 0) return;
    int32_t t = from.first_tile, head = from.key_head * arguments.heads_per_key;
#pragma unroll 1
    while (head != (from.key_head + 1) * arguments.heads_per_key) {
      visit(t, head);
      if (++t == from.last_tile) {
        t = from.first_tile;
        ++head;
      }
    }
  }
};

// The feed up to head_dim 128.
template <typename Shape>
struct NarrowFeed : BackwardFeed<Shape> {
  static_assert(Shape::kStages == 2 && Shape::kGradOutStages == 2);
  using Feed = BackwardFeed<Shape>;
  using Feed::arguments, Feed::item, Feed::ring, Feed::shared;
  using typename Feed::Memory, typename Feed::Keys, typename Feed::Values;

  // Takes the next ticket when the last queries of the previous item have been requested. That is
  // early enough to hide the latency of the keys, and late enough to leave work to blocks that are
  // ahead. By then, bring_queries no longer reads the item whose slot the next one takes.
  __device__ __forceinline__ void bring_keys() {
    const Turn turn(arguments.num_in_turn);
    for (uint32_t n = 0;; ++n) {
      if (n > 0) ring(kItemAsked).wait_idle(n - 1);
      const int32_t number = Feed::take_ticket(turn);
      BackwardItem next{.num_rows = -1};
      if (number < arguments.num_items) next = item_of<Shape>(number, arguments, 0);
      ring(kItemEmpty).wait_before(n);
      Feed::item_slot(n) = next;
      ring(kItemFull).arrive(n);
      if (next.num_rows < 0) return;
      Feed::template bring<Keys>(&arguments.k, ring(kKeyFull).barrier(n), Memory::key(n),
                                 rows_of(next));
      Feed::template bring<Values>(&arguments.v, ring(kValueFull).barrier(n), Memory::value(n),
                                   rows_of(next));
    }
  }

  __device__ __forceinline__ void bring_queries() {
    uint32_t i = 0;
    for (uint32_t n = 0;; ++n) {
      const BackwardItem& from = item(n);
      if (from.num_rows < 0) return;
      Feed::for_tiles(from, [&](int32_t t, int32_t head) {
        Feed::bring_tile(TilePlace{i, i, Memory::query(i % 2), Memory::grad_out(i % 2)}, i, t, head,
                         [] { return false; });
        ++i;
      });
      ring(kItemAsked).arrive(n);
    }
  }

  // Stores dK and dV, which have taken the place of the item's keys and values.
  __device__ __forceinline__ void take_grads() {
    for (uint32_t n = 0;; ++n) {
      const BackwardItem from = item(n);
      if (from.num_rows < 0) return;
      const RowRange rows = rows_of(from);
      ring(kItemStaged).wait_idle(n);
      store_tile<Values>(&arguments.staged_dv, rows, shared + Memory::value(n));
      store_tile<Keys>(&arguments.staged_dk, rows, shared + Memory::key(n));
      copies_commit();
      copies_wait_read();
      ring(kItemEmpty).arrive(n);
    }
  }
};

}  // namespace distca::attention::sm90
