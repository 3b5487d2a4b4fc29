#pragma once

#include <cstddef>
#include <cstdint>

#ifdef DISTCA_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace distca::transport {

// A page of zeros that forked processes do not inherit. If they shared it, the process that writes
// first would get a copy, and if that is this process, its device would go on with the old page.
class HostPage {
 public:
  // Throws std::system_error if the system has no page to give.
  HostPage();
  HostPage(const HostPage&) = delete;
  ~HostPage();

  void* data() const { return data_; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  size_t num_bytes_;
  void* data_;
};

#ifdef DISTCA_WITH_CUDA
// What streams and the watchdog of a transport tell each other. Waits are numbered in order, modulo
// 2^32.
enum class HostWord {
  kFinished,   // number of the latest wait that has ended
  kStarted,    // ... that has begun
  kResults,    // ... whose results this rank has published, where waits include them
  kReleased,   // whether the watchdog has given up, so that kernels stop waiting
  kMismatch,   // whether a row of another call has come
  kTheirRank,  // that sent it
  kTheirTag,   // of its call, see tag_of
  kOwnTag      // of the call that was expected
};

// These words in host memory, zero at first. The watchdog reads them without the CUDA driver.
// Another thread may hold the driver's lock until the device is idle, as when it launches a kernel
// for the first time or frees memory.
class HostWords {
 public:
  HostWords();
  HostWords(const HostWords&) = delete;
  ~HostWords();

  uint32_t* on_device() const { return on_device_; }
  uint32_t read(HostWord word) const;
  void write(HostWord word, uint32_t value);

 private:
  HostPage page_;
  uint32_t* words_;
  uint32_t* on_device_ = nullptr;
};

// Writes a word of device or registered host memory when the stream gets there, after what it wrote
// before. Without a kernel: a kernel's first launch may wait for the device.
void write_on_stream(uint32_t* word, uint32_t value, cudaStream_t stream);
void write_on_stream(uint64_t* word, uint64_t value, cudaStream_t stream);
#endif

}  // namespace distca::transport
