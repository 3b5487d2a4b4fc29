#include <ATen/Dispatch.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "backend.h"
#include "core/rows.h"

namespace distca::attention {
namespace {

constexpr int kLanes = 8;  // threads of a (row, head)
constexpr int kDotsPerBlock = 32;

// kVector elements are loaded at a time.
template <typename scalar_t, int kVector>
__global__ void row_dots_kernel(const scalar_t* a, const scalar_t* b, float* dots, int64_t num_dots,
                                int64_t head_dim) {
  struct alignas(kVector * sizeof(scalar_t)) Vector {
    scalar_t values[kVector];
  };
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kDotsPerBlock + threadIdx.y;
  float sum = 0.f;
  if (i < num_dots) {
#pragma unroll 2
    for (int64_t d = threadIdx.x * kVector; d < head_dim; d += kLanes * kVector) {
      const Vector x = *reinterpret_cast<const Vector*>(a + i * head_dim + d);
      const Vector y = *reinterpret_cast<const Vector*>(b + i * head_dim + d);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        sum += static_cast<float>(x.values[j]) * static_cast<float>(y.values[j]);
      }
    }
  }
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    sum += __shfl_down_sync(0xffffffffu, sum, offset, kLanes);
  }
  if (i < num_dots && threadIdx.x == 0) dots[i] = sum;
}

}  // namespace

void row_dots_cuda(const at::Tensor& a, const at::Tensor& b, const at::Tensor& dots) {
  AT_DISPATCH_REDUCED_FLOATING_TYPES(a.scalar_type(), "row_dots", [&] {
    constexpr int kVector = 16 / sizeof(scalar_t);
    const auto is_aligned = [](const at::Tensor& x) {
      return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
    };
    const bool in_vectors = a.size(2) % kVector == 0 && is_aligned(a) && is_aligned(b);
    const auto kernel =
        in_vectors ? row_dots_kernel<scalar_t, kVector> : row_dots_kernel<scalar_t, 1>;
    const int64_t num_dots = dots.numel();
    const auto num_blocks = static_cast<unsigned>(ceil_div(num_dots, kDotsPerBlock));
    kernel<<<num_blocks, dim3(kLanes, kDotsPerBlock), 0, c10::cuda::getCurrentCUDAStream()>>>(
        a.const_data_ptr<scalar_t>(), b.const_data_ptr<scalar_t>(), dots.mutable_data_ptr<float>(),
        num_dots, a.size(2));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace distca::attention
