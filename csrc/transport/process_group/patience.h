#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "../failures.h"

namespace distca::transport {

// Waits for the exchanges of one process group. Gives up as soon as a peer is known to be gone or
// to wait for something else: otherwise a rank that never sends would hold us until the group's
// timeout.
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
    } catch (const Interrupted& interrupted) {
      std::rethrow_exception(interrupted.error);
    } catch (const Parted& parted) {
      part(where, parted.text);
    } catch (const CallMismatch& mismatch) {
      fail_together(where, mismatch);
    } catch (const std::exception& error) {
      fail(where, message_of(error));
    }
  }

  // Counts an exchange that begins. `activity` says in words what all ranks do at this point.
  Wait enter(const Where& where, const std::string& activity);

  // Makes the host wait for an exchange on the CPU. On the main thread, signal handlers run
  // meanwhile, and an exception that they raise ends the wait.
  void wait_on_host(const Works& works, const Wait& wait);

  // Makes the current stream of a device wait for an exchange on it.
  void wait_on_stream(const Works& works, const Where& where);

  // Sets whether training waits for the thread that waits here. If not, the wait keeps no rank from
  // going on, and cannot be part of a deadlock.
  void set_awaited(bool is_awaited) { is_awaited_ = is_awaited; }

  // Ends all waits of the host, now and from now on: this rank leaves the group.
  void stop() noexcept { is_stopped_ = true; }

  // Throws after stop(). Call it inside guard().
  void check_stopped() const;

 private:
  // These end a wait although nothing is broken.
  struct Interrupted {
    std::exception_ptr error;  // raised by a signal handler
  };
  struct Parted {
    std::string text;
  };

  [[noreturn]] void part(const Where& where, const std::string& text);
  [[noreturn]] void fail(const Where& where, const std::string& error);
  [[noreturn]] void fail_together(const Where& where, const CallMismatch& mismatch);
  void wait_in_slices(c10d::Work& work, Wait wait);
  void look_at_self();
  void look_at_others();

  std::shared_ptr<FailureBoard> failures_;
  std::shared_ptr<Channel> channel_;
  std::mutex mutex_;  // forward and backward passes run on different threads
  std::atomic<bool> is_awaited_ = true;
  std::atomic<bool> is_stopped_ = false;
};

}  // namespace distca::transport
