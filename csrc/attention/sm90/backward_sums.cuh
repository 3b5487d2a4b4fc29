#pragma once

#include "backward_tile.cuh"

namespace distca::attention::sm90 {

// A warpgroup of the backward kernel: it owns 64 keys of each item and sums up their dK and dV;
// together the two add up dQ.
template <typename Shape>
struct KeyWarpgroup : TileSteps<Shape> {
  using Steps = TileSteps<Shape>;
  using typename Steps::GradScores, typename Steps::Keys, typename Steps::Memory, typename Steps::T;
  using Queries = typename Shape::Queries;
  using Steps::arguments, Steps::begin_grads, Steps::begin_scores, Steps::exponentiate,
      Steps::finish_piece, Steps::kScores, Steps::lane, Steps::mask, Steps::multiply_keys,
      Steps::needs_mask, Steps::pack_all, Steps::ring, Steps::shared, Steps::staged_tile,
      Steps::store_grad_scores, Steps::subtract_log_sums, Steps::warpgroup;
  static constexpr uint32_t kKeysReadId = 1;  // of a hardware barrier
  // Elements of dQ, of 32, that a thread adds as soon as it has them. A warp waits while its
  // multiprocessor has too many additions under way, so the others follow as later products end. In
  // deterministic mode that would cost 2 to 4 %, so all are added at once.
  static constexpr int kAddedAtOnce = Shape::kDeterministic ? 32 : 16;

  float dk[Shape::kHeadDim / 2];
  float dv[Shape::kHeadDim / 2];

  // Begins the product for this warpgroup's piece of dQ^T of tile i, 64 by 64 of kHeadDim by kRows;
  // asynchronous.
  __device__ __forceinline__ void begin_dq(float (&dq)[32], uint32_t keys, uint32_t i) {
    pin(dq);
    products_begin();
    const uint32_t key_panel = Steps::kPiecesAreKeys ? warpgroup : 0;
    const uint32_t query_panel = Steps::kPiecesAreKeys ? 0 : warpgroup;
    const uint32_t grad_scores = Memory::grad_score(i) + query_panel * GradScores::kPanelBytes;
    multiply_keys(dq, operand_at(shared + keys + key_panel * Keys::kPanelBytes, 0),
                  operand_at(shared + grad_scores, 0), false);
    products_commit();
  }

  // Waits for room for dS of tile i, but only once probabilities exist: ptxas cannot know that
  // `known & zero` is 0. It moves a wait for products up to the preceding access to shared memory,
  // which is this wait, so the products still overlap the softmax.
  __device__ __forceinline__ void wait_for_room(uint32_t i, const float (&probabilities)[kScores]) {
    const uint32_t zero = static_cast<uint32_t>(arguments.num_items) >> 31;
    uint32_t known = 0;
#pragma unroll
    for (int e = 7; e < kScores; e += 8) known |= __float_as_uint(probabilities[e]);
    const auto room = ring(kGradScoreEmpty);
    barrier_wait(room.barrier(i) + (known & zero), room.phase(i) ^ 1);
  }

  // Sums up dK and dV over the tiles of item n, of which `first` is the first, and adds their dQ
  // except the last tile's. Returns the place of the last tile's dQ among the sums.
  __device__ __forceinline__ int32_t sum_up(const BackwardItem& item, uint32_t n, uint32_t first) {
    int32_t index = 0;
    float dq[32];
    typename Steps::Sum* sums = nullptr;
#pragma unroll 1
    for (uint32_t i = first; i < first + item.num_tiles; ++i) {
      float scores[kScores], grads[kScores];
      uint32_t probabilities[kScores / 2], packed_grads[kScores / 2];
      ring(kQueryFull).wait(i);
      const StagedTile tile = staged_tile(i % 2);
      const uint32_t queries = Memory::query(i % 2), grad_outs = Memory::grad_out(i % 2);
      begin_scores(scores, Memory::key(n), queries, i);
      ring(kGradOutFull).wait(i);
      begin_grads(grads, Memory::value(n), grad_outs, i);
      products_wait<1>();
      pin(scores);
      if constexpr (Shape::kIsCapped) {
        lane = in_register(lane);  // no registers are left for addresses that do not change
        cap_scores(scores, arguments.cap);
        products_wait<0>();
        pin(grads);
#pragma unroll
        for (int e = 0; e < kScores; ++e) grads[e] *= slope_at(scores[e]);
        subtract_log_sums(scores, i);
      }
      if (needs_mask(tile, item.k_row)) mask(scores, tile, item.k_row);
      exponentiate(scores, [] {});
      if constexpr (Shape::kSoftmaxFirst) wait_for_room(i, scores);
      products_wait<0>();
      pin(grads);
#pragma unroll
      for (int e = 0; e < kScores; ++e) grads[e] *= scores[e];
      pack_all(grads, packed_grads);
      pack_all(scores, probabilities);
      if constexpr (!Shape::kSoftmaxFirst) ring(kGradScoreEmpty).wait_before(i);
      store_grad_scores(packed_grads, i);
      ring(kGradScoreFull).arrive_as_warp(i);
      // dQ of the tile before; at first there is none, and this product's result is not used.
      ring(kGradScoreFull).wait(i - 1);
      begin_dq(dq, Memory::key(n), i - 1);
      Steps::template begin_sums<Queries>(dv, probabilities, grad_outs);
      Steps::template begin_sums<Queries>(dk, packed_grads, queries);
      products_wait<2>();
      pin(dq);
      if (i > first) {
        ring(kGradScoreEmpty).arrive_as_warp(i - 1);
        sums = finish_piece(dq, i - 1, index, warpgroup, 0);
        Steps::template add_dq<0, kAddedAtOnce>(dq, sums);
      }
      if constexpr (kAddedAtOnce == 16) {
        products_wait<1>();
        pin(dv);
        if (i > first) Steps::template add_dq<16, 24>(dq, sums);
      }
      products_wait<0>();
      pin(dk);
      pin(dv);
      if constexpr (kAddedAtOnce == 16) {
        if (i > first) Steps::template add_dq<24, 32>(dq, sums);
      }
      index = tile.index;
      ring(kQueryEmpty).arrive_as_warp(i);
      ring(kGradOutEmpty).arrive_as_warp(i);
    }
    return index;
  }

  __device__ __forceinline__ void add_last_dq(uint32_t n, uint32_t i, int32_t index) {
    float dq[32];
    ring(kGradScoreFull).wait(i);
    begin_dq(dq, Memory::key(n), i);
    products_wait<0>();
    pin(dq);
    ring(kGradScoreEmpty).arrive_as_warp(i);
    Steps::template add_dq<0, 32>(dq, finish_piece(dq, i, index, warpgroup, 0));
  }

  __device__ __forceinline__ void run() {
    const float scale = arguments.softmax_scale;
    uint32_t num_tiles = 0;
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
      const BackwardItem item = Steps::item(n);
      if (item.num_rows < 0) return;
#pragma unroll
      for (int i = 0; i < Shape::kHeadDim / 2; ++i) dk[i] = dv[i] = 0.f;
      ring(kKeyFull).wait(n);
      ring(kValueFull).wait(n);
      const int32_t last_index = sum_up(item, n, num_tiles);
      num_tiles += item.num_tiles;
      if (item.num_tiles > 0) add_last_dq(n, num_tiles - 1, last_index);
      stage_rows<T, Keys>(shared + Memory::value(n), 64 * warpgroup, dv, {1.f, 1.f});
      named_sync(kKeysReadId, 256);  // both warpgroups have read all keys for dQ
      stage_rows<T, Keys>(shared + Memory::key(n), 64 * warpgroup, dk, {scale, scale});
      ring(kItemStaged).arrive_as_warp(n);
    }
  }
};

}  // namespace distca::attention::sm90
