#pragma once

#include "backward_shape.cuh"
#include "columns.cuh"

namespace distca::attention::sm90 {

// A warpgroup of the backward kernel: it owns 64 keys of each item and sums up their dK and dV;
// together the two add up dQ.
template <typename Shape>
struct KeyWarpgroup {
  using T = typename Shape::Element;
  using Memory = BackwardMemory<Shape>;
  using Keys = typename Shape::Keys;
  using Queries = typename Shape::Queries;
  using GradScores = typename Shape::GradScores;
  static constexpr int kScores = Shape::kRows / 2;  // registers of 64 keys by kRows queries
  static constexpr uint32_t kKeysReadId = 1;        // of a hardware barrier

  const BackwardArguments& arguments;
  uint32_t shared;
  int warpgroup, warp, lane;
  float scale_log2;

  float dk[Shape::kHeadDim / 2];
  float dv[Shape::kHeadDim / 2];

  __device__ __forceinline__ Ring<2> ring(BackwardBarrier which) const {
    return ring_at(shared + Memory::kBarriers, which);
  }

  // Values of this thread's query columns 8 j + 2 (lane % 4) and the next, j from 2 i to 2 i + 1,
  // of a vector of row statistics in shared memory.
  __device__ __forceinline__ float4 stats(uint32_t vector, int i) const {
    return *in_block<float4>(vector + 4 * ((lane % 4) * stats_group(Shape::kRows) + 4 * i));
  }

  // scores (+)= this warpgroup's rows of keys (or values) times all query rows, transposed.
  __device__ __forceinline__ void begin_scores(float (&scores)[kScores], uint32_t keys,
                                               uint32_t queries, bool accumulate) {
    const Operand left = operand_at(shared + keys + warpgroup * 64 * 128, 0);
    const Operand right = operand_at(shared + queries, 0);
    products_begin();
#pragma unroll
    for (int k = 0; k < Shape::kHeadDim / 16; ++k) {
      const uint32_t inside = (k % 4) * 32;
      product<T, false, false>(scores, descriptor(left, (k / 4) * Keys::kPanelBytes + inside),
                               descriptor(right, (k / 4) * Queries::kPanelBytes + inside),
                               accumulate || k > 0);
    }
    products_commit();
  }

  // sums += left (64 keys by kRows queries, registers) times rows of queries.
  __device__ __forceinline__ void begin_sums(float (&sums)[Shape::kHeadDim / 2],
                                             uint32_t (&left)[kScores / 2], uint32_t queries) {
    const Operand right = operand_at(shared + queries, Queries::kPanelBytes);
    pin(sums);
    pin(left);
    products_begin();
#pragma unroll
    for (int k = 0; k < Shape::kRows / 16; ++k) {
      product<T, true>(sums, left + 4 * k, descriptor(right, k * 16 * 128), 1);
    }
    products_commit();
  }

  // Of dQ^T, kHeadDim by kRows, this warpgroup computes 64 by 64.
  __device__ __forceinline__ void begin_dq(float (&dq)[32], uint32_t keys, uint32_t i) {
    const uint32_t key_panel = Keys::kPanels == 2 ? warpgroup : 0;
    const uint32_t query_panel = Keys::kPanels == 2 ? 0 : warpgroup;
    const Operand left = operand_at(shared + keys + key_panel * Keys::kPanelBytes, 0);
    const Operand right =
        operand_at(shared + Memory::grad_score(i) + query_panel * GradScores::kPanelBytes, 0);
    pin(dq);
    products_begin();
#pragma unroll
    for (int k = 0; k < kKeyBlockRows / 16; ++k) {
      product<T, true, true>(dq, descriptor(left, k * 16 * 128), descriptor(right, k * 16 * 128),
                             k > 0);
    }
    products_commit();
  }

  __device__ __forceinline__ void mask(float (&scores)[kScores], const StagedTile& tile,
                                       int32_t first_key) {
    const Window& window = arguments.window;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t key = first_key + 64 * warpgroup + 16 * warp + lane / 4 + 8 * r;
      const bool outside = key < tile.k_begin || key >= tile.k_end;
      // Queries at [begin, end) of the tile see the key.
      const int32_t begin = window.right >= 0 ? key - window.right - tile.position : 0;
      const int32_t end = outside            ? 0
                          : window.left >= 0 ? key + window.left + 1 - tile.position
                                             : Shape::kRows;
      const int32_t first = 2 * (lane % 4);
      hide(scores, r,
           columns_below<Shape::kRows>(end - first) & ~columns_below<Shape::kRows>(begin - first));
    }
  }

  __device__ __forceinline__ bool needs_mask(const StagedTile& tile, int32_t first_key) const {
    const Window& window = arguments.window;
    return first_key < tile.k_begin || first_key + kKeyBlockRows > tile.k_end ||
           (window.right >= 0 && first_key + kKeyBlockRows - 1 > tile.position + window.right) ||
           (window.left >= 0 && first_key < tile.position + Shape::kRows - 1 - window.left);
  }

  // Per-query values, two of column group 2 i and two of 2 i + 1, as accumulators hold them.
  static __device__ __forceinline__ void spread(const float4& values, float* accumulators) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      accumulators[2 * r] = values.x;
      accumulators[2 * r + 1] = values.y;
      accumulators[4 + 2 * r] = values.z;
      accumulators[4 + 2 * r + 1] = values.w;
    }
  }

  __device__ __forceinline__ void pack_all(const float (&values)[kScores],
                                           uint32_t (&packed)[kScores / 2]) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) packed[i] = pack<T>(values[2 * i], values[2 * i + 1]);
  }

  __device__ __forceinline__ void store_grad_scores(const uint32_t (&grads)[kScores / 2],
                                                    uint32_t i) {
    const uint32_t to = shared + Memory::grad_score(i);
    const uint32_t row = 64 * warpgroup + 16 * warp + (lane & 15);
#pragma unroll
    for (int j = 0; j < Shape::kRows / 16; ++j) {
      store_matrices(
          to + (j / 4) * GradScores::kPanelBytes + swizzled(row, 2 * (j % 4) + (lane >> 4)),
          grads[4 * j], grads[4 * j + 1], grads[4 * j + 2], grads[4 * j + 3]);
    }
    fence_shared_writes();
  }

  // Adds dQ of tile i of those staged so far, whose place in the sums is `index`.
  __device__ __forceinline__ void add_dq(const float (&dq)[32], uint32_t i, int32_t index) {
    constexpr int kWords = Shape::kRows * Shape::kHeadDim;
    const int64_t base = static_cast<int64_t>(index) * kWords + warpgroup * 4096;
    const int thread = 32 * warp + lane;
    if constexpr (Shape::kDeterministic) {
      uint64_t* sums = static_cast<uint64_t*>(arguments.dq_sums) + base / 2 + thread;
      const uint32_t quanta = Memory::quanta(i);
      const int first_column = Keys::kPanels == 2 ? 0 : 4 * warpgroup;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float inverse[8];
        spread(stats(quanta, first_column + j), inverse);
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
          const int32_t low = __float2int_rn(dq[8 * j + e] * inverse[e]);
          const int32_t high = __float2int_rn(dq[8 * j + e + 1] * inverse[e + 1]);
          add_to_global(sums + 64 * (8 * j + e), pair_of(low, high));
        }
      }
    } else {
#pragma unroll
      for (int e = 0; e < 32; e += 4) {
        add_to_global(static_cast<float*>(arguments.dq_sums) + base + 128 * e + 4 * thread, dq[e],
                      dq[e + 1], dq[e + 2], dq[e + 3]);
      }
    }
  }

  // Scores to probabilities. None is above 1, which sums in fixed point rely on: where scores are
  // near 1e9, the rounding of lse is worth e^64 either way. The sign costs no instruction.
  __device__ __forceinline__ void exponentiate(float (&scores)[kScores], uint32_t log_sums) {
#pragma unroll
    for (int j = 0; j < kScores / 8; ++j) {
      float log_sum[8];
      spread(stats(log_sums, j), log_sum);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& score = scores[8 * j + e];
        score = exp2_fast(-fabsf(fmaf(score, scale_log2, -log_sum[e])));
      }
    }
  }

  // Waits for room for dS of tile i, but only once probabilities exist: `known & zero` is 0, which
  // ptxas cannot know. It moves waits for products up to the preceding access to shared memory.
  __device__ __forceinline__ void wait_for_room(uint32_t i, const float (&probabilities)[kScores]) {
    const uint32_t zero = static_cast<uint32_t>(arguments.num_items) >> 31;
    uint32_t known = 0;
#pragma unroll
    for (int e = 7; e < kScores; e += 8) known |= __float_as_uint(probabilities[e]);
    const Ring<2> room = ring(kGradScoreEmpty);
    barrier_wait(room.barrier(i) + (known & zero), room.phase(i) ^ 1);
  }

  // Every tile of item n, those from `first` on of all tiles, but for the last one's dQ. Returns
  // the place of that in the sums.
  __device__ __forceinline__ int32_t sum_up(const BackwardItem& item, uint32_t n, uint32_t first) {
    int32_t index = 0;
#pragma unroll 1
    for (uint32_t i = first; i < first + item.num_tiles; ++i) {
      float scores[kScores], grads[kScores];
      uint32_t probabilities[kScores / 2], packed_grads[kScores / 2];
      float dq[32];
      ring(kQueryFull).wait(i);
      const StagedTile tile = in_block<StagedTile>(Memory::kTiles)[Ring<2>::stage(i)];
      const uint32_t log_sums = Memory::stats(i), minus_delta = log_sums + Memory::kVectorBytes;
      // dP - delta, by starting from -delta.
#pragma unroll
      for (int j = 0; j < kScores / 8; ++j) spread(stats(minus_delta, j), grads + 8 * j);
      pin(scores);
      pin(grads);
      begin_scores(scores, Memory::key(n), Memory::query(i), false);
      ring(kGradOutFull).wait(i);
      begin_scores(grads, Memory::value(n), Memory::grad_out(i), true);
      products_wait<1>();
      pin(scores);
      if (needs_mask(tile, item.k_row)) mask(scores, tile, item.k_row);
      exponentiate(scores, log_sums);
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
      begin_sums(dv, probabilities, Memory::grad_out(i));
      begin_sums(dk, packed_grads, Memory::query(i));
      products_wait<2>();
      pin(dq);
      if (i > first) {
        ring(kGradScoreEmpty).arrive_as_warp(i - 1);
        add_dq(dq, i - 1, index);
      }
      products_wait<0>();
      pin(dk);
      pin(dv);
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
    add_dq(dq, i, index);
  }

  __device__ __forceinline__ void run() {
    const float scale = arguments.softmax_scale;
    uint32_t num_tiles = 0;
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
      ring(kItemFull).wait(n);
      const BackwardItem item = in_block<BackwardItem>(Memory::kItems)[Ring<2>::stage(n)];
      if (item.num_rows < 0) return;
#pragma unroll
      for (int i = 0; i < Shape::kHeadDim / 2; ++i) dk[i] = dv[i] = 0.f;
      ring(kKeyFull).wait(n);
      ring(kValueFull).wait(n);
      const int32_t last_index = sum_up(item, n, num_tiles);
      num_tiles += item.num_tiles;
      if (item.num_tiles > 0) add_last_dq(n, num_tiles - 1, last_index);
      stage_rows<T, Keys>(shared + Memory::value(n), 64 * warpgroup, dv, {1.f, 1.f});
      named_sync(kKeysReadId, 256);  // for dQ both warpgroups read all keys
      stage_rows<T, Keys>(shared + Memory::key(n), 64 * warpgroup, dk, {scale, scale});
      ring(kSlotStaged).arrive_as_warp(n);
    }
  }
};

}  // namespace distca::attention::sm90
