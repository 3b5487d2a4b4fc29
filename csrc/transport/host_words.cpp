#ifdef DISTCA_WITH_CUDA
#include "host_words.h"

#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

namespace distca::transport {
namespace {

constexpr size_t kPageBytes = 4096;

}  // namespace

// Of the process, lent to the driver: a process that is ending still has it when the driver is
// gone, and a watchdog may look.
HostWords::HostWords()
    : words_(static_cast<uint32_t*>(std::aligned_alloc(kPageBytes, kPageBytes)), std::free) {
  TORCH_CHECK(words_ != nullptr, "distca: no memory for ", kPageBytes, " bytes on the host");
  std::fill_n(words_.get(), kPageBytes / sizeof(uint32_t), uint32_t{0});
  C10_CUDA_CHECK(cudaHostRegister(words_.get(), kPageBytes, cudaHostRegisterMapped));
  void* address = nullptr;
  C10_CUDA_CHECK(cudaHostGetDevicePointer(&address, words_.get(), 0));
  on_device_ = static_cast<uint32_t*>(address);
}

HostWords::~HostWords() {
  cudaHostUnregister(words_.get());  // fails where the process is ending: then nobody needs it
}

uint32_t HostWords::read(int word) const {
  return std::atomic_ref(words_.get()[word]).load(std::memory_order_acquire);
}

void HostWords::write(int word, uint32_t value) {
  std::atomic_ref(words_.get()[word]).store(value, std::memory_order_release);
}

}  // namespace distca::transport
#endif
