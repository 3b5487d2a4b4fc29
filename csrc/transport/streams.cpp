#ifdef DISTCA_WITH_CUDA
#include "streams.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda.h>

namespace distca::transport {
namespace {

// Of the driver, through the runtime, so that the library needs no libcuda where there is none.
template <typename Function>
Function driver_function(const char* name) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found;
  C10_CUDA_CHECK(
      cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &found));
  TORCH_CHECK(found == cudaDriverEntryPointSuccess, "distca: ", name,
              " is missing from the CUDA driver; install one of CUDA 12 or newer");
  return reinterpret_cast<Function>(address);
}

void check_driver(CUresult result, const char* name) {
  TORCH_CHECK(result == CUDA_SUCCESS, "distca: ", name, " failed with error ",
              static_cast<int>(result));
}

}  // namespace

void write_on_stream(uint32_t* word, uint32_t value, cudaStream_t stream) {
  static const auto write =
      driver_function<decltype(&cuStreamWriteValue32)>("cuStreamWriteValue32");
  check_driver(write(stream, reinterpret_cast<CUdeviceptr>(word), value, 0),
               "cuStreamWriteValue32");
}

void write_on_stream(uint64_t* word, uint64_t value, cudaStream_t stream) {
  static const auto write =
      driver_function<decltype(&cuStreamWriteValue64)>("cuStreamWriteValue64");
  check_driver(write(stream, reinterpret_cast<CUdeviceptr>(word), value, 0),
               "cuStreamWriteValue64");
}

OwnStream::OwnStream(c10::Device device) : device_(device) {
  const c10::cuda::CUDAGuard guard(device_);
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

OwnStream::~OwnStream() {
  C10_CUDA_CHECK_WARN(cudaStreamDestroy(stream_));
}

c10::cuda::CUDAStream OwnStream::stream() const {
  return c10::cuda::getStreamFromExternal(stream_, device_.index());
}

}  // namespace distca::transport
#endif
