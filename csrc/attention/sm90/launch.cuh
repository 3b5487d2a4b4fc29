#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace distca::attention::sm90 {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + " failed: " + cudaGetErrorString(error));
}

inline int num_multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
  return count;
}

struct LaunchShape {
  int num_blocks;
  int num_threads;
  uint32_t shared_bytes;
};

template <typename Arguments>
void launch_kernel(void (*kernel)(Arguments), const LaunchShape& shape, cudaStream_t stream,
                   const Arguments& arguments) {
  if (shape.shared_bytes > 48 * 1024) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shape.shared_bytes)),
          "cudaFuncSetAttribute");
  }
  kernel<<<shape.num_blocks, shape.num_threads, shape.shared_bytes, stream>>>(arguments);
  check(cudaGetLastError(), "kernel launch");
}

}  // namespace distca::attention::sm90
