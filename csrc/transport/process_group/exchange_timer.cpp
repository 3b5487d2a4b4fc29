#ifdef DISTCA_WITH_CUDA
#include "exchange_timer.h"

#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <string_view>

namespace distca::transport {
namespace {

constexpr size_t kMaxSpans = 4096;  // of calls whose times nobody takes

int64_t nanoseconds(cudaEvent_t begin, cudaEvent_t end) {
  float ms = 0;
  C10_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
  return static_cast<int64_t>(1e6 * ms);
}

bool has_come(cudaEvent_t event) {
  const cudaError_t status = cudaEventQuery(event);
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  C10_CUDA_CHECK(status);
  return true;
}

}  // namespace

ExchangeTimer::~ExchangeTimer() {
  for (const auto& [_, begin, end] : spans_) unused_.insert(unused_.end(), {begin, end});
  unused_.insert(unused_.end(), begun_.begin(), begun_.end());
  if (last_end_ != nullptr) unused_.push_back(last_end_);
  for (const cudaEvent_t event : unused_) C10_CUDA_CHECK_WARN(cudaEventDestroy(event));
}

cudaEvent_t ExchangeTimer::record(cudaStream_t stream) {
  cudaEvent_t event = nullptr;
  if (unused_.empty()) {
    C10_CUDA_CHECK(cudaEventCreate(&event));
  } else {
    event = unused_.back();
    unused_.pop_back();
  }
  C10_CUDA_CHECK(cudaEventRecord(event, stream));
  return event;
}

void ExchangeTimer::begin(cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  begun_.push_back(record(stream));
}

void ExchangeTimer::end(const Where& where, int64_t num_bytes, cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  const cudaEvent_t begin = begun_.front();
  begun_.pop_front();
  const bool is_backward = std::string_view(where.pass) == "backward";
  const bool is_combine = std::string_view(where.phase) == kCombine;
  spans_.push_back({{is_backward, is_combine, num_bytes, 0}, begin, record(stream)});
  if (spans_.size() <= kMaxSpans) return;
  unused_.insert(unused_.end(), {spans_.front().begin, spans_.front().end});
  spans_.pop_front();
}

std::vector<ExchangeTime> ExchangeTimer::take() {
  const std::lock_guard lock(mutex_);
  std::vector<ExchangeTime> times;
  while (!spans_.empty() && has_come(spans_.front().end)) {
    auto [time, begin, end] = spans_.front();
    spans_.pop_front();
    time.nanoseconds = nanoseconds(begin, end);
    if (last_end_ != nullptr) {
      time.nanoseconds = std::min(time.nanoseconds, nanoseconds(last_end_, end));
      unused_.push_back(last_end_);
    }
    times.push_back(time);
    unused_.push_back(begin);
    last_end_ = end;
  }
  return times;
}

}  // namespace distca::transport
#endif
