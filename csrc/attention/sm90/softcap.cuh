#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <limits>

#include "kernels.h"
#include "ptx.cuh"

// Scores capped at +-softcap, which kernels keep as tanh(s / softcap). It is 1 - 2 / (e^2x + 1),
// off by 2^-22. tanh.approx is off by 2^-11 instead, which at a softcap of 50 is an error of 2 % of
// a probability: more than the dtypes' own rounding.
namespace distca::attention::sm90 {

struct Softcap {
  float power_scale;  // turns q k^T into 2 s / softcap, in powers of 2
  float score_log2;   // softcap in powers of 2
};

template <typename Call>
Softcap softcap_of(const Call& call) {
  if (call.softcap == 0.f) return {};
  constexpr float kLargest = std::numeric_limits<float>::max();  // 0 * inf would be NaN
  return {std::min(2.f * kLog2E * call.softmax_scale / call.softcap, kLargest),
          call.softcap * kLog2E};
}

// tanh(s / softcap) for an element of q k^T.
__device__ __forceinline__ float capped(float product, const Softcap& cap) {
  return fmaf(-2.f, reciprocal_fast(exp2_fast(product * cap.power_scale) + 1.f), 1.f);
}

template <int kSize>
__device__ __forceinline__ void cap_scores(float (&scores)[kSize], const Softcap& cap) {
#pragma unroll
  for (float& score : scores) score = capped(score, cap);
}

// The slope of tanh where its value is `score`.
__device__ __forceinline__ float slope_at(float score) {
  return fmaf(-score, score, 1.f);
}

// What 1 is in powers of 2, where kernels have products of q and k or, if Shape caps them, tanh.
template <typename Shape, typename Arguments>
__device__ __forceinline__ float score_log2(const Arguments& arguments) {
  if constexpr (Shape::kIsCapped) {
    return arguments.cap.score_log2;
  } else {
    return arguments.softmax_scale * kLog2E;
  }
}

// The same kernel for capped scores.
template <typename Shape>
struct Capped : Shape {
  static constexpr bool kIsCapped = true;
};

}  // namespace distca::attention::sm90
