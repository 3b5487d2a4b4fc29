#pragma once

#include "backward_tile.cuh"

namespace distca::attention::sm90 {

// The warpgroups of the backward kernel for heads so wide that dK and dV of 64 keys do not fit in
// one's registers. The first computes P and sums up dV, the second computes dS and sums up dK. P
// goes from one to the other through shared memory, thread by thread, as both hold the same
// elements of a product. Each computes a part of dQ.
template <typename Shape>
struct WideWarpgroup : TileSteps<Shape> {
  using Steps = TileSteps<Shape>;
  using typename Steps::Keys, typename Steps::Memory, typename Steps::T;
  using Queries = typename Shape::Queries;
  using Values = typename Shape::Values;
  using GradOuts = typename Shape::GradOuts;
  using Steps::add_dq, Steps::arguments, Steps::exponentiate, Steps::kScores, Steps::lane,
      Steps::mask, Steps::multiply_dq, Steps::needs_mask, Steps::pack_all, Steps::ring,
      Steps::shared, Steps::slot_ring, Steps::spread, Steps::stage_ring, Steps::stats,
      Steps::store_grad_scores, Steps::warp, Steps::warpgroup;
  static constexpr uint32_t kKeysReadId = 1;              // of a hardware barrier
  static constexpr int kValuePieces = Keys::kPanels / 2;  // of dQ, by the first warpgroup

  __device__ __forceinline__ Ring<1> probability_ring(BackwardBarrier which) const {
    return ring_at<1>(shared + Memory::kBarriers, which);
  }

  // This thread's probabilities, four at a time, 128 apart.
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

  __device__ __forceinline__ void multiply_by_passed(float (&grads)[kScores], uint32_t i) {
    probability_ring(kProbabilityFull).wait(i);
#pragma unroll
    for (int e = 0; e < kScores / 4; ++e) {
      const float4 factors = passed()[128 * e];
      grads[4 * e] *= factors.x;
      grads[4 * e + 1] *= factors.y;
      grads[4 * e + 2] *= factors.z;
      grads[4 * e + 3] *= factors.w;
    }
    probability_ring(kProbabilityEmpty).arrive_as_warp(i);
  }

  // Scores of tile i, or dP - delta; asynchronous. Past the item's last tile they are of no use.
  template <bool kIsValues>
  __device__ __forceinline__ void begin_tile(float (&scores)[kScores], uint32_t n, uint32_t i,
                                             bool is_there) {
    if (is_there) {
      stage_ring(kQueryFull).wait(i);
      if constexpr (!kIsValues) stage_ring(kGradOutFull).wait(i);
    }
    if constexpr (kIsValues) {
      pin(scores);
      Steps::template begin_scores<Keys, Queries>(scores, Memory::key(n), Memory::query(i), false);
    } else {
      const uint32_t minus_delta = Memory::stats(i) + Memory::kVectorBytes;
#pragma unroll
      for (int j = 0; j < kScores / 8; ++j) spread(stats(minus_delta, j), scores + 8 * j);
      pin(scores);
      Steps::template begin_scores<Values, GradOuts>(scores, Memory::value(n), Memory::grad_out(i),
                                                     true);
    }
  }

  // From scores to P of tile i, also for the other warpgroup.
  __device__ __forceinline__ void finish_probabilities(float (&scores)[kScores],
                                                       uint32_t (&packed)[kScores / 2],
                                                       const StagedTile& tile,
                                                       const BackwardItem& item, uint32_t i) {
    [[maybe_unused]] float factors[kScores];  // of dP - delta in dS
    if constexpr (Shape::kIsCapped) {
      cap_scores(scores, arguments.cap);
#pragma unroll
      for (int e = 0; e < kScores; ++e) factors[e] = slope_at(scores[e]);
    }
    if (needs_mask(tile, item.k_row)) mask(scores, tile, item.k_row);
    exponentiate(scores, Memory::stats(i));
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

  // From dP - delta to dS of tile i, also for dQ.
  __device__ __forceinline__ void finish_grads(float (&grads)[kScores],
                                               uint32_t (&packed)[kScores / 2], uint32_t i) {
    stage_ring(kGradOutEmpty).arrive_as_warp(i);
    multiply_by_passed(grads, i);
    pack_all(grads, packed);
    ring(kGradScoreEmpty).wait_before(i);
    store_grad_scores(packed, i);
    ring(kGradScoreFull).arrive_as_warp(i);
  }

  // Sums up dV or dK over item n's tiles, of which `first` is the first, and adds this warpgroup's
  // part of dQ a tile later. The first product of a tile is issued under the last ones of the tile
  // before. Pieces of dQ take turns in the same registers.
  template <bool kIsValues, int kSize>
  __device__ __forceinline__ void sum_up(float (&sums)[kSize], const BackwardItem& item, uint32_t n,
                                         uint32_t first) {
    constexpr int kFirst = kIsValues ? 0 : kValuePieces;
    constexpr int kEnd = kIsValues ? kValuePieces : Keys::kPanels;
    if (item.num_tiles == 0) return;
    const uint32_t end = first + item.num_tiles;
    int32_t index = 0;
    float scores[kScores];
    begin_tile<kIsValues>(scores, n, first, true);
    products_wait<0>();
    pin(scores);
#pragma unroll 1
    for (uint32_t i = first; i < end; ++i) {
      uint32_t packed[kScores / 2];
      float dq[32];
      const StagedTile tile = in_block<StagedTile>(Memory::kTiles)[Ring<Shape::kStages>::stage(i)];
      if constexpr (kIsValues) {
        finish_probabilities(scores, packed, tile, item, i);
      } else {
        finish_grads(scores, packed, i);
      }
      ring(kGradScoreFull).wait(i - 1);
      begin_dq(dq, n, i - 1, kFirst);  // of no use for the first tile
      if constexpr (kIsValues) {
        Steps::template begin_sums<GradOuts>(sums, packed, Memory::grad_out(i));
      } else {
        Steps::template begin_sums<Queries>(sums, packed, Memory::query(i));
      }
      products_wait<1>();
      pin(dq);
      if constexpr (kFirst + 1 < kEnd) {
        if (i > first) add_dq(dq, i - 1, index, kFirst);
        begin_dq(dq, n, i - 1, kFirst + 1);
        products_wait<0>();
        pin(dq);
        pin(sums);
      }
      begin_tile<kIsValues>(scores, n, i + 1, i + 1 < end);
      if (i > first) {
        ring(kGradScoreEmpty).arrive_as_warp(i - 1);
        add_dq(dq, i - 1, index, kEnd - 1);
      }
      products_wait<0>();
      pin(sums);
      pin(scores);
      stage_ring(kIsValues ? kGradOutEmpty : kQueryEmpty).arrive_as_warp(i);
      index = tile.index;
    }
    ring(kGradScoreFull).wait(end - 1);
    add_last_dq<kFirst, kEnd>(n, end - 1, index);
  }

  // A piece of dQ of tile i; asynchronous.
  __device__ __forceinline__ void begin_dq(float (&dq)[32], uint32_t n, uint32_t i, int piece) {
    pin(dq);
    products_begin();
    multiply_dq(dq, Memory::key(n), i, piece);
    products_commit();
  }

  template <int kFirst, int kEnd>
  __device__ __forceinline__ void add_last_dq(uint32_t n, uint32_t i, int32_t index) {
#pragma unroll
    for (int piece = kFirst; piece < kEnd; ++piece) {
      float dq[32];
      begin_dq(dq, n, i, piece);
      products_wait<0>();
      pin(dq);
      if (piece == kEnd - 1) ring(kGradScoreEmpty).arrive_as_warp(i);
      add_dq(dq, i, index, piece);
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
      named_sync(kKeysReadId, 256);  // both warpgroups read all keys
      if constexpr (kIsValues) {
        stage_rows<T, Values>(shared + Memory::value(n), 0, sums, {scale, scale});
      } else {
        stage_rows<T, Keys>(shared + Memory::key(n), 0, sums, {scale, scale});
      }
      slot_ring(kSlotStaged).arrive_as_warp(n);
    }
  }

  __device__ __forceinline__ void run() {
    warpgroup == 0 ? run_as<true>() : run_as<false>();
  }
};

}  // namespace distca::attention::sm90
