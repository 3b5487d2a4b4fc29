#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "kernels.h"

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

// Does nothing for no blocks.
template <typename Arguments>
void launch_kernel(void (*kernel)(Arguments), const LaunchShape& shape, cudaStream_t stream,
                   const Arguments& arguments) {
  if (shape.num_blocks == 0) return;
  if (shape.shared_bytes > 48 * 1024) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shape.shared_bytes)),
          "cudaFuncSetAttribute");
  }
  kernel<<<shape.num_blocks, shape.num_threads, shape.shared_bytes, stream>>>(arguments);
  check(cudaGetLastError(), "kernel launch");
}

// Calls launch.operator()<T, kHeadDim>() for the element and computed head_dim of q.
template <typename Launch>
void by_element_and_head_dim(const RowTensor& q, const Launch& launch) {
  const bool is_64 = computed_head_dim(q.head_dim) == 64;
  if (q.element == Element::kBfloat16) {
    is_64 ? launch.template operator()<__nv_bfloat16, 64>()
          : launch.template operator()<__nv_bfloat16, 128>();
  } else {
    is_64 ? launch.template operator()<__half, 64>() : launch.template operator()<__half, 128>();
  }
}

}  // namespace distca::attention::sm90
