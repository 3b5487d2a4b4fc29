#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "failures.h"
#include "host_words.h"

namespace distca::transport {

// Keeps the streams of a device from waiting for ever for a rank that is gone. Releases them when a
// rank has failed, when ranks wait for each other, when rows of another call have come, or when
// nothing has moved for the timeout while a stream waits. From then on check() throws.
class Watchdog {
 public:
  // `words`, which live longer, say where the streams are. `release` lets them drain, now and from
  // now on, whatever becomes of their results.
  Watchdog(HostWords& words, std::function<void()> release, std::shared_ptr<FailureBoard> failures,
           double timeout_s);
  // Throws DistBackendError, naming where and which ranks, when the group is lost.
  void check();

  // Notes the next wait. It ends in `last_phase`, which begins when results are published.
  void note(uint32_t number, const Wait& wait, const char* last_phase);

 private:
  using Clock = std::chrono::steady_clock;
  struct Noted {
    uint32_t number;
    Wait wait;
    const char* last_phase;
  };

  void watch(const std::stop_token& stop);
  bool is_still();
  Noted place();
  std::string find_mismatch();
  std::string reason_to_give_up(Clock::duration still, bool asks);
  void give_up(const std::string& reason);

  HostWords& words_;
  std::function<void()> release_;
  std::shared_ptr<FailureBoard> failures_;
  std::chrono::duration<double> timeout_;

  std::mutex mutex_;
  std::condition_variable_any changed_;
  bool has_given_up_ = false;
  std::string failure_;      // empty until the cause is known
  std::deque<Noted> waits_;  // those that had not ended at the last look
  Noted latest_{0, {}, ""};  // of those that had

  std::pair<uint32_t, uint32_t> last_{};  // finished, results; of the thread, like next_look_
  Clock::duration next_look_;
  std::jthread thread_;  // the last member, so that it ends before the others
};

}  // namespace distca::transport
