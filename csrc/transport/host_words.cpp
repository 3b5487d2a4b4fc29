#ifdef DISTCA_WITH_CUDA
#include "host_words.h"

#include <c10/cuda/CUDAException.h>

#include <atomic>

namespace distca::transport {

// Of the process, lent to the driver: a process that is ending still has it when the driver is
// gone, and a watchdog may look.
HostWords::HostWords() : words_(static_cast<uint32_t*>(page_.data())) {
  C10_CUDA_CHECK(cudaHostRegister(words_, page_.num_bytes(), cudaHostRegisterMapped));
  void* address = nullptr;
  C10_CUDA_CHECK(cudaHostGetDevicePointer(&address, words_, 0));
  on_device_ = static_cast<uint32_t*>(address);
}

HostWords::~HostWords() {
  cudaHostUnregister(words_);  // fails where the process is ending: then nobody needs it
}

uint32_t HostWords::read(int word) const {
  return std::atomic_ref(words_[word]).load(std::memory_order_acquire);
}

void HostWords::write(int word, uint32_t value) {
  std::atomic_ref(words_[word]).store(value, std::memory_order_release);
}

}  // namespace distca::transport
#endif
