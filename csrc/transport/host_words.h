#pragma once

#include <cstdint>

#include "host_page.h"

namespace distca::transport {

// Words in the host's memory that kernels and a watchdog share, zero at first. The watchdog needs
// no driver for them, which another thread may have locked while it waits for the device, as it
// does where a kernel is launched for the first time, or memory is given back.
class HostWords {
 public:
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
