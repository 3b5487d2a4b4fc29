#include "host_page.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace distca::transport {
namespace {

[[noreturn]] void fail(int error, const char* what) {
  throw std::system_error(error, std::generic_category(), what);
}

}  // namespace

// Not of malloc: a forked process that frees memory which it does not have would crash.
HostPage::HostPage()
    : num_bytes_(static_cast<size_t>(sysconf(_SC_PAGESIZE))),
      data_(mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
  if (data_ == MAP_FAILED) fail(errno, "distca: mmap of a page of words failed");
  if (madvise(data_, num_bytes_, MADV_DONTFORK) == 0) return;
  const int error = errno;
  munmap(data_, num_bytes_);
  fail(error, "distca: madvise(MADV_DONTFORK) on a page of words failed");
}

HostPage::~HostPage() {
  munmap(data_, num_bytes_);  // what was advised of the page ends with it
}

}  // namespace distca::transport
