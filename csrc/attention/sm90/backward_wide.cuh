#pragma once

#include "backward_tile.cuh"

namespace distca::attention::sm90 {

// The warpgroups of the backward kernel for heads so wide that dK and dV of 64 keys do not fit in
// the registers of one. The first computes P and sums up dV, and the second computes dS and sums up
// dK. P goes from one to the other through shared memory, thread by thread, because both hold the
// same elements of a product. Each computes a share of dQ. In a pair of blocks, the share is over
// the keys of both.
template <typename Shape>
struct WideWarpgroup : TileSteps<Shape> {
  using Steps = TileSteps<Shape>;
  using typename Steps::Keys, typename Steps::Memory, typename Steps::T;
  using Queries = typename Shape::Queries;
  using Values = typename Shape::Values;
  using GradOuts = typename Shape::GradOuts;
  using Steps::arguments, Steps::begin_grads, Steps::begin_scores, Steps::exponentiate,
      Steps::kScores, Steps::lane, Steps::mask, Steps::multiply_dq, Steps::multiply_keys,
      Steps::needs_mask, Steps::pack_all, Steps::ring, Steps::shared, Steps::slot_ring,
      Steps::stage_ring, Steps::store_grad_scores, Steps::subtract_log_sums, Steps::warp,
      Steps::warpgroup;
  using typename Steps::Sum;
  // Pieces of dQ that a warpgroup computes.
  static constexpr int kPieces = Shape::kIsPaired ? 1 : Keys::kPanels / 2;
  // Registers for a piece of dQ. In a pair, the first warpgroup computes the middle piece, for half
  // of its 64 queries.
  template <bool kIsValues>
  static constexpr int kDq = (Shape::kIsPaired && kIsValues) ? 16 : 32;
  // Parts in which a warpgroup's last piece is added: see add_part. At 256 more than one gains
  // nothing.
  static constexpr int kParts = Shape::kIsPaired ? 4 : 1;

  __device__ __forceinline__ Ring<1> probability_ring(BackwardBarrier which) const {
    return ring_of<Shape, 1>(shared, which);
  }

  // Returns where this thread's probabilities are passed on, four at a time, 128 float4 apart.
  __device__ __forceinline__ float4* passed() const {
    return in_block<float4>(Memory::kProbability) + 32 * warp + lane;
  }

  __device__ __forceinline__ void pass_on(const float (&scores)[kScores], uint32_t i) {
    probability_ring(kProbabilityEmpty).wait_before(i);
#pragma unroll
    for (int e = 0; e < kScores / 4; ++e) {
      passed()[128 * e] = {scores[4 * e], scores[4 * e + 1], scores[4 * e + 2], scores[4 * e + 3]};
    }
    probability_ring(kProbabilityFull).arrive_as_warp(i);
  }

  // Multiplies by what the other warpgroup has passed on, and calls `midway` when half is done.
  template <typename Midway>
  __device__ __forceinline__ void multiply_by_passed(float (&grads)[kScores], uint32_t i,
                                                     Midway midway) {
    probability_ring(kProbabilityFull).wait(i);
#pragma unroll
    for (int e = 0; e < kScores / 4; ++e) {
      if (e == kScores / 8) midway();
      const float4 factors = passed()[128 * e];
      grads[4 * e] *= factors.x;
      grads[4 * e + 1] *= factors.y;
      grads[4 * e + 2] *= factors.z;
      grads[4 * e + 3] *= factors.w;
    }
    probability_ring(kProbabilityEmpty).arrive_as_warp(i);
  }

  // Begins the product of scores or dP - delta of tile i; asynchronous. Past the item's last tile,
  // where `is_there` is false, the result is not used.
  template <bool kIsValues>
  __device__ __forceinline__ void begin_tile(float (&scores)[kScores], uint32_t n, uint32_t i,
                                             bool is_there) {
    if (is_there) {
      stage_ring(kQueryFull).wait(i);
      if constexpr (!kIsValues) stage_ring(kGradOutFull).wait(i);
    }
    if constexpr (kIsValues) {
      begin_scores(scores, n, i);
    } else {
      begin_grads(scores, n, i);
    }
  }

  // Turns scores of tile i into P, and passes it on to the other warpgroup.
  template <typename Midway>
  __device__ __forceinline__ void finish_probabilities(float (&scores)[kScores],
                                                       uint32_t (&packed)[kScores / 2],
                                                       const StagedTile& tile,
                                                       const BackwardItem& item, uint32_t i,
                                                       Midway midway) {
    [[maybe_unused]] float factors[kScores];  // of dP - delta in dS
    if constexpr (Shape::kIsCapped) {
      cap_scores(scores, arguments.cap);
#pragma unroll
      for (int e = 0; e < kScores; ++e) factors[e] = slope_at(scores[e]);
      subtract_log_sums(scores, i);
    }
    if (needs_mask(tile, item.k_row)) mask(scores, tile, item.k_row);
    exponentiate(scores, midway);
    stage_ring(kQueryEmpty).arrive_as_warp(i);
    if constexpr (Shape::kIsCapped) {
#pragma unroll
      for (int e = 0; e < kScores; ++e) factors[e] *= scores[e];
      pass_on(factors, i);
    } else {
      pass_on(scores, i);
    }
    pack_all(scores, packed);
    stage_ring(kGradOutFull).wait(i);
  }

  // Turns dP - delta of tile i into dS, and stores it for dQ.
  template <typename Midway>
  __device__ __forceinline__ void finish_grads(float (&grads)[kScores],
                                               uint32_t (&packed)[kScores / 2], uint32_t i,
                                               Midway midway) {
    stage_ring(kGradOutEmpty).arrive_as_warp(i);
    multiply_by_passed(grads, i, midway);
    pack_all(grads, packed);
    ring(kGradScoreEmpty).wait_before(i);
    store_grad_scores(packed, i);
    ring(kGradScoreFull).arrive_as_warp(i);
  }

  // Waits for dS of tile i, in a pair for that of both blocks.
  __device__ __forceinline__ void wait_for_grad_scores(uint32_t i) const {
    ring(kGradScoreFull).wait(i);
    if constexpr (Shape::kIsPaired) ring(kPartnerFull).wait(i);
  }

  // Gives back the buffer of dS of tile i, which this warp has read. In a pair, the warp has read
  // dS of both blocks. So the partner may reuse the buffer that it sent from, and the one it sent
  // to.
  __device__ __forceinline__ void give_grad_scores_back(uint32_t i) const {
    ring(kGradScoreEmpty).arrive_as_warp(i);
    if constexpr (Shape::kIsPaired) {
      if (elect_thread()) barrier_arrive_there(Pair().partner(ring(kGradScoreEmpty).barrier(i)));
    }
  }

  // Adds part kPart of a piece of dQ, if the piece has so many and `is_there`. A warp waits while
  // its multiprocessor has too many additions under way, so parts are added with other work in
  // between.
  template <int kPart, int kSize>
  __device__ __forceinline__ void add_part(const float (&dq)[kSize], Sum* sums, bool is_there) {
    constexpr int kPartSize = kSize / kParts;
    if constexpr (kPart < kParts) {
      Steps::template add_dq<kPart * kPartSize, (kPart + 1) * kPartSize>(dq, sums, is_there);
    }
  }

  // Gives back the place of item n and its keys and values, which this warp has read. So the next
  // item's arrive while this one's last dQ, dK and dV are stored.
  __device__ __forceinline__ void give_slot_back(uint32_t n) const {
    slot_ring(kSlotEmpty).arrive_as_warp(n);
  }

  // Sums up dV or dK over the tiles of item n, of which `first` is the first. Adds this warpgroup's
  // pieces of dQ one tile later, and the last two of four parts two tiles later. The first product
  // of the next tile is begun before the additions and overlaps them. Pieces of dQ use the same
  // registers in turn.
  template <bool kIsValues, int kSize>
  __device__ __forceinline__ void sum_up(float (&sums)[kSize], const BackwardItem& item, uint32_t n,
                                         uint32_t first) {
    if (item.num_tiles == 0) return give_slot_back(n);
    const uint32_t end = first + item.num_tiles;
    int32_t index = 0;
    float scores[kScores], dq[kDq<kIsValues>];
    Sum* dq_sums = nullptr;
    begin_tile<kIsValues>(scores, n, first, true);
    products_wait<0>();
    pin(scores);
#pragma unroll 1
    for (uint32_t i = first; i < end; ++i) {
      uint32_t packed[kScores / 2];
      const StagedTile tile = in_block<StagedTile>(Memory::kTiles)[Ring<Shape::kStages>::stage(i)];
      const bool has_parts_left = i > first + 1;
      const auto midway = [&] { add_part<2>(dq, dq_sums, has_parts_left); };
      if constexpr (kIsValues) {
        finish_probabilities(scores, packed, tile, item, i, midway);
      } else {
        finish_grads(scores, packed, i, midway);
      }
      add_part<3>(dq, dq_sums, has_parts_left);
      wait_for_grad_scores(i - 1);
      begin_dq<kIsValues>(dq, n, i - 1, 0);  // of no use for the first tile
      if constexpr (kIsValues) {
        Steps::template begin_sums<GradOuts>(sums, packed, Memory::grad_out(i));
      } else {
        Steps::template begin_sums<Queries>(sums, packed, Memory::query(i));
      }
      products_wait<1>();
      pin(dq);
      if constexpr (kPieces == 2) {
        if (i > first) add_piece<kIsValues>(dq, i - 1, index, 0);
        begin_dq<kIsValues>(dq, n, i - 1, 1);
        products_wait<0>();
        pin(dq);
        pin(sums);
      }
      begin_tile<kIsValues>(scores, n, i + 1, i + 1 < end);
      if (i > first) {
        give_grad_scores_back(i - 1);
        dq_sums = finish_mine<kIsValues>(dq, i - 1, index, kPieces - 1);
        add_part<0>(dq, dq_sums, true);
      }
      products_wait<0>();
      pin(sums);
      pin(scores);
      stage_ring(kIsValues ? kGradOutEmpty : kQueryEmpty).arrive_as_warp(i);
      add_part<1>(dq, dq_sums, i > first);
      index = tile.index;
    }
    add_part<2>(dq, dq_sums, item.num_tiles > 1);
    add_part<3>(dq, dq_sums, item.num_tiles > 1);
    wait_for_grad_scores(end - 1);
    add_last_dq<kIsValues>(n, end - 1, index);
  }

  // Returns the index in dQ of piece `of_mine` of this warpgroup.
  template <bool kIsValues>
  static __device__ __forceinline__ int piece(int of_mine) {
    if constexpr (Shape::kIsPaired) return kIsValues ? kMiddlePiece : Pair().own_piece();
    return of_mine + (kIsValues ? 0 : kPieces);
  }

  // Begins the products for a piece of dQ of tile i; asynchronous.
  template <bool kIsValues>
  __device__ __forceinline__ void begin_dq(float (&dq)[kDq<kIsValues>], uint32_t n, uint32_t i,
                                           int of_mine) {
    pin(dq);
    products_begin();
    if constexpr (Shape::kIsPaired) {
      const uint32_t queries = shared + (kIsValues ? Pair().first_query() * sizeof(T) : 0);
      const uint32_t own = shared + Memory::key(n) + piece<kIsValues>(0) * Keys::kPanelBytes;
      const uint32_t partner = shared + Memory::kPartnerKey + (kIsValues ? Keys::kPanelBytes : 0);
      multiply_keys(dq, operand_at(own, 0), operand_at(queries + Memory::grad_score(i), 0), false);
      multiply_keys(dq, operand_at(partner, 0), operand_at(queries + Memory::partner_score(i), 0),
                    true);
    } else {
      multiply_dq(dq, Memory::key(n), i, piece<kIsValues>(of_mine));
    }
    products_commit();
  }

  // The same as finish_piece, for piece `of_mine` of this warpgroup.
  template <bool kIsValues>
  __device__ __forceinline__ Sum* finish_mine(float (&dq)[kDq<kIsValues>], uint32_t i,
                                              int32_t index, int of_mine) {
    const int first_query = kDq<kIsValues> == 16 ? Pair().first_query() : 0;
    return Steps::finish_piece(dq, i, index, piece<kIsValues>(of_mine), first_query);
  }

  template <bool kIsValues>
  __device__ __forceinline__ void add_piece(float (&dq)[kDq<kIsValues>], uint32_t i, int32_t index,
                                            int of_mine) {
    Sum* const dq_sums = finish_mine<kIsValues>(dq, i, index, of_mine);
    Steps::template add_dq<0, kDq<kIsValues>>(dq, dq_sums);
  }

  template <bool kIsValues>
  __device__ __forceinline__ void add_last_dq(uint32_t n, uint32_t i, int32_t index) {
#pragma unroll
    for (int of_mine = 0; of_mine < kPieces; ++of_mine) {
      float dq[kDq<kIsValues>];
      begin_dq<kIsValues>(dq, n, i, of_mine);
      products_wait<0>();
      pin(dq);
      if (of_mine == kPieces - 1) {
        give_grad_scores_back(i);
        give_slot_back(n);
      }
      add_piece<kIsValues>(dq, i, index, of_mine);
    }
  }

  template <bool kIsValues>
  __device__ __forceinline__ void run_as() {
    const float scale = kIsValues ? 1.f : arguments.softmax_scale;
    uint32_t num_tiles = 0;
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
      const BackwardItem item = Steps::item(n);
      if (item.num_rows < 0) return;
      float sums[(kIsValues ? Shape::kValueDim : Shape::kHeadDim) / 2] = {};
      slot_ring(kKeyFull).wait(n);
      slot_ring(kValueFull).wait(n);
      sum_up<kIsValues>(sums, item, n, num_tiles);
      num_tiles += item.num_tiles;
      store_rows<T>(kIsValues ? arguments.dv : arguments.dk, rows_of(item), sums, {scale, scale});
    }
  }

  __device__ __forceinline__ void run() {
    warpgroup == 0 ? run_as<true>() : run_as<false>();
  }
};

}  // namespace distca::attention::sm90
