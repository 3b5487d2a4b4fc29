#include "patience.h"

#include <c10/util/Exception.h>

#include <chrono>

namespace distca::transport {
namespace {

constexpr std::chrono::milliseconds kSlice{500};

}  // namespace

void Patience::fail(const Where& where, const std::string& error) {
  const std::string cause = failures_->diagnose(error);
  TORCH_CHECK_WITH(DistBackendError, false, "distca: ", describe(where), ": ", cause);
}

void Patience::wait_in_slices(c10d::Work& work, const std::string& activity) {
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
    const std::string deadlock = failures_->find_deadlock({channel_, num_completed_, activity});
    if (deadlock.empty()) continue;
    failures_->announce(deadlock);
    TORCH_CHECK(false, deadlock);
  }
}

void Patience::wait_on_host(const Works& works, const Where& where, const std::string& activity) {
  std::lock_guard<std::mutex> lock(mutex_);
  guard(where, [&] {
    for (const auto& work : works) wait_in_slices(*work, activity);
  });
  ++num_completed_;
}

void Patience::wait_on_stream(const Works& works, const Where& where) {
  std::lock_guard<std::mutex> lock(mutex_);
  guard(where, [&] {
    for (const auto& work : works) work->wait();
  });
  ++num_completed_;
}

}  // namespace distca::transport
