#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "head_start.h"

namespace distca::transport {
namespace {

constexpr unsigned kNanoseconds = 20000;  // a launch that is ready begins within about 5 us

__global__ void hold_kernel() {
  __nanosleep(kNanoseconds);
}

}  // namespace

void hold_current_stream() {
  hold_kernel<<<1, 1, 0, c10::cuda::getCurrentCUDAStream()>>>();
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace distca::transport
