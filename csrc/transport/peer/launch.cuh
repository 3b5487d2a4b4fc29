#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace distca::transport::peer {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + " failed: " + cudaGetErrorString(error));
}

// Returns the number of multiprocessors of the current device. Asks every device once.
inline int num_multiprocessors() {
  static const std::vector<int> by_device = [] {
    int num_devices = 0;
    check(cudaGetDeviceCount(&num_devices), "cudaGetDeviceCount");
    std::vector<int> numbers(num_devices);
    for (int device = 0; device < num_devices; ++device) {
      check(cudaDeviceGetAttribute(&numbers[device], cudaDevAttrMultiProcessorCount, device),
            "cudaDeviceGetAttribute");
    }
    return numbers;
  }();
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return by_device.at(device);
}

// A dependent kernel comes to the device while the one before it in the stream still runs, which
// hides what its launch takes. It sees nothing too early: all of its threads call await_predecessor
// before they touch what that kernel may write or read, but for words, which kernels wait for
// whoever raises them, and before they end. It returns when the
// kernel before has ended and what that wrote is visible. That kernel waited in the same way, or is
// an ordinary one, which starts when all before it have ended; and an ordinary one that follows
// waits for all of this. Kernels of the model might skip
// the wait, so the first of a call, start or store, is ordinary; none of theirs is between it and
// ours.

// Lets the next kernel come now, if it is a dependent one.
__device__ __forceinline__ void admit_dependent() {
#if __CUDA_ARCH__ >= 900  // peer memory is for Hopper: nothing runs what is built for others
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void await_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <typename... Parameters>
void launch_dependent(void (*kernel)(Parameters...), dim3 grid, int num_threads,
                      cudaStream_t stream, const Parameters&... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(num_threads));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, arguments...), "peer memory kernel launch");
}

}  // namespace distca::transport::peer
