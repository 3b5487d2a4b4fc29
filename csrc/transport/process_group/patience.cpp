#include "patience.h"

#include <c10/util/Exception.h>

#include <chrono>

namespace distca::transport {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kSlice{250};
constexpr std::chrono::milliseconds kFirstLook{1000};  // at what the others wait in
constexpr std::chrono::milliseconds kLastPause{4000};  // between two looks, which take turns

}  // namespace

void Patience::fail(const Where& where, const std::string& error) {
  const std::string cause = failures_->diagnose(error, describe(where));
  TORCH_CHECK_WITH(DistBackendError, false, "distca: ", describe(where), ": ", cause);
}

void Patience::fail_together(const Where& where, const CallMismatch& mismatch) {
  failures_->announce_mismatch(mismatch.what());
  fail(where, mismatch.what());
}

void Patience::wait_in_slices(c10d::Work& work, Wait wait) {
  const Clock::time_point start = Clock::now();
  auto next_look = kFirstLook;
  while (true) {
    try {
      work.wait(kSlice);
      return;
    } catch (const std::exception&) {
      // The slice is over, or the operation has failed; or it ended just now.
    }
    if (work.isCompleted()) {
      work.wait();
      return;
    }
    TORCH_CHECK(!failures_->alarmed(), "given up, because a rank of the group has failed");
    const auto waited = Clock::now() - start;
    if (waited < next_look || !is_awaited_) continue;
    next_look += std::min(next_look, kLastPause);
    wait.seconds = std::chrono::duration<double>(waited).count();
    const std::string deadlock = failures_->find_deadlock(wait);
    if (!deadlock.empty()) throw CallMismatch(deadlock);
  }
}

Wait Patience::enter(const Where& where, const std::string& activity) {
  return {failures_->group(), channel_->name(), channel_->enter(where), where, activity};
}

void Patience::wait_on_host(const Works& works, const Wait& wait) {
  std::lock_guard<std::mutex> lock(mutex_);
  guard(wait.where, [&] {
    for (const auto& work : works) wait_in_slices(*work, wait);
  });
}

void Patience::wait_on_stream(const Works& works, const Where& where) {
  std::lock_guard<std::mutex> lock(mutex_);
  guard(where, [&] {
    for (const auto& work : works) work->wait();
  });
}

}  // namespace distca::transport
