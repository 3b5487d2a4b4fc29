#include "watchdog.h"

#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAException.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace distca::transport::peer {
namespace {

constexpr std::chrono::milliseconds kPeriod{250};
constexpr std::chrono::milliseconds kPoisonPeriod{50};
constexpr std::chrono::seconds kCalm{1};  // of waiting before others are asked how they are
constexpr size_t kMaxCalls = 64;          // remembered, for the error's text

}  // namespace

Watchdog::Watchdog(const Board& board, c10::Device device, std::shared_ptr<FailureBoard> failures,
                   double timeout_s)
    : board_(board), device_(device), failures_(std::move(failures)), timeout_(timeout_s) {
  const c10::DeviceGuard guard(device_);
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  thread_ = std::thread([this] { watch(); });
}

Watchdog::~Watchdog() {
  {
    std::lock_guard lock(mutex_);
    stops_ = true;
  }
  stopped_.notify_all();
  thread_.join();
  cudaStreamDestroy(stream_);  // fails where the process is ending: then it is gone already
}

void Watchdog::begin(uint32_t epoch, const Where& where) {
  std::lock_guard lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, failure_.empty(), failure_);
  if (calls_.size() == kMaxCalls) calls_.pop_front();
  calls_.push_back({epoch, where});
}

bool Watchdog::sleep_until_stopped(std::chrono::milliseconds time) {
  std::unique_lock lock(mutex_);
  return stopped_.wait_for(lock, time, [this] { return stops_; });
}

void Watchdog::watch() {
  const c10::DeviceGuard guard(device_);
  std::vector<uint32_t> last;
  Clock::time_point since = Clock::now();
  while (!sleep_until_stopped(kPeriod)) {
    std::vector<uint32_t> words = read_words();
    if (words.empty()) return;  // the device has failed; its error reaches the host by itself
    if (words != last || !is_waiting(words)) since = Clock::now();
    last = std::move(words);
    const std::string reason = reason_to_give_up(Clock::now() - since);
    if (reason.empty()) continue;
    fail(reason, last);
    while (poison() && !sleep_until_stopped(kPoisonPeriod)) {
    }
    return;
  }
}

std::vector<uint32_t> Watchdog::read_words() {
  std::vector<uint32_t> words(kFirstFlag);
  const size_t num_bytes = words.size() * sizeof(uint32_t);
  const bool is_read = cudaMemcpyAsync(words.data(), board_.words[board_.rank], num_bytes,
                                       cudaMemcpyDeviceToHost, stream_) == cudaSuccess &&
                       cudaStreamSynchronize(stream_) == cudaSuccess;
  return is_read ? words : std::vector<uint32_t>{};
}

bool Watchdog::is_waiting(const std::vector<uint32_t>& words) const {
  return words[word_index(Word::kStarted, board_.rank)] !=
         words[word_index(Word::kFinished, board_.rank)];
}

std::string Watchdog::reason_to_give_up(Clock::duration still) const {
  if (still < kCalm) return "";
  if (failures_->has_dead_peer()) return "a rank of the group is gone";
  if (failures_->alarmed()) return "a rank of the group has failed";
  if (still < timeout_) return "";
  return "nothing has come for " + std::to_string(static_cast<int64_t>(timeout_.count())) + " s";
}

void Watchdog::fail(const std::string& reason, const std::vector<uint32_t>& words) {
  const uint32_t epoch = words[word_index(Word::kStarted, board_.rank)];
  const bool has_results = words[word_index(Word::kResults, board_.rank)] == epoch;
  Where where{"", "", -1, -1};
  {
    std::lock_guard lock(mutex_);
    const auto call = std::find_if(calls_.begin(), calls_.end(),
                                   [epoch](const Call& call) { return call.epoch == epoch; });
    if (call != calls_.end()) where = call->where;
  }
  const std::string place = describe(where.in(has_results ? "combine" : "dispatch"));
  const std::string cause = failures_->diagnose(reason);
  std::lock_guard lock(mutex_);
  failure_ = "distca: " + place + ": " + cause;
}

bool Watchdog::poison() {
  uint32_t latest = 0;
  {
    std::lock_guard lock(mutex_);
    if (!calls_.empty()) latest = calls_.back().epoch;
  }
  const std::vector<uint32_t> words(kFirstFlag + kMaxFlags, latest + kPoison);
  return cudaMemcpyAsync(board_.words[board_.rank], words.data(), words.size() * sizeof(uint32_t),
                         cudaMemcpyHostToDevice, stream_) == cudaSuccess &&
         cudaStreamSynchronize(stream_) == cudaSuccess;
}

}  // namespace distca::transport::peer
