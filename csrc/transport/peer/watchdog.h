#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../failures.h"
#include "kernels.h"

namespace distca::transport::peer {

// Sees to it that no stream waits for ever for a rank that is gone: kernels that wait for words
// have no timeout. When a rank has failed, or nothing has moved for the timeout while a call waits,
// it poisons this rank's board until its streams have drained; from then on every call throws.
class Watchdog {
 public:
  Watchdog(const Board& board, c10::Device device, std::shared_ptr<FailureBoard> failures,
           double timeout_s);
  Watchdog(const Watchdog&) = delete;
  ~Watchdog();

  // Throws DistBackendError, naming where and which ranks, when the group is lost.
  void begin(uint32_t epoch, const Where& where);

 private:
  using Clock = std::chrono::steady_clock;
  struct Call {
    uint32_t epoch;
    Where where;
  };

  void watch();
  bool sleep_until_stopped(std::chrono::milliseconds time);
  std::vector<uint32_t> read_words();
  bool is_waiting(const std::vector<uint32_t>& words) const;
  std::string reason_to_give_up(Clock::duration still) const;
  void fail(const std::string& reason, const std::vector<uint32_t>& words);
  bool poison();  // false when the device is gone

  Board board_;
  c10::Device device_;
  std::shared_ptr<FailureBoard> failures_;
  std::chrono::duration<double> timeout_;
  cudaStream_t stream_ = nullptr;

  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stops_ = false;
  std::deque<Call> calls_;  // the latest
  std::string failure_;
  std::thread thread_;
};

}  // namespace distca::transport::peer
