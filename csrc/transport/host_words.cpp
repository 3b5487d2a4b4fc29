#ifdef DISTCA_WITH_CUDA
#include "host_words.h"

#include <c10/cuda/CUDAException.h>

#include <atomic>

namespace distca::transport {

// The page belongs to the process and is registered with the driver. So a watchdog can still read
// it while the process ends and the driver is gone.
HostWords::HostWords() : words_(static_cast<uint32_t*>(page_.data())) {
  TORCH_INTERNAL_ASSERT(kSize * sizeof(uint32_t) <= page_.num_bytes());
  C10_CUDA_CHECK(cudaHostRegister(words_, page_.num_bytes(), cudaHostRegisterMapped));
  void* address = nullptr;
  C10_CUDA_CHECK(cudaHostGetDevicePointer(&address, words_, 0));
  on_device_ = static_cast<uint32_t*>(address);
}

HostWords::~HostWords() {
  cudaHostUnregister(words_);  // may fail while the process ends, which does no harm
}

uint32_t HostWords::read(int word) const {
  return std::atomic_ref(words_[word]).load(std::memory_order_acquire);
}

void HostWords::write(int word, uint32_t value) {
  std::atomic_ref(words_[word]).store(value, std::memory_order_release);
}

}  // namespace distca::transport
#endif
