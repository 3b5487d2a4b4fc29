#pragma once

#include "backward_tile.cuh"

namespace distca::attention::sm90 {

// The warpgroups of the backward kernel for heads so wide that dK and dV of 64 keys do not fit in
// the registers of one. The first computes P and sums up dV, and the second computes dS and sums up
// dK. P goes from one to the other through shared memory, thread by thread, because both hold the
// same elements of a product. Each computes a piece of dQ over the keys of a pair of blocks.
//
// With three stages, the next item's keys and first queries may arrive while this item's last tile
// is being processed, so the next item's first product begins before this item's last dQ.
template <typename Shape>
struct WideWarpgroup : TileSteps<Shape> {
  using Steps = TileSteps<Shape>;
  using typename Steps::Keys, typename Steps::Memory, typename Steps::T;
  using Queries = typename Shape::Queries;
  using GradOuts = typename Shape::GradOuts;
  using Steps::arguments, Steps::begin_grads, Steps::begin_scores, Steps::exponentiate,
      Steps::grad_out_ring, Steps::kScores, Steps::lane, Steps::mask, Steps::multiply_keys,
      Steps::needs_mask, Steps::pack_all, Steps::ring, Steps::shared, Steps::single_ring,
      Steps::stage_ring, Steps::staged_tile, Steps::store_grad_scores, Steps::subtract_log_sums,
      Steps::warp, Steps::warpgroup;
  using typename Steps::Sum;
  // Whether the block computes dQ's middle piece for half of its queries: see backward_pair.cuh.
  static constexpr bool kHasMiddle = Keys::kPanels == 3;
  // This warpgroup's piece of the block's two, and the registers for it.
  template <bool kIsValues>
  static constexpr int kOfMine = kIsValues ? 1 : 0;
  template <bool kIsValues>
  static constexpr int kDq = (kIsValues && kHasMiddle) ? 16 : 32;
  static constexpr int kParts = 4;  // in which a piece is added: see add_part
  static constexpr bool kBeginsNextItem = Shape::kStages > 2;
  using Use = StageUse<Shape::kStages>;

  TileBuffers<Shape> buffers;
  // Of the current tile. Between items, of the next keys or, if has_scores, of the next tile.
  Use use;
  bool has_scores = false;  // whether the next item's first product is done

  __device__ __forceinline__ void wait_for_queries(Use use) const {
    stage_ring(kQueryFull).wait(use);
  }
  __device__ __forceinline__ void wait_for_grad_outs(Use use) const {
    grad_out_ring(kGradOutFull).wait(buffers.grad_out_use(use));
  }
  __device__ __forceinline__ void give_queries_back(Use use) const {
    stage_ring(kQueryEmpty).arrive_as_warp(use);
  }
  __device__ __forceinline__ void give_grad_outs_back(Use use) const {
    grad_out_ring(kGradOutEmpty).arrive_as_warp(buffers.grad_out_use(use));
  }

  // Returns where this thread's probabilities are passed on, four at a time, 128 float4 apart.
  __device__ __forceinline__ float4* passed() const {
    return in_block<float4>(Memory::kProbability) + 32 * warp + lane;
  }

  __device__ __forceinline__ void pass_on(const float (&scores)[kScores], uint32_t i) {
    single_ring(kProbabilityEmpty).wait_before(i);
#pragma unroll
    for (int e = 0; e < kScores / 4; ++e) {
      passed()[128 * e] = {scores[4 * e], scores[4 * e + 1], scores[4 * e + 2], scores[4 * e + 3]};
    }
    single_ring(kProbabilityFull).arrive_as_warp(i);
  }

  // Multiplies by what the other warpgroup has passed on, and calls `midway` when half is done.
  template <typename Midway>
  __device__ __forceinline__ void multiply_by_passed(float (&grads)[kScores], uint32_t i,
                                                     Midway midway) {
    single_ring(kProbabilityFull).wait(i);
#pragma unroll
    for (int e = 0; e < kScores / 4; ++e) {
      if (e == kScores / 8) midway();
      const float4 factors = passed()[128 * e];
      grads[4 * e] *= factors.x;
      grads[4 * e + 1] *= factors.y;
      grads[4 * e + 2] *= factors.z;
      grads[4 * e + 3] *= factors.w;
    }
    single_ring(kProbabilityEmpty).arrive_as_warp(i);
  }

  // Begins the product of scores or dP - delta of tile i, which is at `use`; asynchronous. If
  // `is_there` is false, the item has no more tiles, and the result is not used.
  template <bool kIsValues>
  __device__ __forceinline__ void begin_tile(float (&scores)[kScores], Use use, uint32_t i,
                                             bool is_there) {
    if (is_there) {
      wait_for_queries(use);
      if constexpr (!kIsValues) wait_for_grad_outs(use);
    }
    if constexpr (kIsValues) {
      begin_scores(scores, buffers.keys(), buffers.queries(use), i);
    } else {
      begin_grads(scores, buffers.values(), buffers.grad_outs(use), i);
    }
  }

  // Waits for the next item's keys and values, and takes them. Their stages get the buffers of the
  // previous keys and values. This warp no longer reads the previous values, so it gives their
  // buffer back. The caller gives back that of the previous keys, after the last dQ that needs
  // them.
  __device__ __forceinline__ void begin_item(Use use) {
    buffers.take_keys(use);
    wait_for_queries(use);
    wait_for_grad_outs(use);
    give_grad_outs_back(use);
  }

  // Turns scores of tile i into P, and passes it on to the other warpgroup.
  template <typename Midway>
  __device__ __forceinline__ void finish_probabilities(float (&scores)[kScores],
                                                       uint32_t (&packed)[kScores / 2],
                                                       const StagedTile& tile,
                                                       const BackwardItem& item, Use use,
                                                       uint32_t i, Midway midway) {
    [[maybe_unused]] float factors[kScores];  // of dP - delta in dS
    if constexpr (Shape::kIsCapped) {
      cap_scores(scores, arguments.cap);
#pragma unroll
      for (int e = 0; e < kScores; ++e) factors[e] = slope_at(scores[e]);
      subtract_log_sums(scores, i);
    }
    if (needs_mask(tile, item.k_row)) mask(scores, tile, item.k_row);
    exponentiate(scores, midway);
    give_queries_back(use);
    if constexpr (Shape::kIsCapped) {
#pragma unroll
      for (int e = 0; e < kScores; ++e) factors[e] *= scores[e];
      pass_on(factors, i);
    } else {
      pass_on(scores, i);
    }
    pack_all(scores, packed);
    wait_for_grad_outs(use);
  }

  // Turns dP - delta of tile i into dS, and stores it for dQ.
  template <typename Midway>
  __device__ __forceinline__ void finish_grads(float (&grads)[kScores],
                                               uint32_t (&packed)[kScores / 2], Use use, uint32_t i,
                                               Midway midway) {
    give_grad_outs_back(use);
    multiply_by_passed(grads, i, midway);
    pack_all(grads, packed);
    ring(kGradScoreEmpty).wait_before(i);
    store_grad_scores(packed, i);
    ring(kGradScoreFull).arrive_as_warp(i);
  }

  // Gives back the buffers of dS of tile i, which this warp has read. Both blocks may then reuse
  // the buffers that they sent from and sent to.
  __device__ __forceinline__ void give_grad_scores_back(uint32_t i) const {
    ring(kGradScoreEmpty).arrive_as_warp(i);
    if (elect_thread()) barrier_arrive_there(Pair().partner(ring(kGradScoreEmpty).barrier(i)));
  }

  // Adds part kPart of a piece of dQ, if `is_there`. A warp waits while its multiprocessor has too
  // many additions under way, so parts are added with other work in between.
  template <int kPart, int kSize>
  __device__ __forceinline__ void add_part(const float (&dq)[kSize], Sum* sums, bool is_there) {
    constexpr int kPartSize = kSize / kParts;
    Steps::template add_dq<kPart * kPartSize, (kPart + 1) * kPartSize>(dq, sums, is_there);
  }

  // Sums up dV or dK over the tiles of item n, of which `first` is the first. Adds this warpgroup's
  // piece of dQ one tile later, and the last two of its four parts two tiles later. The first
  // warpgroup computes dV before dQ, so that the next dO arrives early. The next tile's first
  // product overlaps the first additions. But where dO has a single stage, the second warpgroup
  // makes these before it waits for the next dO. If has_scores is set on entry, `scores` already
  // holds the first product of this item. If it is set on return, `scores` holds that of the next.
  template <bool kIsValues, int kSize>
  __device__ __forceinline__ void sum_up(float (&sums)[kSize], float (&scores)[kScores],
                                         const BackwardItem& item, uint32_t n, uint32_t first) {
    const uint32_t end = first + item.num_tiles;
    int32_t index = 0;
    float dq[kDq<kIsValues>];
    Sum* dq_sums = nullptr;
    if (!kBeginsNextItem || !has_scores) {
      begin_item(use);
      give_queries_back(use);  // the buffer of the previous item's keys
      use = use.next();
      begin_tile<kIsValues>(scores, use, first, true);
      products_wait<0>();
      pin(scores);
    }
    has_scores = false;
    const uint32_t keys = buffers.keys(), parity = buffers.parity();
    uint32_t queries = buffers.queries(use), grad_outs = buffers.grad_outs(use);
#pragma unroll 1
    for (uint32_t i = first; i < end; ++i) {
      uint32_t packed[kScores / 2];
      if constexpr (Shape::kHeadDim == 256) buffers.forget_offsets();  // registers are few
      const StagedTile tile = staged_tile(use.stage());
      const bool has_parts_left = i > first + 1;
      const auto midway = [&] { add_part<2>(dq, dq_sums, has_parts_left); };
      if constexpr (kIsValues) {
        finish_probabilities(scores, packed, tile, item, use, i, midway);
      } else {
        finish_grads(scores, packed, use, i, midway);
      }
      add_part<3>(dq, dq_sums, has_parts_left);
      const auto begin_dq_before = [&] {
        if (i == first + 1) single_ring(kPartnerKeyFull).wait(parity);
        begin_dq<kIsValues>(dq, keys, i - 1);
      };
      Use next_use = use.next();
      const auto begin_next = [&] {
        bool is_there = i + 1 < end;
        if constexpr (kBeginsNextItem) {
          if (!is_there && Steps::item(n + 1).num_tiles > 0) {
            begin_item(next_use);
            next_use = next_use.next();
            is_there = has_scores = true;
          }
        }
        begin_tile<kIsValues>(scores, next_use, i + 1, is_there);
      };
      const auto begin_additions = [&] {
        if (i == first) return;  // there is no tile before the first
        give_grad_scores_back(i - 1);
        dq_sums = finish_mine<kIsValues>(dq, i - 1, index);
        add_part<0>(dq, dq_sums, true);
      };
      if constexpr (kIsValues) {
        Steps::template begin_sums<GradOuts>(sums, packed, grad_outs);
        begin_dq_before();
        begin_next();
        products_wait<2>();
        pin(sums);
        give_grad_outs_back(use);
        products_wait<1>();
        pin(dq);
        begin_additions();
      } else {
        begin_dq_before();
        Steps::template begin_sums<Queries>(sums, packed, queries);
        products_wait<1>();
        pin(dq);
        if constexpr (Shape::kGradOutStages > 1) begin_next();
        begin_additions();
        if constexpr (Shape::kGradOutStages == 1) begin_next();
        products_wait<1>();
        pin(sums);
        give_queries_back(use);
      }
      products_wait<0>();
      pin(scores);
      add_part<1>(dq, dq_sums, i > first);
      index = tile.index;
      use = next_use;
      queries = buffers.queries(use);
      grad_outs = buffers.grad_outs(use);
    }
    add_part<2>(dq, dq_sums, item.num_tiles > 1);
    add_part<3>(dq, dq_sums, item.num_tiles > 1);
    single_ring(kPartnerKeyFull).wait(parity);
    begin_dq<kIsValues>(dq, keys, end - 1);
    products_wait<0>();
    pin(dq);
    give_grad_scores_back(end - 1);
    single_ring(kPartnerKeyEmpty).arrive_as_warp(parity);
    if constexpr (kBeginsNextItem) {
      if (has_scores) give_queries_back(use.previous());  // the buffer of this item's keys
    }
    dq_sums = finish_mine<kIsValues>(dq, end - 1, index);
    Steps::template add_dq<0, kDq<kIsValues>>(dq, dq_sums);
  }

  // Returns the index in dQ of this warpgroup's piece.
  template <bool kIsValues>
  static __device__ __forceinline__ int piece() {
    return Pair().piece<Keys::kPanels>(kOfMine<kIsValues>);
  }

  // Returns the first query for which this warpgroup computes its piece.
  template <bool kIsValues>
  static __device__ __forceinline__ int first_query() {
    return kIsValues && kHasMiddle ? Pair().first_query() : 0;
  }

  // Begins the products for this warpgroup's piece of dQ of tile i, once dS of both blocks is
  // there; asynchronous. For the tile before the item's first, the result is not used.
  template <bool kIsValues>
  __device__ __forceinline__ void begin_dq(float (&dq)[kDq<kIsValues>], uint32_t keys, uint32_t i) {
    const uint32_t queries = shared + first_query<kIsValues>() * sizeof(T);
    const uint32_t own = shared + keys + piece<kIsValues>() * Keys::kPanelBytes;
    const uint32_t partner =
        shared + Memory::kPartnerKey + kOfMine<kIsValues> * Shape::PartnerKeys::kPanelBytes;
    ring(kGradScoreFull).wait(i);
    ring(kPartnerFull).wait(i);
    pin(dq);
    products_begin();
    multiply_keys(dq, operand_at(own, 0), operand_at(queries + Memory::grad_score(i), 0), false);
    multiply_keys(dq, operand_at(partner, 0), operand_at(queries + Memory::partner_score(i), 0),
                  true);
    products_commit();
  }

  // The same as finish_piece, for this warpgroup's piece.
  template <bool kIsValues>
  __device__ __forceinline__ Sum* finish_mine(float (&dq)[kDq<kIsValues>], uint32_t i,
                                              int32_t index) {
    return Steps::finish_piece(dq, i, index, piece<kIsValues>(), first_query<kIsValues>());
  }

  template <bool kIsValues>
  __device__ __forceinline__ void run_as() {
    const float scale = kIsValues ? 1.f : arguments.softmax_scale;
    float scores[kScores];
    uint32_t num_tiles = 0;
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
      const BackwardItem item = Steps::item(n);
      if (item.num_rows < 0) return;
      ring(kItemEmpty).arrive_as_warp(n);
      float sums[(kIsValues ? Shape::kValueDim : Shape::kHeadDim) / 2] = {};
      if (item.num_tiles > 0) sum_up<kIsValues>(sums, scores, item, n, num_tiles);
      num_tiles += item.num_tiles;
      store_rows<T>(kIsValues ? arguments.dv : arguments.dk, rows_of(item), sums, {scale, scale});
    }
  }

  __device__ __forceinline__ void run() {
    warpgroup == 0 ? run_as<true>() : run_as<false>();
  }
};

}  // namespace distca::attention::sm90
