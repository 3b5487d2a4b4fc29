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

// Not by malloc: a forked process would crash when it frees a page that it did not inherit.
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
  munmap(data_, num_bytes_);  // ends MADV_DONTFORK, too
}

}  // namespace distca::transport
