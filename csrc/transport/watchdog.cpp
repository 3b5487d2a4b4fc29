#include "watchdog.h"

#include <c10/util/Exception.h>
#ifdef DISTCA_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace distca::transport {
namespace {

constexpr std::chrono::milliseconds kPeriod{250};
constexpr std::chrono::seconds kCalm{1};  // of waiting before others are asked how they are

}  // namespace

Watchdog::Watchdog(Watched& watched, std::shared_ptr<FailureBoard> failures, double timeout_s)
    : watched_(watched), failures_(std::move(failures)), timeout_(timeout_s) {
  thread_ = std::thread([this] { watch(); });
}

Watchdog::~Watchdog() {
  {
    std::lock_guard lock(mutex_);
    stops_ = true;
  }
  stopped_.notify_all();
  thread_.join();
}

void Watchdog::check() {
  std::lock_guard lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, failure_.empty(), failure_);
}

bool Watchdog::sleep_until_stopped(std::chrono::milliseconds time) {
  std::unique_lock lock(mutex_);
  return stopped_.wait_for(lock, time, [this] { return stops_; });
}

void Watchdog::watch() {
#ifdef DISTCA_WITH_CUDA
  // A graph that another thread captures neither forbids nor notices what this one asks the device.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
#endif
  Clock::time_point since = Clock::now();
  while (!sleep_until_stopped(kPeriod)) {
    const Watched::State state = watched_.look();
    if (state == Watched::State::kGone) return;
    if (state != Watched::State::kStill) since = Clock::now();
    const std::string reason = reason_to_give_up(Clock::now() - since);
    if (reason.empty()) continue;
    fail(reason);
    watched_.release();
    return;
  }
}

std::string Watchdog::reason_to_give_up(Clock::duration still) const {
  if (still < kCalm) return "";
  if (failures_->has_dead_peer()) return "a rank of the group is gone";
  if (failures_->alarmed()) return "a rank of the group has failed";
  if (still < timeout_) return "";
  return "nothing has come for " + std::to_string(static_cast<int64_t>(timeout_.count())) + " s";
}

void Watchdog::fail(const std::string& reason) {
  const std::string place = describe(watched_.place());
  const std::string cause = failures_->diagnose(reason);
  std::lock_guard lock(mutex_);
  failure_ = "distca: " + place + ": " + cause;
}

}  // namespace distca::transport
