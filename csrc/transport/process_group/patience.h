#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "../failures.h"

namespace distca::transport {

// Waits for the exchanges of one process group, and gives up as soon as a peer is known to be gone,
// or to wait for something else: a rank that never sends would hold us until the group's timeout.
class Patience {
 public:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

  Patience(std::shared_ptr<FailureBoard> failures, const std::string& channel)
      : failures_(std::move(failures)), channel_(failures_->open_channel(channel)) {}

  // Runs `communicate`; its failure becomes a DistBackendError with `where` and the ranks at fault.
  template <typename F>
  void guard(const Where& where, F&& communicate) {
    try {
      communicate();
    } catch (const CallMismatch& mismatch) {
      fail_together(where, mismatch);
    } catch (const std::exception& error) {
      fail(where, message_of(error));
    }
  }

  // Counts an exchange that begins. `activity` is what all ranks do at this point.
  Wait enter(const Where& where, const std::string& activity);

  // That exchange on the CPU; the host waits.
  void wait_on_host(const Works& works, const Wait& wait);

  // That exchange on a device; its current stream waits.
  void wait_on_stream(const Works& works, const Where& where);

  // Whether the training waits for what a thread in the background does here. Others' waits are
  // nothing that keeps a rank from going on.
  void set_awaited(bool is_awaited) { is_awaited_ = is_awaited; }

 private:
  [[noreturn]] void fail(const Where& where, const std::string& error);
  [[noreturn]] void fail_together(const Where& where, const CallMismatch& mismatch);
  void wait_in_slices(c10d::Work& work, Wait wait);

  std::shared_ptr<FailureBoard> failures_;
  std::shared_ptr<Channel> channel_;
  std::mutex mutex_;  // forward and backward passes run on different threads
  std::atomic<bool> is_awaited_ = true;
};

}  // namespace distca::transport
