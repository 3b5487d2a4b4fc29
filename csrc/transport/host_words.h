#pragma once

#include <cstdint>

#include "host_page.h"

namespace distca::transport {

// Words in host memory that kernels and a watchdog share, zero at first. The watchdog reads them
// without the CUDA driver. Another thread may hold the driver's lock until the device is idle, as
// when it launches a kernel for the first time or frees memory.
class HostWords {
 public:
  static constexpr int kSize = 1024;

  HostWords();
  HostWords(const HostWords&) = delete;
  ~HostWords();

  uint32_t* on_device() const { return on_device_; }
  uint32_t read(int word) const;
  void write(int word, uint32_t value);

 private:
  HostPage page_;
  uint32_t* words_;
  uint32_t* on_device_ = nullptr;
};

}  // namespace distca::transport
