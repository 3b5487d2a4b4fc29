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
      Steps::shared, Steps::slot_ring, Steps::spread, Steps::stats, Steps::store_grad_scores,
      Steps::warp, Steps::warpgroup;
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

  // P of tile i, also for the other warpgroup. Returns the place of the tile's dQ in the sums.
  __device__ __forceinline__ int32_t probabilities(uint32_t (&packed)[kScores / 2],
                                                   const BackwardItem& item, uint32_t n,
                                                   uint32_t i) {
    float scores[kScores];
    ring(kQueryFull).wait(i);
    const StagedTile tile = in_block<StagedTile>(Memory::kTiles)[Ring<2>::stage(i)];
    pin(scores);
    Steps::template begin_scores<Keys, Queries>(scores, Memory::key(n), Memory::query(i), false);
    products_wait<0>();
    pin(scores);
    if (needs_mask(tile, item.k_row)) mask(scores, tile, item.k_row);
    exponentiate(scores, Memory::stats(i));
    ring(kQueryEmpty).arrive_as_warp(i);
    pass_on(scores, i);
    pack_all(scores, packed);
    ring(kGradOutFull).wait(i);
    return tile.index;
  }

  // dS of tile i, also for dQ. Returns the same.
  __device__ __forceinline__ int32_t grad_scores(uint32_t (&packed)[kScores / 2], uint32_t n,
                                                 uint32_t i) {
    float grads[kScores];
    ring(kQueryFull).wait(i);
    const int32_t index = in_block<StagedTile>(Memory::kTiles)[Ring<2>::stage(i)].index;
    const uint32_t minus_delta = Memory::stats(i) + Memory::kVectorBytes;
#pragma unroll
    for (int j = 0; j < kScores / 8; ++j) spread(stats(minus_delta, j), grads + 8 * j);
    ring(kGradOutFull).wait(i);
    pin(grads);
    Steps::template begin_scores<Values, GradOuts>(grads, Memory::value(n), Memory::grad_out(i),
                                                   true);
    products_wait<0>();
    pin(grads);
    ring(kGradOutEmpty).arrive_as_warp(i);
    multiply_by_passed(grads, i);
    pack_all(grads, packed);
    ring(kGradScoreEmpty).wait_before(i);
    store_grad_scores(packed, i);
    ring(kGradScoreFull).arrive_as_warp(i);
    return index;
  }

  // Every tile of item n, those from `first` on of all tiles: sums up dV or dK, and a tile later
  // this warpgroup's part of dQ.
  template <bool kIsValues, int kSize>
  __device__ __forceinline__ void sum_up(float (&sums)[kSize], const BackwardItem& item, uint32_t n,
                                         uint32_t first) {
    constexpr int kFirst = kIsValues ? 0 : kValuePieces;
    constexpr int kEnd = kIsValues ? kValuePieces : Keys::kPanels;
    int32_t index = 0;
#pragma unroll 1
    for (uint32_t i = first; i < first + item.num_tiles; ++i) {
      uint32_t packed[kScores / 2];
      float dq[32];
      int32_t next_index;
      if constexpr (kIsValues) {
        next_index = probabilities(packed, item, n, i);
      } else {
        next_index = grad_scores(packed, n, i);
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
      if (i > first) {
        add_dq(dq, i - 1, index, kFirst);
        add_rest_of_dq<kFirst + 1, kEnd>(n, i - 1, index);
      }
      products_wait<0>();
      pin(sums);
      ring(kIsValues ? kGradOutEmpty : kQueryEmpty).arrive_as_warp(i);
      index = next_index;
    }
    if (item.num_tiles == 0) return;
    ring(kGradScoreFull).wait(first + item.num_tiles - 1);
    add_rest_of_dq<kFirst, kEnd>(n, first + item.num_tiles - 1, index);
  }

  // A piece of dQ of tile i; asynchronous.
  __device__ __forceinline__ void begin_dq(float (&dq)[32], uint32_t n, uint32_t i, int piece) {
    pin(dq);
    products_begin();
    multiply_dq(dq, Memory::key(n), i, piece);
    products_commit();
  }

  // One piece after the other: they take the registers of one.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void add_rest_of_dq(uint32_t n, uint32_t i, int32_t index) {
#pragma unroll
    for (int piece = kFirst; piece < kEnd; ++piece) {
      float dq[32];
      begin_dq(dq, n, i, piece);
      products_wait<0>();
      pin(dq);
      if (piece == kEnd - 1) ring(kGradScoreEmpty).arrive_as_warp(i);
      add_dq(dq, i, index, piece);
    }
    if (kFirst == kEnd) ring(kGradScoreEmpty).arrive_as_warp(i);
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
