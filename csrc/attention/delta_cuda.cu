#include <ATen/Dispatch.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>

#include "delta.h"

namespace distca::attention {
namespace {

constexpr int kWarp = 32;
constexpr int kWarpsPerBlock = 8;

// One warp per (row, head).
template <typename scalar_t>
__global__ void row_dots_kernel(const scalar_t* a, const scalar_t* b, float* dots, int64_t num_dots,
                                int64_t head_dim) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.y;
  if (i >= num_dots) return;
  float sum = 0.f;
  for (int64_t d = threadIdx.x; d < head_dim; d += kWarp) {
    sum += static_cast<float>(a[i * head_dim + d]) * static_cast<float>(b[i * head_dim + d]);
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    sum += __shfl_down_sync(0xffffffffu, sum, offset);
  }
  if (threadIdx.x == 0) dots[i] = sum;
}

}  // namespace

void row_dots_cuda(const at::Tensor& a, const at::Tensor& b, const at::Tensor& dots) {
  AT_DISPATCH_REDUCED_FLOATING_TYPES(a.scalar_type(), "row_dots", [&] {
    const int64_t num_dots = dots.numel();
    const auto num_blocks = static_cast<unsigned>((num_dots + kWarpsPerBlock - 1) / kWarpsPerBlock);
    row_dots_kernel<scalar_t>
        <<<num_blocks, dim3(kWarp, kWarpsPerBlock), 0, at::cuda::getCurrentCUDAStream()>>>(
            a.const_data_ptr<scalar_t>(), b.const_data_ptr<scalar_t>(),
            dots.mutable_data_ptr<float>(), num_dots, a.size(2));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace distca::attention
