#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

// Two streams take turns: see distca/pingpong/turns.py. A wait gives up after max_ns, because the
// kernel that would end it may be queued behind it, on the device or on the host.
namespace distca::ops {
namespace {

constexpr unsigned kLookNs = 500;

__global__ void reach_kernel(int32_t* reached, int32_t number) {
  __threadfence();
  *static_cast<volatile int32_t*>(reached) = number;
}

__device__ __forceinline__ int64_t now_ns() {
  int64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

__global__ void await_kernel(int32_t* reached, int32_t number, int64_t max_ns, int32_t* num_late) {
  const volatile int32_t* word = reached;
  const int64_t end = now_ns() + max_ns;
  while (*word < number) {
    if (now_ns() > end) {
      *static_cast<volatile int32_t*>(num_late) += 1;
      return;
    }
    __nanosleep(kLookNs);
  }
}

int32_t* word_of(const at::Tensor& reached) {
  TORCH_CHECK_VALUE(reached.is_cuda() && reached.scalar_type() == at::kInt && reached.numel() == 1,
                    "reached is ", reached.toString(), " of ", reached.numel(),
                    " elements; expected one int32 on a CUDA device");
  return reached.data_ptr<int32_t>();
}

void reach_turn(const at::Tensor& reached, int64_t number) {
  int32_t* word = word_of(reached);
  const c10::cuda::CUDAGuard guard(reached.device());
  reach_kernel<<<1, 1, 0, at::cuda::getCurrentCUDAStream()>>>(word, static_cast<int32_t>(number));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void await_turn(const at::Tensor& reached, int64_t number, int64_t max_ns,
                const at::Tensor& num_late) {
  int32_t* word = word_of(reached);
  TORCH_CHECK_VALUE(num_late.is_pinned() && num_late.scalar_type() == at::kInt,
                    "num_late: expected int32 in pinned memory");
  const c10::cuda::CUDAGuard guard(reached.device());
  await_kernel<<<1, 1, 0, at::cuda::getCurrentCUDAStream()>>>(word, static_cast<int32_t>(number),
                                                              max_ns, num_late.data_ptr<int32_t>());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

TORCH_LIBRARY_IMPL(distca, CUDA, m) {
  m.impl("reach_turn", reach_turn);
  m.impl("await_turn", await_turn);
}

}  // namespace
}  // namespace distca::ops
