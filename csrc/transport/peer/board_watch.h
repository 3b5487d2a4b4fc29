#pragma once

#include <cstdint>
#include <deque>
#include <mutex>

#include "../watchdog.h"
#include "host_words.h"

namespace distca::transport::peer {

// Kernels that wait for words of this rank's board.
class BoardWatch : public Watched {
 public:
  explicit BoardWatch(HostWords& words) : words_(words) {}

  void begin(uint32_t epoch, const Where& where);

  State look() override;
  Where place() override;
  void release() override;

 private:
  struct Call {
    uint32_t epoch;
    Where where;
  };
  struct Seen {
    uint32_t started, results, finished;
    bool operator==(const Seen&) const = default;
  };
  Seen read() const;

  HostWords& words_;
  Seen last_ = {};

  std::mutex mutex_;
  std::deque<Call> calls_;  // the latest
};

}  // namespace distca::transport::peer
