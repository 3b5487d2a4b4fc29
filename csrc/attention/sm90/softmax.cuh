#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "ptx.cuh"

namespace distca::attention::sm90 {

// 2^x for x <= 127, without the special function unit. The polynomial approximates 2^f for f in
// [-1/2, 1/2] within 1.02e-4, the smallest error of degree 3 with a value of 1 at 0.
__device__ __forceinline__ float exp2_polynomial(float x) {
  constexpr float kRounds = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  x = fmaxf(x, -127.f);
  const float rounded = x + kRounds;
  const float f = x - (rounded - kRounds);
  float p = fmaf(f, 0.055008866f, 0.24221097f);
  p = fmaf(p, f, 0.69328296f);
  p = fmaf(p, f, 1.f);
  return __int_as_float(__float_as_int(p) + (__float_as_int(rounded) << 23));
}

// Running softmax of the two query rows whose scores a thread holds: rows lane / 4 and lane / 4 + 8
// of its warp's 16. Element 4 * j + 2 * r + c of the scores is of row r and column 8 * j + c. With
// kHasPolynomials, polynomials take every eighth power of 2 off the special function unit.
template <int kKeys, bool kHasPolynomials>
struct RowSoftmax {
  static constexpr int kScores = kKeys / 2;

  float shift[2];       // the score, in powers of 2, whose probability is 1; -inf before any key
  float sum[2];         // of this thread's columns
  float correction[2];  // factor of earlier sums, if the last step returned true

  // Turns the first scores into probabilities.
  __device__ __forceinline__ void start(float (&scores)[kScores], float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = 0.f;
      shift[r] = largest(scores, r) * scale_log2;
    }
    scale(scores, scale_log2);
    exponentiate<false>(scores);
  }

  // Turns scores into probabilities relative to the shift. Returns whether the shift moved in any
  // row of the warp. It moves only if a probability exceeds 2^kSlack, so nearly all blocks leave
  // earlier sums unchanged, and no thread needs another's maximum.
  __device__ __forceinline__ bool step(float (&scores)[kScores], float scale_log2) {
    scale(scores, scale_log2);
    int32_t passes = __float_as_int(kSlack);  // larger floats are larger as integers, too
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      passes = __vimax3_s32(passes, __float_as_int(scores[i]), __float_as_int(scores[i + 1]));
    }
    bool moves = passes > __float_as_int(kSlack);
#pragma unroll
    for (int r = 0; r < 2; ++r) moves |= shift[r] == -INFINITY;
    moves = __any_sync(0xffffffffu, moves);
    if (moves) move_shift(scores);
    exponentiate<true>(scores);
    return moves;
  }

 private:
  static constexpr float kSlack = 8.f;

  // Returns the largest value of row r in the four threads that hold it.
  static __device__ __forceinline__ float largest(const float (&values)[kScores], int r) {
    float maximum = fmaxf(values[2 * r], values[2 * r + 1]);
#pragma unroll
    for (int j = 1; j < kScores / 4; ++j) {
      maximum = fmaxf(maximum, fmaxf(values[4 * j + 2 * r], values[4 * j + 2 * r + 1]));
    }
    maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 1));
    return fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 2));
  }

  // Turns scores into powers of 2 relative to the shift, and to 0 in a row that has seen no key.
  __device__ __forceinline__ void scale(float (&scores)[kScores], float scale_log2) const {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const float from = shift[(i >> 1) & 1];
      scores[i] = fmaf(scores[i], scale_log2, from == -INFINITY ? 0.f : -from);
    }
  }

  __device__ __forceinline__ void move_shift(float (&powers)[kScores]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float maximum = largest(powers, r);
      const bool is_first = shift[r] == -INFINITY;
      const float by = maximum > (is_first ? -INFINITY : kSlack) ? maximum : 0.f;
      correction[r] = is_first ? 0.f : exp2_fast(-by);
      sum[r] *= correction[r];
      if (maximum > -INFINITY) shift[r] = (is_first ? 0.f : shift[r]) + by;
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
        powers[4 * j + 2 * r] -= by;
        powers[4 * j + 2 * r + 1] -= by;
      }
    }
  }

  template <bool kIsStep>
  __device__ __forceinline__ void exponentiate(float (&powers)[kScores]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float partial = 0.f;
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const bool is_polynomial = kHasPolynomials && kIsStep && c == 1 && j % 4 == 3;
          float& power = powers[4 * j + 2 * r + c];
          power = is_polynomial ? exp2_polynomial(power) : exp2_fast(power);
          partial += power;
        }
      }
      sum[r] += partial;
    }
  }
};

}  // namespace distca::attention::sm90
