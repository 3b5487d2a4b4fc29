#pragma once

#include <cstdint>
#include <deque>
#include <mutex>

#include "../host_words.h"
#include "../watchdog.h"
#include "kernels.h"

namespace distca::transport::peer {

// Watches the kernels that wait for words of this rank's board.
class BoardWatch : public Watched {
 public:
  // `words` are those of `rank`, which is this one.
  BoardWatch(HostWords& words, int64_t rank) : words_(words), rank_(rank) {}

  void begin(uint32_t epoch, const Wait& wait);

  State look() override;
  Wait place() override;
  std::string complaint() override;
  void release() override;

 private:
  struct Call {
    uint32_t epoch;
    Wait wait;
  };
  struct Seen {
    uint32_t started, results, finished;
    bool operator==(const Seen&) const = default;
  };
  uint32_t read(HostWord word) const { return words_.read(static_cast<int>(word)); }
  Seen read() const;

  HostWords& words_;
  int64_t rank_;
  Seen last_ = {};

  std::mutex mutex_;
  std::deque<Call> calls_;  // the latest
};

}  // namespace distca::transport::peer
