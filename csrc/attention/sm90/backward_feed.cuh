#pragma once

#include "backward_shape.cuh"
#include "order.cuh"
#include "turns.cuh"

// The warps of the backward kernel that move data, by one thread each. The first takes tickets and
// brings keys and values, and the second brings queries and dO. Up to head_dim 128, the third
// stores dK and dV. In a pair, the fourth sends dS to the partner.
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
  return {block.k_row + first_row,
          max(0, min(kKeyRows, block.num_rows - first_row)),
          group.first_head + group.in_group % group.num_heads,
          (block.last_tile - block.first_tile) * arguments.heads_per_key,
          block.first_tile,
          block.last_tile};
}

template <typename Shape>
struct BackwardFeed : BackwardThread<Shape> {
  using Thread = BackwardThread<Shape>;
  using Thread::arguments, Thread::grad_out_ring, Thread::item, Thread::ring, Thread::shared,
      Thread::slot_ring, Thread::stage_ring;
  using Memory = BackwardMemory<Shape>;
  using Keys = typename Shape::Keys;
  using Values = typename Shape::Values;
  using Queries = typename Shape::Queries;
  using GradOuts = typename Shape::GradOuts;
  using GradScores = typename Shape::GradScores;
  using PartnerKeys = typename Shape::PartnerKeys;

  // `full` also expects `more_bytes`, which the caller must copy.
  template <typename Tile>
  __device__ __forceinline__ void bring(const CUtensorMap* map, uint32_t full, uint32_t to,
                                        const RowRange& rows, uint32_t more_bytes = 0) {
    barrier_arrive_expecting(full, Tile::kBytes + more_bytes);
    load_tile<Tile>(shared + to, map, rows, full);
  }

  // Returns the n-th ticket of a block or pair; num_items or more if none is left. In a pair, the
  // leader takes the ticket, and sends it once the partner has read the previous one.
  __device__ __forceinline__ int32_t ticket(const Turn& turn, [[maybe_unused]] uint32_t n) {
    const auto take = [&] {
      return turn.is_over() ? arguments.num_items : atomicAdd(arguments.ticket, 1);
    };
    if constexpr (!Shape::kIsWide) {
      return take();
    } else {
      const Pair pair;
      const auto full = ring_of<Shape, 1>(shared, kTicketFull);
      const auto read = ring_of<Shape, 1>(shared, kTicketRead);
      const uint32_t slot = shared + Memory::kTicket;
      if (pair.leads()) {
        const int32_t number = take();
        read.wait_before(n);
        send_there(pair.partner(slot), number, pair.partner(full.barrier(n)));
        return number;
      }
      barrier_arrive_expecting(full.barrier(n), sizeof(int32_t));
      full.wait(n);
      const int32_t number = *in_block<volatile int32_t>(Memory::kTicket);
      barrier_arrive_there(pair.partner(read.barrier(n)));
      return number;
    }
  }

  // Brings those columns of the partner's keys for which this block computes dQ: see Pair.
  __device__ __forceinline__ void bring_partner_keys(uint32_t n, int32_t number) {
    const Pair pair;
    const RowRange rows = rows_of(item_of<Shape>(number, arguments, pair.other()));
    const uint32_t full = slot_ring(kKeyFull).barrier(n), to = shared + Memory::kPartnerKey;
    const auto bring_piece = [&](uint32_t panel, int piece) {
      copy_to_shared(to + panel * PartnerKeys::kPanelBytes, &arguments.k,
                     {kPieceColumns * piece, rows.head, rows.row, rows.num_rows}, full);
    };
    barrier_arrive_expecting(full, PartnerKeys::kBytes);
    bring_piece(0, pair.piece<Keys::kPanels>(0));
    bring_piece(1, pair.piece<Keys::kPanels>(1));
  }

  // Takes the next ticket when the last queries of the previous item have been requested. That is
  // early enough to hide the latency of the keys, and late enough to leave work to blocks that are
  // ahead. By then, the threads that read the previous item in place have done so.
  __device__ __forceinline__ void bring_keys() {
    const Turn turn(arguments.num_in_turn);
    for (uint32_t n = 0;; ++n) {
      if (n > 0) slot_ring(kItemAsked).wait_idle(n - 1);
      const int32_t number = ticket(turn, n);
      BackwardItem next{.num_rows = -1};
      if (number < arguments.num_items) {
        next = item_of<Shape>(number, arguments, Shape::kIsWide ? cluster_rank() : 0);
      }
      slot_ring(kSlotEmpty).wait_before(n);
      Thread::item_slot(n) = next;
      slot_ring(kItemFull).arrive(n);
      if (next.num_rows < 0) return;
      bring<Keys>(&arguments.k, slot_ring(kKeyFull).barrier(n), Memory::key(n), rows_of(next));
      bring<Values>(&arguments.v, slot_ring(kValueFull).barrier(n), Memory::value(n),
                    rows_of(next));
      if constexpr (Shape::kIsWide) bring_partner_keys(n, number);
    }
  }

  __device__ __forceinline__ void bring_stats(uint32_t i, const uint8_t* stats) {
    const uint32_t full = stage_ring(kQueryFull).barrier(i);
    barrier_arrive_expecting(full, Memory::kStatsBytes);
    copy_bytes_to_shared(shared + Memory::stats(i), stats, Memory::kStatsBytes, full);
  }

  // The barrier of queries also counts the rows' statistics, and that of dO their quanta. Once the
  // stage of dO is empty, both warpgroups have read the quanta that are replaced. With three
  // stages, statistics still have two, so they are copied last.
  __device__ __forceinline__ void bring_tile(uint32_t i, int32_t t, int32_t head) {
    constexpr uint32_t kQuantaBytes = Shape::kDeterministic ? Memory::kQuantaBytes : 0;
    const QueryTile tile = arguments.tiles[t];
    const RowRange rows{head, tile.q_row, tile.num_rows};
    const int32_t index = t * arguments.heads_q + head;
    const uint8_t* stats = arguments.row_stats + int64_t{index} * row_stats_bytes(Shape::kRows);
    stage_ring(kQueryEmpty).wait_before(i);
    in_block<StagedTile>(Memory::kTiles)[Ring<Shape::kStages>::stage(i)] = {
        tile.position, tile.k_begin, tile.k_end, index};
    bring<Queries>(&arguments.q, stage_ring(kQueryFull).barrier(i), Memory::query(i), rows);
    if constexpr (Shape::kStages == kStatStages) bring_stats(i, stats);
    grad_out_ring(kGradOutEmpty).wait_before(i);
    const uint32_t grad_out_full = grad_out_ring(kGradOutFull).barrier(i);
    bring<GradOuts>(&arguments.grad_out, grad_out_full, Memory::grad_out(i), rows, kQuantaBytes);
    if constexpr (Shape::kDeterministic) {
      copy_bytes_to_shared(shared + Memory::quanta(i), stats + quanta_offset(Shape::kRows),
                           kQuantaBytes, grad_out_full);
    }
    if constexpr (Shape::kStages > kStatStages) {
      stage_ring(kQueryEmpty).wait_before(i + Shape::kStages - kStatStages);
      bring_stats(i, stats);
    }
  }

  // `i` counts the tiles of all items. The item is read from shared memory whenever it is needed,
  // because registers are few.
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

  // Sends dS of every tile to the partner as soon as it is in shared memory. By then the partner
  // has given back the buffer that it goes to: dS of a tile is stored only after kGradScoreEmpty,
  // which counts the partner's warps, too.
  __device__ __forceinline__ void send_grad_scores() {
    const Pair pair;
    uint32_t i = 0;
    for (uint32_t n = 0;; ++n) {
      const BackwardItem& from = item(n);
      if (from.num_rows < 0) return;
      const uint32_t last = i + from.num_tiles;
      slot_ring(kItemAsked).arrive(n);
#pragma unroll 1
      for (; i != last; ++i) {
        const uint32_t full = ring(kPartnerFull).barrier(i);
        ring(kGradScoreFull).wait(i);
        barrier_arrive_expecting(full, GradScores::kBytes);  // for what the partner sends
        copy_there(pair.partner(shared + Memory::partner_score(i)), shared + Memory::grad_score(i),
                   GradScores::kBytes, pair.partner(full));
      }
    }
  }

  // Stores dK and dV, which have taken the place of the item's keys and values.
  __device__ __forceinline__ void take_grads() {
    for (uint32_t n = 0;; ++n) {
      const BackwardItem from = item(n);
      if (from.num_rows < 0) return;
      const RowRange rows = rows_of(from);
      slot_ring(kSlotStaged).wait_idle(n);
      store_tile<Values>(&arguments.staged_dv, rows, shared + Memory::value(n));
      store_tile<Keys>(&arguments.staged_dk, rows, shared + Memory::key(n));
      copies_commit();
      copies_wait_read();
      slot_ring(kSlotEmpty).arrive(n);
    }
  }
};

}  // namespace distca::attention::sm90
