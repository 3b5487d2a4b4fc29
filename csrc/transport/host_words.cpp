#include "host_words.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#ifdef DISTCA_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <cuda.h>

#include <atomic>
#endif

namespace distca::transport {

// Not by malloc: a forked process would crash when it frees a page that it did not inherit.
HostPage::HostPage()
    : num_bytes_(static_cast<size_t>(sysconf(_SC_PAGESIZE))),
      data_(mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
  if (data_ == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(),
                            "distca: mmap of a page of words failed");
  }
  if (madvise(data_, num_bytes_, MADV_DONTFORK) == 0) return;
  const std::system_error error(errno, std::generic_category(),
                                "distca: madvise(MADV_DONTFORK) on a page of words failed");
  munmap(data_, num_bytes_);
  throw error;
}

HostPage::~HostPage() {
  munmap(data_, num_bytes_);  // ends MADV_DONTFORK, too
}

#ifdef DISTCA_WITH_CUDA
namespace {

// Calls a function of the driver. Finds it through the runtime, so that the library needs no
// libcuda where there is none.
template <typename Function, typename... Arguments>
void call_driver(const char* name, Arguments... arguments) {
  static const auto function = [name] {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult query;
    C10_CUDA_CHECK(
        cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &query));
    TORCH_CHECK(query == cudaDriverEntryPointSuccess, "distca: ", name,
                " is missing from the CUDA driver; install one of CUDA 12 or newer");
    return reinterpret_cast<Function>(address);
  }();
  const CUresult result = function(arguments...);
  TORCH_CHECK(result == CUDA_SUCCESS, "distca: ", name, " failed with error ",
              static_cast<int>(result));
}

}  // namespace

// The page belongs to the process and is registered with the driver. So a watchdog can still read
// it while the process ends and the driver is gone.
HostWords::HostWords() : words_(static_cast<uint32_t*>(page_.data())) {
  C10_CUDA_CHECK(cudaHostRegister(words_, page_.num_bytes(), cudaHostRegisterMapped));
  void* address = nullptr;
  C10_CUDA_CHECK(cudaHostGetDevicePointer(&address, words_, 0));
  on_device_ = static_cast<uint32_t*>(address);
}

HostWords::~HostWords() {
  cudaHostUnregister(words_);  // may fail while the process ends, which does no harm
}

uint32_t HostWords::read(HostWord word) const {
  return std::atomic_ref(words_[static_cast<int>(word)]).load(std::memory_order_acquire);
}

void HostWords::write(HostWord word, uint32_t value) {
  std::atomic_ref(words_[static_cast<int>(word)]).store(value, std::memory_order_release);
}

void write_on_stream(uint32_t* word, uint32_t value, cudaStream_t stream) {
  call_driver<decltype(&cuStreamWriteValue32)>("cuStreamWriteValue32", stream,
                                               reinterpret_cast<CUdeviceptr>(word), value, 0);
}

void write_on_stream(uint64_t* word, uint64_t value, cudaStream_t stream) {
  call_driver<decltype(&cuStreamWriteValue64)>("cuStreamWriteValue64", stream,
                                               reinterpret_cast<CUdeviceptr>(word), value, 0);
}
#endif

}  // namespace distca::transport
