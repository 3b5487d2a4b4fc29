#ifdef DISTCA_WITH_CUDA
#include "watchdog.h"

#include <c10/util/Exception.h>

#include <utility>

namespace distca::transport {
namespace {

constexpr std::chrono::milliseconds kPeriod{250};
constexpr int kLooksOfAlarm = 8;          // looks from one check for alarms to the next
constexpr std::chrono::seconds kCalm{1};  // wait before the first look at other ranks

}  // namespace

Watchdog::Watchdog(HostWords& words, std::function<void()> release,
                   std::shared_ptr<FailureBoard> failures, double timeout_s)
    : words_(words),
      release_(std::move(release)),
      failures_(std::move(failures)),
      timeout_(timeout_s),
      next_look_(kCalm),
      thread_([this](const std::stop_token& stop) { watch(stop); }) {}

void Watchdog::check() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !has_given_up_ || !failure_.empty(); });
  TORCH_CHECK_WITH(DistBackendError, failure_.empty(), failure_);
}

void Watchdog::note(uint32_t number, const Wait& wait, const char* last_phase) {
  std::lock_guard lock(mutex_);
  waits_.push_back({number, wait, last_phase});
}

void Watchdog::watch(const std::stop_token& stop) {
  // CUDA calls of this thread must not disturb a graph that another thread captures.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  Clock::time_point since = Clock::now();
  for (int look = 1;; ++look) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, stop, kPeriod, [] { return false; });
    }
    if (stop.stop_requested()) return;
    if (!is_still()) {
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

// Returns whether a stream waits, and nothing has moved since the last look.
bool Watchdog::is_still() {
  const uint32_t finished = words_.read(HostWord::kFinished);
  const auto before = std::exchange(last_, {finished, words_.read(HostWord::kResults)});
  std::lock_guard lock(mutex_);
  while (!waits_.empty() && static_cast<int32_t>(finished - waits_.front().number) >= 0) {
    latest_ = std::move(waits_.front());
    waits_.pop_front();
  }
  return words_.read(HostWord::kStarted) != finished && last_ == before;
}

// Returns the wait that streams are in.
Watchdog::Noted Watchdog::place() {
  std::lock_guard lock(mutex_);
  return waits_.empty() ? latest_ : waits_.front();
}

std::string Watchdog::reason_to_give_up(Clock::duration still, bool asks) {
  const auto announced = [this](const std::string& sentence) {
    if (!sentence.empty()) failures_->announce_mismatch(sentence);
    return sentence;
  };
  const std::string mismatch = announced(find_mismatch());
  if (!mismatch.empty()) return mismatch;
  if ((asks || still >= kCalm) && failures_->alarmed()) return "a rank of the group has failed";
  if (still < kCalm) return "";
  if (failures_->has_dead_peer()) return "a rank of the group is gone";
  auto [number, wait, last_phase] = place();
  const std::string departed = failures_->find_departed(wait.channel, wait.position);
  if (!departed.empty()) return departed;
  if (still >= next_look_) {
    next_look_ = still + pause_after(still);
    wait.activity = describe(last_.second == number ? wait.where.in(last_phase) : wait.where);
    wait.is_stream = true;
    wait.seconds = std::chrono::duration<double>(still).count();
    const std::string deadlock = announced(failures_->find_deadlock(wait));
    if (!deadlock.empty()) return deadlock;
  }
  if (still < timeout_) return "";
  return "nothing has come for " + std::to_string(static_cast<int64_t>(timeout_.count())) + " s";
}

std::string Watchdog::find_mismatch() {
  if (words_.read(HostWord::kMismatch) == 0) return "";
  const Noted noted = place();
  const auto call = [&](HostWord tag) {
    return describe(where_of(words_.read(tag), noted.wait.where.in(noted.last_phase)));
  };
  return "rank " + std::to_string(words_.read(HostWord::kTheirRank)) + " was in " +
         call(HostWord::kTheirTag) + ", while rank " + std::to_string(failures_->rank()) +
         " was in " + call(HostWord::kOwnTag) + ", and got its results" + kSameCalls;
}

// Streams drain first, because asking other ranks may take long.
void Watchdog::give_up(const std::string& reason) {
  const std::string place = describe(this->place().wait.where);
  {
    std::lock_guard lock(mutex_);
    has_given_up_ = true;  // so that no further call begins meanwhile
  }
  std::string problem;
  try {
    release_();
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
#endif
