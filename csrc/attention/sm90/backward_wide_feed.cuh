#pragma once

#include "backward_feed.cuh"

namespace distca::attention::sm90 {

// The feed of a block of a pair.
template <typename Shape>
struct WideFeed : BackwardFeed<Shape> {
  using Feed = BackwardFeed<Shape>;
  using Feed::arguments, Feed::grad_out_ring, Feed::item, Feed::ring, Feed::shared,
      Feed::single_ring, Feed::stage_ring;
  using typename Feed::Memory, typename Feed::Keys, typename Feed::Values;
  using GradScores = typename Shape::GradScores;
  using PartnerKeys = typename Shape::PartnerKeys;
  using Use = StageUse<Shape::kStages>;
  static constexpr int32_t kTilesAhead = 4;  // see take_items

  // Returns the n-th ticket of the pair; num_items or more if none is left. The leader takes the
  // ticket, and sends it once the partner has read the previous one.
  __device__ __forceinline__ int32_t ticket(const Turn& turn, uint32_t n) {
    const Pair pair;
    const auto full = single_ring(kTicketFull), read = single_ring(kTicketRead);
    const uint32_t slot = shared + Memory::kTicket;
    if (pair.leads()) {
      const int32_t number = Feed::take_ticket(turn);
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

  // Takes the next ticket when at most kTilesAhead tiles of the previous item are left to request.
  // That is early enough to hide the latency of the ticket and the keys, and late enough to leave
  // work to blocks that are ahead. By then, no thread of the feed still reads the item whose slot
  // the next one takes.
  __device__ __forceinline__ void take_items() {
    const Turn turn(arguments.num_in_turn);
    for (uint32_t n = 0;; ++n) {
      if (n > 0) ring(kItemAsked).wait_idle(n - 1);
      const int32_t number = ticket(turn, n);
      BackwardItem next{.num_rows = -1};
      if (number < arguments.num_items) next = item_of<Shape>(number, arguments, cluster_rank());
      ring(kItemEmpty).wait_before(n);
      Feed::item_slot(n) = next;
      ring(kItemFull).arrive(n);
      if (next.num_rows < 0) return;
    }
  }

  // Brings keys and values of an item at `use`. The barrier of queries expects two arrivals, and
  // keys come without statistics, so this thread arrives twice.
  __device__ __forceinline__ void bring_keys_of(const BackwardItem& from,
                                                const TileBuffers<Shape>& buffers, Use use) {
    stage_ring(kQueryEmpty).wait_before(use);
    const uint32_t key_full = stage_ring(kQueryFull).barrier(use);
    barrier_arrive(key_full);
    Feed::template bring<Keys>(&arguments.k, key_full, buffers.keys(), rows_of(from));
    const auto value_use = buffers.grad_out_use(use);
    grad_out_ring(kGradOutEmpty).wait_before(value_use);
    Feed::template bring<Values>(&arguments.v, grad_out_ring(kGradOutFull).barrier(value_use),
                                 buffers.values(), rows_of(from));
  }

  // Brings keys, values, queries and dO, which share stages. One thread brings all of
  // them, in order: a wait sees only the parity of a barrier's phase, so a thread that skipped a
  // use of a stage could mistake an earlier use for the one it waits for. An item without tiles
  // needs no keys.
  __device__ __forceinline__ void bring_tiles() {
    TileBuffers<Shape> buffers;
    Use use;
    uint32_t i = 0;
    for (uint32_t n = 0;; ++n) {
      const BackwardItem& from = item(n);
      if (from.num_rows < 0) return;
      if (from.num_tiles <= kTilesAhead) ring(kItemAsked).arrive(n);
      if (from.num_tiles == 0) continue;
      buffers.take_keys(use);
      bring_keys_of(from, buffers, use);
      use = use.next();
      Feed::for_tiles(from, [&](int32_t t, int32_t head) {
        const auto tiles_before = [&] {  // the item's tiles before tile (t, head)
          const int32_t heads_before = head - from.key_head * arguments.heads_per_key;
          return heads_before * (from.last_tile - from.first_tile) + t - from.first_tile;
        };
        if (from.num_tiles > kTilesAhead && tiles_before() == from.num_tiles - kTilesAhead) {
          ring(kItemAsked).arrive(n);
        }
        Feed::bring_tile(
            TilePlace{use, buffers.grad_out_use(use), buffers.queries(use), buffers.grad_outs(use)},
            i, t, head, [&] { return tiles_before() < kStatStages; });
        use = use.next();
        ++i;
      });
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
      ring(kItemAsked).arrive(n);
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

  // Brings those columns of the partner's keys for which this block computes dQ: see Pair.
  __device__ __forceinline__ void bring_partner_keys() {
    const Pair pair;
    uint32_t num_brought = 0;
    for (uint32_t n = 0;; ++n) {
      const BackwardItem& from = item(n);
      if (from.num_rows < 0) return;
      const RowRange rows{from.key_head, from.partner_row, from.num_partner_rows};
      const bool has_tiles = from.num_tiles > 0;
      ring(kItemAsked).arrive(n);
      if (!has_tiles) continue;
      const uint32_t full = single_ring(kPartnerKeyFull).barrier(num_brought);
      const uint32_t to = shared + Memory::kPartnerKey;
      const auto bring_piece = [&](uint32_t panel, int piece) {
        copy_to_shared(to + panel * PartnerKeys::kPanelBytes, &arguments.k,
                       {kPieceColumns * piece, rows.head, rows.row, rows.num_rows}, full);
      };
      single_ring(kPartnerKeyEmpty).wait_before(num_brought++);
      barrier_arrive_expecting(full, PartnerKeys::kBytes);
      bring_piece(0, pair.piece<Keys::kPanels>(0));
      bring_piece(1, pair.piece<Keys::kPanels>(1));
    }
  }
};

}  // namespace distca::attention::sm90
