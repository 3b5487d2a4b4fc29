#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "ptx.cuh"

namespace distca::attention::sm90 {

// Running softmax of the two query rows whose scores a thread holds: rows lane / 4 and lane / 4 + 8
// of its warp's 16. Element 4 * j + 2 * r + c of the scores is of row r and column 8 * j + c.
template <int kKeys>
struct RowSoftmax {
  static constexpr int kScores = kKeys / 2;

  float shift[2];       // the score, in powers of 2, whose probability is 1; -inf before any key
  float sum[2];         // of this thread's columns
  float correction[2];  // factor of earlier sums, if the last step returned true

  // Turns the first scores into probabilities.
  __device__ __forceinline__ void start(float (&scores)[kScores], float scale_log2) {
    float maxima[2];
    largest(scores, maxima);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = 0.f;
      shift[r] = maxima[r] * scale_log2;
    }
    scale(scores, scale_log2);
    exponentiate(scores);
  }

  // Turns scores into probabilities relative to the shift. Returns whether the shift moved in any
  // row of the warp. It moves only if a probability exceeds 2^kSlack or a row has seen no key
  // before, so nearly all blocks leave earlier sums unchanged, and no thread needs another's
  // maximum.
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
    exponentiate(scores);
    return moves;
  }

  // Sets `sums` to the sum of each row over all columns. All threads of the warp call it together.
  __device__ __forceinline__ void total(float (&sums)[2]) const {
    sums[0] = sum[0];
    sums[1] = sum[1];
    combine(sums, [](float one, float other) { return one + other; });
  }

 private:
  static constexpr float kSlack = 8.f;

  // Combines the values of each row in the four threads that hold it. The shuffles of both rows are
  // under way at once, because each takes hundreds of cycles while products use shared memory.
  template <typename Operation>
  static __device__ __forceinline__ void combine(float (&values)[2], Operation operation) {
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
      const float others[2] = {__shfl_xor_sync(0xffffffffu, values[0], distance),
                               __shfl_xor_sync(0xffffffffu, values[1], distance)};
      values[0] = operation(values[0], others[0]);
      values[1] = operation(values[1], others[1]);
    }
  }

  // Finds the largest value of each row in the four threads that hold it.
  static __device__ __forceinline__ void largest(const float (&values)[kScores],
                                                 float (&maxima)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maxima[r] = fmaxf(values[2 * r], values[2 * r + 1]);
#pragma unroll
      for (int j = 1; j < kScores / 4; ++j) {
        maxima[r] = fmaxf(maxima[r], fmaxf(values[4 * j + 2 * r], values[4 * j + 2 * r + 1]));
      }
    }
    combine(maxima, [](float one, float other) { return fmaxf(one, other); });
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
    float maxima[2];
    largest(powers, maxima);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float maximum = maxima[r];
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

  __device__ __forceinline__ void exponentiate(float (&powers)[kScores]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float partial = -0.f;  // unlike an addition to 0, one to -0 is left out
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& power = powers[4 * j + 2 * r + c];
          power = exp2_fast(power);
          partial += power;
        }
      }
      sum[r] += partial;
    }
  }
};

}  // namespace distca::attention::sm90
