#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "failures.h"

namespace distca::transport {

// What streams wait for without a timeout of their own. Called by the watchdog's thread alone.
class Watched {
 public:
  virtual ~Watched() = default;

  // What happened since the last look.
  enum class State { kIdle, kMoving, kStill };
  virtual State look() = 0;

  // Returns the exchange that is waited for. The caller fills in the seconds.
  virtual Wait place() = 0;

  // Describes an error seen by the device that ends the group; empty if there is none.
  virtual std::string complaint() = 0;

  // Lets the streams drain, now and from now on, whatever becomes of their results.
  virtual void release() = 0;
};

// Keeps streams from waiting for ever for a rank that is gone. Releases what it watches when a rank
// has failed, when ranks wait for each other, or when nothing has moved for the timeout while a
// stream waits. From then on check() throws.
class Watchdog {
 public:
  // `watched` lives longer.
  Watchdog(Watched& watched, std::shared_ptr<FailureBoard> failures, double timeout_s);
  Watchdog(const Watchdog&) = delete;
  ~Watchdog();

  // Throws DistBackendError, naming where and which ranks, when the group is lost.
  void check();

 private:
  using Clock = std::chrono::steady_clock;

  void watch();
  bool sleep_until_stopped(std::chrono::milliseconds time);
  std::string reason_to_give_up(Clock::duration still, bool asks);
  std::string find_deadlock(Clock::duration still);
  void give_up(const std::string& reason);

  Watched& watched_;
  std::shared_ptr<FailureBoard> failures_;
  std::chrono::duration<double> timeout_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stops_ = false;
  bool has_given_up_ = false;
  std::string failure_;  // empty until the cause is known
  Clock::duration next_look_;
  std::thread thread_;
};

}  // namespace distca::transport
