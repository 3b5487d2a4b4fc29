#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
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
  int cluster_blocks = 1;  // num_blocks is a multiple of it
};

// Does nothing if there are no blocks.
template <typename Arguments>
void launch_kernel(void (*kernel)(Arguments), const LaunchShape& shape, cudaStream_t stream,
                   const Arguments& arguments) {
  if (shape.num_blocks == 0) return;
  if (shape.shared_bytes > 48 * 1024) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shape.shared_bytes)),
          "cudaFuncSetAttribute");
  }
  cudaLaunchAttribute cluster{.id = cudaLaunchAttributeClusterDimension};
  cluster.val.clusterDim = {static_cast<unsigned>(shape.cluster_blocks), 1, 1};
  const cudaLaunchConfig_t config{.gridDim = dim3(shape.num_blocks),
                                  .blockDim = dim3(shape.num_threads),
                                  .dynamicSmemBytes = shape.shared_bytes,
                                  .stream = stream,
                                  .attrs = &cluster,
                                  .numAttrs = shape.cluster_blocks > 1 ? 1u : 0u};
  check(cudaLaunchKernelEx(&config, kernel, arguments), "kernel launch");
}

// Calls launch.operator()<T>() for the element of q.
template <typename Launch>
void by_element(const RowTensor& q, const Launch& launch) {
  if (q.element == Element::kBfloat16) {
    launch.template operator()<__nv_bfloat16>();
  } else {
    launch.template operator()<__half>();
  }
}

// Calls launch.operator()<T, kHeadDim, kValueDim>() for the element of q and the computed widths.
// `call` is a ForwardCall or a BackwardCall.
template <typename Call, typename Launch>
void by_element_and_widths(const Call& call, const Launch& launch) {
  const Widths widths = computed_widths(call.q.head_dim, call.v.head_dim, call.softcap);
  by_element(call.q, [&]<typename T>() {
    if (widths.queries == 64) {
      launch.template operator()<T, 64, 64>();
    } else if (widths.queries == 128) {
      launch.template operator()<T, 128, 128>();
    } else if (widths.values == 128) {
      launch.template operator()<T, 192, 128>();
    } else if (widths.queries == 192) {
      launch.template operator()<T, 192, 192>();
    } else {
      launch.template operator()<T, 256, 256>();
    }
  });
}

// The same for capped scores.
template <typename Call, typename Launch>
void by_element_and_capped_widths(const Call& call, const Launch& launch) {
  const Widths widths = computed_widths(call.q.head_dim, call.v.head_dim, call.softcap);
  by_element(call.q, [&]<typename T>() {
    if (widths.queries == 128) {
      launch.template operator()<T, 128, 128>();
    } else {
      launch.template operator()<T, 256, 256>();
    }
  });
}

}  // namespace distca::attention::sm90
