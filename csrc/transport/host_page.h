#pragma once

#include <cstddef>

namespace distca::transport {

// A page of zeros that processes forked from this one do not have. With a page in common, the one
// of the two that writes first gets a copy, and a device that had this process's goes on with the
// old one.
class HostPage {
 public:
  // Throws std::system_error where the system gives none.
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
