#include "patience.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace distca::transport {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kSlice{50};  // after which signals and stop() are noticed
constexpr std::chrono::milliseconds kLook{500};  // from one look at failures to the next

bool is_main_thread() {
  return syscall(SYS_gettid) == getpid();
}

// Runs pending signal handlers of Python, which Python does only between its own instructions. An
// operator implemented in Python keeps the library independent of Python's ABI.
void handle_signals() {
  static const auto run_handlers =
      c10::Dispatcher::singleton().findSchemaOrThrow("distca::handle_signals", "").typed<void()>();
  run_handlers.call();
}

// Returns whether the work ends within a slice. Throws the work's error.
bool ends_soon(c10d::Work& work) {
  try {
    work.wait(kSlice);
    return true;
  } catch (const std::exception&) {
    // The slice is over, or the operation has failed; or it ended just now.
  }
  if (!work.isCompleted()) return false;
  work.wait();
  return true;
}

}  // namespace

void Patience::part(const Where& where, const std::string& text) {
  TORCH_CHECK_WITH(DistBackendError, false, "distca: ", describe(where), ": ", text);
}

void Patience::fail(const Where& where, const std::string& error) {
  const std::string departed =
      failures_->find_departed(channel_->name(), channel_->num_completed());
  part(where, departed.empty() ? failures_->diagnose(error, describe(where)) : departed);
}

void Patience::fail_together(const Where& where, const CallMismatch& mismatch) {
  failures_->announce_mismatch(mismatch.what());
  part(where, failures_->diagnose(mismatch.what(), describe(where)));
}

void Patience::check_stopped() const {
  if (is_stopped_) throw Parted{"given up, because this rank leaves the group"};
}

void Patience::look_at_self() {
  check_stopped();
  if (!is_main_thread()) return;
  try {
    handle_signals();
  } catch (const std::exception&) {
    throw Interrupted{std::current_exception()};
  }
}

void Patience::look_at_others() {
  // A rank that has left after an error of its own is not among these.
  const std::string departed =
      failures_->find_departed(channel_->name(), channel_->num_completed());
  if (!departed.empty()) throw Parted{departed};
  TORCH_CHECK(!failures_->alarmed(), "given up, because a rank of the group has failed");
}

void Patience::wait_in_slices(c10d::Work& work, Wait wait) {
  const Clock::time_point start = Clock::now();
  Clock::time_point next_look = start + kLook, next_question = start + pause_after({});
  while (!ends_soon(work)) {
    look_at_self();
    const Clock::time_point now = Clock::now();
    if (now < next_look) continue;
    next_look = now + kLook;
    look_at_others();
    if (now < next_question || !is_awaited_) continue;
    next_question = now + pause_after(now - start);
    wait.seconds = std::chrono::duration<double>(now - start).count();
    const std::string deadlock = failures_->find_deadlock(wait);
    if (!deadlock.empty()) throw CallMismatch(deadlock);
  }
}

Wait Patience::enter(const Where& where, const std::string& activity) {
  return {failures_->group(), channel_->name(), channel_->enter(where), where, activity};
}

void Patience::wait_on_host(const Works& works, const Wait& wait) {
  std::lock_guard<std::mutex> lock(mutex_);
  try {
    guard(wait.where, [&] {
      for (const auto& work : works) wait_in_slices(*work, wait);
    });
  } catch (...) {
    failures_->abandon();
    throw;
  }
  channel_->complete();
}

void Patience::wait_on_stream(const Works& works, const Where& where) {
  std::lock_guard<std::mutex> lock(mutex_);
  guard(where, [&] {
    for (const auto& work : works) work->wait();
  });
  channel_->complete();
}

}  // namespace distca::transport
