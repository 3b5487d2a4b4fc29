#include "watchdog.h"

#include <c10/util/Exception.h>
#ifdef DISTCA_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace distca::transport {
namespace {

constexpr std::chrono::milliseconds kPeriod{250};
constexpr int kLooksOfAlarm = 8;          // looks from one check for alarms to the next
constexpr std::chrono::seconds kCalm{1};  // wait before the first look at other ranks

}  // namespace

Watchdog::Watchdog(Watched& watched, std::shared_ptr<FailureBoard> failures, double timeout_s)
    : watched_(watched), failures_(std::move(failures)), timeout_(timeout_s), next_look_(kCalm) {
  thread_ = std::thread([this] { watch(); });
}

Watchdog::~Watchdog() {
  {
    std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Watchdog::check() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !has_given_up_ || !failure_.empty(); });
  TORCH_CHECK_WITH(DistBackendError, failure_.empty(), failure_);
}

bool Watchdog::sleep_until_stopped(std::chrono::milliseconds time) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, time, [this] { return stops_; });
}

void Watchdog::watch() {
#ifdef DISTCA_WITH_CUDA
  // CUDA calls of this thread must not disturb a graph that another thread captures.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
#endif
  Clock::time_point since = Clock::now();
  for (int look = 1; !sleep_until_stopped(kPeriod); ++look) {
    const Watched::State state = watched_.look();
    if (state != Watched::State::kStill) {
      since = Clock::now();
      next_look_ = kCalm;
    }
    const bool asks = look % kLooksOfAlarm == 0;  // also while nothing waits
    const std::string reason = reason_to_give_up(Clock::now() - since, asks);
    if (reason.empty()) continue;
    give_up(reason);
    return;
  }
}

std::string Watchdog::reason_to_give_up(Clock::duration still, bool asks) {
  const std::string complaint = watched_.complaint();
  if (!complaint.empty()) {
    failures_->announce_mismatch(complaint);
    return complaint;
  }
  if ((asks || still >= kCalm) && failures_->alarmed()) return "a rank of the group has failed";
  if (still < kCalm) return "";
  if (failures_->has_dead_peer()) return "a rank of the group is gone";
  const Wait wait = watched_.place();
  const std::string departed = failures_->find_departed(wait.channel, wait.position);
  if (!departed.empty()) return departed;
  const std::string deadlock = find_deadlock(still);
  if (!deadlock.empty()) {
    failures_->announce_mismatch(deadlock);
    return deadlock;
  }
  if (still < timeout_) return "";
  return "nothing has come for " + std::to_string(static_cast<int64_t>(timeout_.count())) + " s";
}

std::string Watchdog::find_deadlock(Clock::duration still) {
  if (still < next_look_) return "";
  next_look_ = still + pause_after(still);
  Wait wait = watched_.place();
  wait.is_stream = true;
  wait.seconds = std::chrono::duration<double>(still).count();
  return failures_->find_deadlock(wait);
}

// Streams drain first, because asking other ranks may take long.
void Watchdog::give_up(const std::string& reason) {
  const std::string place = describe(watched_.place().where);
  {
    std::lock_guard lock(mutex_);
    has_given_up_ = true;  // so that no further call begins meanwhile
  }
  std::string problem;
  try {
    watched_.release();
  } catch (const std::exception& error) {
    problem = ". Streams may go on waiting: " + message_of(error);
  }
  const std::string cause = failures_->diagnose(reason, place);
  {
    std::lock_guard lock(mutex_);
    failure_ = "distca: " + place + ": " + cause + problem;
  }
  changed_.notify_all();
}

}  // namespace distca::transport
