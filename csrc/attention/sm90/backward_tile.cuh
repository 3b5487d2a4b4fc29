#pragma once

#include <type_traits>

#include "backward_shape.cuh"
#include "columns.cuh"

namespace distca::attention::sm90 {

// The steps of a warpgroup of the backward kernel for one tile of queries and 64 keys of the item.
template <typename Shape>
struct TileSteps : BackwardThread<Shape> {
  using Thread = BackwardThread<Shape>;
  using Thread::arguments, Thread::shared;
  using T = typename Shape::Element;
  using Memory = BackwardMemory<Shape>;
  using Keys = typename Shape::Keys;
  using GradScores = typename Shape::GradScores;
  static constexpr int kScores = Shape::kRows / 2;  // registers of 64 keys by kRows queries
  // Whether pieces of dQ are columns of keys, rather than halves of the queries.
  static constexpr bool kPiecesAreKeys = Keys::kPanels > 1;

  int warpgroup, warp, lane;
  float scale_log2;

  // Returns the index of this warpgroup's first key in the item.
  __device__ __forceinline__ int first_key() const {
    return Shape::kKeyRows > 64 ? 64 * warpgroup : 0;
  }

  // scores = a statistic of the queries of tile i, the same for every key. It is a product of
  // ones with the statistic's pieces. Without it, 64 threads would load each value from shared
  // memory, and kernels would take up to a tenth longer. Because of strides of 0, all keys use the
  // same eight rows of ones, and both halves of the inner dimension use the same eight columns. So
  // each piece counts twice. Joins the open group of products.
  template <RowStat kStat>
  __device__ __forceinline__ void multiply_stats(float (&scores)[kScores], uint32_t i) {
    product<__nv_bfloat16, false, false>(
        scores, repeating_descriptor(shared + Memory::ones(kStat), 0),
        repeating_descriptor(shared + Memory::stats(i), kEightStatsBytes), false);
  }

  // scores (+)= K Q^T of 64 keys and all queries of a tile, or V dO^T. Joins the open group of
  // products.
  template <typename Left, typename Right>
  __device__ __forceinline__ void multiply_queries(float (&scores)[kScores], uint32_t keys,
                                                   uint32_t queries, bool accumulate) {
    const Operand left = operand_at(shared + keys + first_key() * 128, 0);
    const Operand right = operand_at(shared + queries, 0);
#pragma unroll
    for (int k = 0; k < 4 * Left::kPanels; ++k) {
      const uint32_t inside = (k % 4) * 32;
      product<T, false, false>(scores, descriptor(left, (k / 4) * Left::kPanelBytes + inside),
                               descriptor(right, (k / 4) * Right::kPanelBytes + inside),
                               accumulate || k > 0);
    }
  }

  // scores = K Q^T - lse / softmax_scale of tile i; asynchronous. If scores are capped, lse is
  // subtracted later, by subtract_log_sums.
  __device__ __forceinline__ void begin_scores(float (&scores)[kScores], uint32_t keys,
                                               uint32_t queries, uint32_t i) {
    pin(scores);
    products_begin();
    if constexpr (!Shape::kIsCapped) multiply_stats<RowStat::kMinusLogSum>(scores, i);
    multiply_queries<Keys, typename Shape::Queries>(scores, keys, queries, !Shape::kIsCapped);
    products_commit();
  }

  // grads = dP - delta of tile i, transposed; asynchronous.
  __device__ __forceinline__ void begin_grads(float (&grads)[kScores], uint32_t values,
                                              uint32_t grad_outs, uint32_t i) {
    pin(grads);
    products_begin();
    multiply_stats<RowStat::kMinusDelta>(grads, i);
    multiply_queries<typename Shape::Values, typename Shape::GradOuts>(grads, values, grad_outs,
                                                                       true);
    products_commit();
  }

  // Subtracts lse / softcap from capped scores of tile i. The product K Q^T cannot include it, and
  // another product would need more registers.
  __device__ __forceinline__ void subtract_log_sums(float (&scores)[kScores], uint32_t i) const {
    const auto* rows = in_block<RowStats>(Memory::stats(i)) + 2 * (lane % 4);
#pragma unroll
    for (int e = 0; e < kScores; e += 4) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float half = 0.f;
#pragma unroll
        for (const uint16_t piece : rows[2 * e + c].minus_log_sum) {
          half += __uint_as_float(static_cast<uint32_t>(piece) << 16);
        }
        scores[e + c] += 2.f * half;
        scores[e + c + 2] += 2.f * half;
      }
    }
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
    const int64_t word =
        static_cast<int64_t>(index) * kWords + piece * kPieceWords + first_query * kPieceColumns;
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
      const int query = (kPiecesAreKeys ? 0 : kPieceRows * piece) + first_query + 2 * (lane % 4);
      const auto* quanta = in_block<uint16_t>(Memory::quanta(i) + kQuantumBytes * query);
#pragma unroll
      for (int j = 0; j < kSize / 4; ++j) {
        const uint32_t exponents = quanta[4 * j];  // of two queries
        const float inverses[2] = {__uint_as_float((exponents & 255) << 23),
                                   __uint_as_float((exponents >> 8) << 23)};
#pragma unroll
        for (int e = 4 * j; e < 4 * j + 4; ++e) {
          dq[e] = __int_as_float(__float2int_rn(dq[e] * inverses[e % 2]));
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

  // Turns scores minus lse into probabilities, and calls `midway` when half are done. Sums in fixed
  // point need probabilities of at most 1. Without -fabsf they could be larger: where scores are
  // near 1e9, the rounding of lse is a factor of e^64 either way. The sign costs no instruction.
  template <typename Midway>
  __device__ __forceinline__ void exponentiate(float (&scores)[kScores], Midway midway) {
#pragma unroll
    for (int e = 0; e < kScores; ++e) {
      if (e == kScores / 2) midway();
      scores[e] = exp2_fast(-fabsf(scores[e] * scale_log2));
    }
  }
};

}  // namespace distca::attention::sm90
