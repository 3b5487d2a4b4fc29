#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "../failures.h"

namespace distca::transport {

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

// An exchange under way.
struct Pending {
  Wait wait;
  Works works;
};

// Waits for the exchanges of one process group. Gives up as soon as a peer is known to be gone or
// to wait for something else. Otherwise this rank would wait for it until the group's timeout.
class Patience {
 public:
  Patience(std::shared_ptr<FailureBoard> failures, const std::string& channel)
      : failures_(std::move(failures)), channel_(channel) {}

  // Runs `communicate`; its failure becomes a DistBackendError with `where` and the ranks at fault.
  template <typename F>
  auto guard(const Where& where, F&& communicate) {
    try {
      return communicate();
    } catch (const std::exception& error) {
      fail(where, message_of(error));
    }
  }

  // Counts an exchange and starts its works. `activity` says in words what all ranks do at this
  // point.
  template <typename F>
  Pending start(const Where& where, const std::string& activity, F&& launch) {
    const Wait wait = failures_->begin(channel_, where, activity);
    check_stopped(where);
    return {wait, guard(where, launch)};
  }

  // Makes the host wait for an exchange on the CPU. On the main thread, signal handlers run
  // meanwhile, and an exception that they raise ends the wait.
  void wait_on_host(const Pending& pending);

  // Makes the current stream of a device wait for an exchange on it.
  void wait_on_stream(const Pending& pending);

  // Throws a DistBackendError that describes how calls of ranks differ. All ranks quote it.
  [[noreturn]] void fail_together(const Where& where, const std::string& mismatch);

  // Sets whether training waits for the thread that waits here. If not, the wait keeps no rank from
  // going on, and cannot be part of a deadlock.
  void set_awaited(bool is_awaited) { is_awaited_ = is_awaited; }

  // Ends all waits of the host, now and from now on: this rank leaves the group.
  void stop() noexcept { is_stopped_ = true; }

 private:
  [[noreturn]] void fail(const Where& where, const std::string& error);
  void check_stopped(const Where& where) const;
  void wait_in_slices(c10d::Work& work, Wait wait);

  std::shared_ptr<FailureBoard> failures_;
  std::string channel_;
  std::mutex mutex_;  // forward and backward passes run on different threads
  std::atomic<bool> is_awaited_ = true;
  std::atomic<bool> is_stopped_ = false;
};

struct Gathering {
  at::Tensor bytes;  // uint8 [num_ranks, bytes], complete when the exchange is
  Pending pending;
};

// Small exchanges between all ranks on the CPU. The process group never gets a Python tensor: its
// threads might release the tensor after the interpreter has ended.
class ControlPlane {
 public:
  ControlPlane(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<Patience> patience)
      : group_(std::move(group)), patience_(std::move(patience)) {}

  // Collective: returns every rank's `own`, which may have any length, by rank. `activity` says in
  // words what all ranks do at this point, for errors. Throws ValueError on every rank if ranks are
  // in different phases.
  std::vector<std::string> gather(std::string_view own, const Where& where,
                                  const std::string& activity);

  // Collective: starts to gather `own` of every rank. All have the same length.
  Gathering start(std::string_view own, const Where& where, const std::string& activity);

  // Collective: returns every rank's `tensor`, [num_ranks, ...]. All have the same shape.
  at::Tensor all_gather(const at::Tensor& tensor, const Where& where, const std::string& activity);

  // Ends all waits here, now and from now on: see Patience.
  void stop() noexcept { patience_->stop(); }

  // Sets whether training waits for what is gathered here: see Patience.
  void set_awaited(bool is_awaited) { patience_->set_awaited(is_awaited); }

 private:
  at::Tensor exchange(std::string_view own, const Where& where, const std::string& activity);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<Patience> patience_;
  // Bytes of text that the first exchange of a gather carries. The number follows from earlier
  // texts of all ranks, so it is equal on all of them.
  size_t room_ = 208;
};

}  // namespace distca::transport
