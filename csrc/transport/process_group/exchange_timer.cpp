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
  for (const Span& span : ended_) forget(span);
  for (const std::optional<Span>& span : begun_) {
    if (span) forget(*span);
  }
  for (const cudaEvent_t event : unused_) C10_CUDA_CHECK_WARN(cudaEventDestroy(event));
}

void ExchangeTimer::forget(const Span& span) {
  for (const cudaEvent_t event : {span.begin, span.end, span.previous_end}) {
    if (event != nullptr) unused_.push_back(event);
  }
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

void ExchangeTimer::begin(const Where& where, cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  const bool is_alone = begun_.empty();
  std::optional<Span>& span = begun_.emplace_back();
  if (!where.is_sampled()) return;
  span = Span{.begin = record(stream), .previous_end = is_alone ? record(ends_) : nullptr};
}

void ExchangeTimer::end(const Where& where, int64_t num_bytes) {
  const std::lock_guard lock(mutex_);
  std::optional<Span> span = begun_.front();
  begun_.pop_front();
  if (!begun_.empty() && begun_.front()) begun_.front()->previous_end = record(ends_);
  if (!span) return;
  const bool is_combine = std::string_view(where.phase) == kCombine;
  span->time = {where.is_backward(), is_combine, num_bytes, 0};
  span->end = record(ends_);
  ended_.push_back(*span);
  if (ended_.size() <= kMaxSpans) return;
  forget(ended_.front());
  ended_.pop_front();
}

std::vector<ExchangeTime> ExchangeTimer::take() {
  const std::lock_guard lock(mutex_);
  std::vector<ExchangeTime> times;
  while (!ended_.empty() && has_come(ended_.front().end)) {
    const auto& [time, begin, end, previous_end] = ended_.front();
    times.push_back(time);
    times.back().nanoseconds = std::min(nanoseconds(begin, end), nanoseconds(previous_end, end));
    forget(ended_.front());
    ended_.pop_front();
  }
  return times;
}

}  // namespace distca::transport
#endif
