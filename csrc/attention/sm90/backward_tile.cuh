#pragma once

#include <type_traits>

#include "backward_shape.cuh"
#include "columns.cuh"

namespace distca::attention::sm90 {

// The steps of a warpgroup of the backward kernel for one tile of queries and 64 keys of the item.
template <typename Shape>
struct TileSteps {
  using T = typename Shape::Element;
  using Memory = BackwardMemory<Shape>;
  using Keys = typename Shape::Keys;
  using GradScores = typename Shape::GradScores;
  static constexpr int kScores = Shape::kRows / 2;  // registers of 64 keys by kRows queries
  static constexpr bool kPiecesAreKeys = Keys::kPanels > 1;  // of dQ: see multiply_dq

  const BackwardArguments& arguments;
  uint32_t shared;
  int warpgroup, warp, lane;
  float scale_log2;

  __device__ __forceinline__ Ring<2> ring(BackwardBarrier which) const {
    return ring_at(shared + Memory::kBarriers, which);
  }
  __device__ __forceinline__ Ring<Shape::kStages> stage_ring(BackwardBarrier which) const {
    return ring_at<Shape::kStages>(shared + Memory::kBarriers, which);
  }
  __device__ __forceinline__ Ring<Shape::kSlots> slot_ring(BackwardBarrier which) const {
    return ring_at<Shape::kSlots>(shared + Memory::kBarriers, which);
  }

  // Waits for the n-th item and returns it. Its num_rows is -1 after the last.
  __device__ __forceinline__ BackwardItem item(uint32_t n) const {
    slot_ring(kItemFull).wait(n);
    return in_block<BackwardItem>(Memory::kItems)[Ring<Shape::kSlots>::stage(n)];
  }

  // Returns the index of this warpgroup's first key in the item.
  __device__ __forceinline__ int first_key() const {
    return Shape::kKeyRows > 64 ? 64 * warpgroup : 0;
  }

  // Returns four values of a vector of row statistics in shared memory: those of this thread's
  // query columns 8 j + 2 (lane % 4) + {0, 1} for j = 2 i and j = 2 i + 1.
  __device__ __forceinline__ float4 stats(uint32_t vector, int i) const {
    return *in_block<float4>(vector + 4 * ((lane % 4) * stats_group(Shape::kRows) + 4 * i));
  }

  // scores (+)= 64 rows of keys (or values) times all query rows (or dO), transposed.
  template <typename Left, typename Right>
  __device__ __forceinline__ void begin_scores(float (&scores)[kScores], uint32_t keys,
                                               uint32_t queries, bool accumulate) {
    const Operand left = operand_at(shared + keys + first_key() * 128, 0);
    const Operand right = operand_at(shared + queries, 0);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4 * Left::kPanels; ++k) {
      const uint32_t inside = (k % 4) * 32;
      product<T, false, false>(scores, descriptor(left, (k / 4) * Left::kPanelBytes + inside),
                               descriptor(right, (k / 4) * Right::kPanelBytes + inside),
                               accumulate || k > 0);
    }
    products_commit();
  }

  // sums += left (64 keys by kRows queries, registers) times rows of queries or dO.
  template <typename Right, int kSize>
  __device__ __forceinline__ void begin_sums(float (&sums)[kSize], uint32_t (&left)[kScores / 2],
                                             uint32_t queries) {
    const Operand right = operand_at(shared + queries, Right::kPanelBytes);
    pin(sums);
    pin(left);
    products_begin();
#pragma unroll
    for (int k = 0; k < Shape::kRows / 16; ++k) {
      product<T, true>(sums, left + 4 * k, descriptor(right, k * 16 * 128), 1);
    }
    products_commit();
  }

  // dq (+)= 64 columns of kKeyRows keys times dS of 2 kSize queries, both transposed. Joins the
  // open group of products.
  template <int kSize>
  __device__ __forceinline__ void multiply_keys(float (&dq)[kSize], const Operand& left,
                                                const Operand& right, bool accumulate) {
#pragma unroll
    for (int k = 0; k < Shape::kKeyRows / 16; ++k) {
      product<T, true, true>(dq, descriptor(left, k * 16 * 128), descriptor(right, k * 16 * 128),
                             accumulate || k > 0);
    }
  }

  // dq = a piece of dQ^T of tile i, 64 by 64. The whole is kHeadDim by kRows. Joins the open group
  // of products.
  __device__ __forceinline__ void multiply_dq(float (&dq)[32], uint32_t keys, uint32_t i,
                                              uint32_t piece) {
    const uint32_t key_panel = kPiecesAreKeys ? piece : 0;
    const uint32_t query_panel = kPiecesAreKeys ? 0 : piece;
    const Operand left = operand_at(shared + keys + key_panel * Keys::kPanelBytes, 0);
    const Operand right =
        operand_at(shared + Memory::grad_score(i) + query_panel * GradScores::kPanelBytes, 0);
    multiply_keys(dq, left, right, false);
  }

  __device__ __forceinline__ void mask(float (&scores)[kScores], const StagedTile& tile,
                                       int32_t block_key) {
    const Window& window = arguments.window;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t key = block_key + first_key() + 16 * warp + lane / 4 + 8 * r;
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

  __device__ __forceinline__ bool needs_mask(const StagedTile& tile, int32_t block_key) const {
    const Window& window = arguments.window;
    return block_key < tile.k_begin || block_key + Shape::kKeyRows > tile.k_end ||
           (window.right >= 0 && block_key + Shape::kKeyRows - 1 > tile.position + window.right) ||
           (window.left >= 0 && block_key < tile.position + Shape::kRows - 1 - window.left);
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
    const uint32_t row = first_key() + 16 * warp + (lane & 15);
#pragma unroll
    for (int j = 0; j < Shape::kRows / 16; ++j) {
      store_matrices(
          to + (j / 4) * GradScores::kPanelBytes + swizzled(row, 2 * (j % 4) + (lane >> 4)),
          grads[4 * j], grads[4 * j + 1], grads[4 * j + 2], grads[4 * j + 3]);
    }
    fence_shared_writes();
  }

  // What dQ is summed up in: floats, or in deterministic mode pairs of integers.
  using Sum = std::conditional_t<Shape::kDeterministic, uint64_t, float>;

  // Returns the sums to which this thread adds its elements of a piece of dQ, from query
  // `first_query` of the piece on. The tile's place among the sums is `index`.
  __device__ __forceinline__ Sum* sums_at(int32_t index, int piece, int first_query) const {
    constexpr int kWords = Shape::kRows * Shape::kHeadDim;
    constexpr int kWordsOfASum = sizeof(Sum) / sizeof(float);
    const int64_t word = static_cast<int64_t>(index) * kWords + piece * 4096 + first_query * 64;
    const int thread = 32 * warp + lane;
    return static_cast<Sum*>(arguments.dq_sums) + word / kWordsOfASum +
           thread * (Shape::kDeterministic ? 1 : 4);
  }

  // Makes a piece of dQ of tile i ready to be added, and returns its sums, as sums_at. In
  // deterministic mode, turns it into integer multiples of its quanta, and keeps their bits in
  // place of the floats. `i` counts the tiles of all items.
  template <int kSize>
  __device__ __forceinline__ Sum* finish_piece(float (&dq)[kSize], uint32_t i, int32_t index,
                                               int piece, int first_query) const {
    if constexpr (Shape::kDeterministic) {
      const uint32_t quanta = Memory::quanta(i);
      const int first_column = kPiecesAreKeys ? first_query / 16 : 4 * piece;
#pragma unroll
      for (int j = 0; j < kSize / 8; ++j) {
        float inverse[8];
        spread(stats(quanta, first_column + j), inverse);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          dq[8 * j + e] = __int_as_float(__float2int_rn(dq[8 * j + e] * inverse[e]));
        }
      }
    }
    return sums_at(index, piece, first_query);
  }

  // Adds elements [kBegin, kEnd) of a finished piece to its sums, if `is_there`.
  template <int kBegin, int kEnd, int kSize>
  __device__ __forceinline__ void add_dq(const float (&dq)[kSize], Sum* sums,
                                         bool is_there = true) const {
    if constexpr (Shape::kDeterministic) {
#pragma unroll
      for (int e = kBegin; e < kEnd; e += 2) {
        add_to_global(is_there, sums + 64 * e,
                      pair_of(__float_as_int(dq[e]), __float_as_int(dq[e + 1])));
      }
    } else {
#pragma unroll
      for (int e = kBegin; e < kEnd; e += 4) {
        add_to_global(is_there, sums + 128 * e, dq[e], dq[e + 1], dq[e + 2], dq[e + 3]);
      }
    }
  }

  // Turns scores into probabilities, and calls `midway` when half are done. Sums in fixed point
  // rely on none above 1. Without -fabsf they could be: where scores are near 1e9, the rounding of
  // lse is a factor of e^64 either way. The sign costs no instruction.
  template <typename Midway>
  __device__ __forceinline__ void exponentiate(float (&scores)[kScores], uint32_t log_sums,
                                               Midway midway) {
#pragma unroll
    for (int j = 0; j < kScores / 8; ++j) {
      if (j == kScores / 16) midway();
      float log_sum[8];
      spread(stats(log_sums, j), log_sum);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& score = scores[8 * j + e];
        score = exp2_fast(-fabsf(fmaf(score, scale_log2, -log_sum[e])));
      }
    }
  }
};

}  // namespace distca::attention::sm90
