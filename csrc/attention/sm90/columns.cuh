#pragma once

#include <cstdint>

namespace distca::attention::sm90 {

// Counted from its first column, a thread holds columns 8 * (i / 2) + i % 2 of an accumulator's
// row, for i from 0. Returns a bit for each i: whether that column is below `column`.
template <int kColumns>
__device__ __forceinline__ uint32_t columns_below(int32_t column) {
  static_assert(kColumns <= 128);
  const int32_t inside = max(0, min(column, kColumns));
  const int32_t count = inside / 8 * 2 + min(inside % 8, 2);
  return count == 32 ? ~0u : (1u << count) - 1;
}

// Hides elements of row r (0 or 1) of an accumulator whose bit in `seen` is 0.
template <int kSize>
__device__ __forceinline__ void hide(float (&scores)[kSize], int r, uint32_t seen) {
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) {
    if ((seen & 1u << i) == 0) scores[4 * (i / 2) + 2 * r + i % 2] = -INFINITY;
  }
}

}  // namespace distca::attention::sm90
