#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/rows.h"

// Block kernels on vectors of kBytes bytes. Every function is always_inline and has no target of
// its own, so that it takes the instruction set of the tile function it ends up in.
#define DISTCA_BLOCK [[gnu::always_inline]] inline

namespace distca::attention::cpu {

// Scores live transposed, a panel of queries wide: x[row][lane], lane = query. Per-query values
// (maximum, sum, lse, delta, mask) are then plain vectors, keys and values are read as scalars
// where they lie, and nothing is ever reduced across lanes.
template <typename Scalar, int kBytes>
struct Simd {
  using Real = Scalar;
  using Int = std::conditional_t<sizeof(Real) == 8, int64_t, int32_t>;
  typedef Real Vec __attribute__((vector_size(kBytes)));
  typedef Int IntVec __attribute__((vector_size(kBytes)));
  static constexpr int kLanes = kBytes / sizeof(Real);
  static constexpr int kVecs = 2;
  static constexpr int kPanel = kVecs * kLanes;
  static constexpr int kRows = kBytes == 64 ? 8 : 4;  // kRows * kVecs accumulators in registers
};

// Rows of any register block and of any panel fit in multiples of these.
constexpr int64_t kMaxBlockRows = 8;
constexpr int64_t kMaxPanelBytes = 128;
constexpr int64_t kKeys = 64;  // keys of one block

constexpr double kLog2E = 1.44269504088896340736;

template <typename Real>
constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

// Minimax coefficients of 2^f on [-1/2, 1/2]: relative error 2e-9 (float), 3e-18 (double).
template <typename Real>
struct Exp2;

template <>
struct Exp2<float> {
  static constexpr int kDegree = 6;
  static constexpr float kCoefficients[] = {1.000000001f,    0.6931472057f,   0.2402264689f,
                                            0.05550328777f,  0.009618488956f, 0.001339993118f,
                                            0.0001534581216f};
  static constexpr float kRound = 0x1.8p23f;  // x + kRound has round(x) in its low bits
  static constexpr float kMin = -126.0f, kMax = 127.0f;
  static constexpr int kMantissaBits = 23;
};

template <>
struct Exp2<double> {
  static constexpr int kDegree = 11;
  static constexpr double kCoefficients[] = {1.0,
                                             0.69314718055994533,
                                             0.240226506959101562,
                                             0.0555041086648199216,
                                             0.00961812910758833524,
                                             0.00133335581467899217,
                                             0.000154035304625144321,
                                             0.0000152527334899885256,
                                             1.32154330896763992e-6,
                                             1.01781980216719308e-7,
                                             7.0741056135081428e-9,
                                             4.43528270695727715e-10};
  static constexpr double kRound = 0x1.8p52;
  static constexpr double kMin = -1022.0, kMax = 1023.0;
  static constexpr int kMantissaBits = 52;
};

// x = 2^x. Below kMin it is exactly 0, so that -infinity is; NaN stays NaN.
template <typename S>
DISTCA_BLOCK void exp2_inplace(typename S::Vec& x) {
  using Vec = typename S::Vec;
  using IntVec = typename S::IntVec;
  using E = Exp2<typename S::Real>;
  const Vec zero = {};
  const Vec lowest = zero + E::kMin, highest = zero + E::kMax, round = zero + E::kRound;
  const IntVec tiny = x < lowest;
  x = tiny ? lowest : x;
  x = x > highest ? highest : x;
  const Vec shifted = x + round;
  const Vec f = x - (shifted - round);
  Vec p = zero + E::kCoefficients[E::kDegree];
#pragma GCC unroll 16
  for (int i = E::kDegree - 1; i >= 0; --i) p = p * f + E::kCoefficients[i];
  const IntVec exponent = ((IntVec)shifted - (IntVec)round) << E::kMantissaBits;
  x = tiny ? zero : (Vec)((IntVec)p + exponent);
}

// x = e^x, as above.
template <typename S>
DISTCA_BLOCK void exp_inplace(typename S::Vec& x) {
  x *= static_cast<typename S::Real>(kLog2E);
  exp2_inplace<S>(x);
}

// c[rows][kPanel] (+)= a * b[inner][kPanel]; a is [rows][inner], or [inner][rows] when transposed.
// `rows` is a multiple of S::kRows.
template <typename S, bool kTransposed, bool kAccumulate>
DISTCA_BLOCK void panel_gemm(typename S::Real* c, const typename S::Real* a, int64_t a_stride,
                             const typename S::Real* b, int64_t rows, int64_t inner) {
  using Vec = typename S::Vec;
  for (int64_t row = 0; row < rows; row += S::kRows) {
    Vec* c_block = reinterpret_cast<Vec*>(c + row * S::kPanel);
    const typename S::Real* a_block = kTransposed ? a + row : a + row * a_stride;
    Vec sum[S::kRows][S::kVecs];
#pragma GCC unroll 16
    for (int m = 0; m < S::kRows; ++m) {
#pragma GCC unroll 16
      for (int n = 0; n < S::kVecs; ++n)
        sum[m][n] = kAccumulate ? c_block[m * S::kVecs + n] : Vec{};
    }
    for (int64_t k = 0; k < inner; ++k) {
      const Vec* b_row = reinterpret_cast<const Vec*>(b + k * S::kPanel);
#pragma GCC unroll 16
      for (int m = 0; m < S::kRows; ++m) {
        const auto x = kTransposed ? a_block[k * a_stride + m] : a_block[m * a_stride + k];
#pragma GCC unroll 16
        for (int n = 0; n < S::kVecs; ++n) sum[m][n] += x * b_row[n];
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < S::kRows; ++m) {
#pragma GCC unroll 16
      for (int n = 0; n < S::kVecs; ++n) c_block[m * S::kVecs + n] = sum[m][n];
    }
  }
}

// x[key][lane] = -infinity unless lo[key] <= lane <= hi[key]; both move by one per key.
template <typename S>
DISTCA_BLOCK void mask_panel(typename S::Real* x, int64_t num_keys, int64_t lo, int64_t hi) {
  using Int = typename S::Int;
  using IntVec = typename S::IntVec;
  IntVec lane = {};
  for (int i = 0; i < S::kLanes; ++i) lane[i] = i;
  const typename S::Vec hidden = typename S::Vec{} - kInfinity<typename S::Real>;
  const auto clip = [](int64_t i) __attribute__((always_inline)) {
    return static_cast<Int>(i < -1 ? -1 : i > S::kPanel ? S::kPanel : i);
  };
  for (int64_t key = 0; key < num_keys; ++key) {
    auto* row = reinterpret_cast<typename S::Vec*>(x + key * S::kPanel);
    const IntVec first = IntVec{} + clip(lo + key), last = IntVec{} + clip(hi + key);
#pragma GCC unroll 16
    for (int n = 0; n < S::kVecs; ++n) {
      const IntVec at = lane + n * S::kLanes;
      row[n] = ((at < first) | (at > last)) ? hidden : row[n];
    }
  }
}

// dst[row][0, width) = src[row], zero from `head_dim` on and from `num_rows` on.
template <typename Real, typename T>
DISTCA_BLOCK void load_rows(Real* dst, int64_t width, const T* src, int64_t row_stride,
                            int64_t num_rows, int64_t padded_rows, int64_t head_dim) {
  for (int64_t row = 0; row < num_rows; ++row) {
    Real* to = dst + row * width;
    const T* from = src + row * row_stride;
    for (int64_t d = 0; d < head_dim; ++d) to[d] = static_cast<Real>(from[d]);
    for (int64_t d = head_dim; d < width; ++d) to[d] = 0;
  }
  std::memset(dst + num_rows * width, 0, (padded_rows - num_rows) * width * sizeof(Real));
}

// dst[d][lane] = factor * src[lane][d], zero from lane `num_rows` on.
template <typename S, typename T>
DISTCA_BLOCK void load_transposed(typename S::Real* dst, const T* src, int64_t row_stride,
                                  int64_t num_rows, int64_t head_dim, typename S::Real factor) {
  using Real = typename S::Real;
  if (num_rows < S::kPanel) std::memset(dst, 0, head_dim * S::kPanel * sizeof(Real));
  for (int64_t row = 0; row < num_rows; ++row) {
    const T* from = src + row * row_stride;
    for (int64_t d = 0; d < head_dim; ++d) {
      dst[d * S::kPanel + row] = static_cast<Real>(from[d]) * factor;
    }
  }
}

// dst[lane][d] = factor[lane] * src[d][lane].
template <typename S, typename T>
DISTCA_BLOCK void store_transposed(T* dst, int64_t row_stride, const typename S::Real* src,
                                   int64_t num_rows, int64_t head_dim,
                                   const typename S::Real* factor) {
  for (int64_t row = 0; row < num_rows; ++row) {
    T* to = dst + row * row_stride;
    for (int64_t d = 0; d < head_dim; ++d) {
      to[d] = static_cast<T>(src[d * S::kPanel + row] * factor[row]);
    }
  }
}

}  // namespace distca::attention::cpu
