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

  // Since the last look; gone when the device has failed, whose error reaches the host by itself.
  enum class State { kIdle, kMoving, kStill, kGone };
  virtual State look() = 0;

  // What is waited for, in which exchange of which channel; seconds are the caller's.
  virtual Wait place() = 0;

  // What a device has seen that ends the group, in words; empty as long as it has not.
  virtual std::string complaint() = 0;

  // Lets the streams drain, now and from now on, whatever becomes of their results.
  virtual void release() = 0;
};

// Sees to it that no stream waits for ever for a rank that is gone. When a rank has failed, ranks
// wait for each other, or nothing has moved for the timeout while a stream waits, it releases what
// it watches; from then on check() throws.
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
  std::string failure_;  // once it is known why
  Clock::duration next_look_;
  std::thread thread_;
};

}  // namespace distca::transport
