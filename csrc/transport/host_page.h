#pragma once

#include <cstddef>

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

}  // namespace distca::transport
