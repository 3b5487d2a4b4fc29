#include "host_words.h"

#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

namespace distca::transport::peer {
namespace {

constexpr size_t kPageBytes = 4096;

}  // namespace

HostWords::HostWords() {
  // Of the process, lent to the driver: a process that is ending still has it when the driver is
  // gone, and a watchdog may look.
  words_ = static_cast<uint32_t*>(std::aligned_alloc(kPageBytes, kPageBytes));
  TORCH_CHECK(words_ != nullptr, "distca: no memory for ", kPageBytes, " bytes on the host");
  std::fill_n(words_, kPageBytes / sizeof(uint32_t), uint32_t{0});
  C10_CUDA_CHECK(cudaHostRegister(words_, kPageBytes, cudaHostRegisterMapped));
  void* address = nullptr;
  C10_CUDA_CHECK(cudaHostGetDevicePointer(&address, words_, 0));
  on_device_ = static_cast<uint32_t*>(address);
}

HostWords::~HostWords() {
  // Fails where the process is ending: then nobody needs it.
  if (cudaHostUnregister(words_) == cudaSuccess) std::free(words_);
}

uint32_t HostWords::read(HostWord word) const {
  return std::atomic_ref(words_[static_cast<int>(word)]).load(std::memory_order_acquire);
}

void HostWords::write(HostWord word, uint32_t value) {
  std::atomic_ref(words_[static_cast<int>(word)]).store(value, std::memory_order_release);
}

}  // namespace distca::transport::peer
