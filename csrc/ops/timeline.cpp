#include "timeline.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <string_view>

namespace distca::ops {
namespace {

template <typename Clock>
int64_t nanoseconds() {
  using std::chrono::nanoseconds;
  return std::chrono::duration_cast<nanoseconds>(Clock::now().time_since_epoch()).count();
}

int64_t host_now() {
  return nanoseconds<std::chrono::steady_clock>();
}

std::string text_of(const transport::Where& where) {
  return std::string(where.pass) + (*where.pass ? " " : "") + where.phase;
}

std::string range_name(const transport::Where& where) {
  std::string name = "distca ";
  if (*where.pass) name += std::string(where.pass) + " ";
  if (where.layer >= 0) name += "layer " + std::to_string(where.layer) + " ";
  return name + where.phase;
}

}  // namespace

Moment::Moment(c10::Device device) : device_(device), host_ns_(host_now()) {
  if (device.is_cpu()) return;
  event_.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  event_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

bool Moment::has_come() const {
  return !event_ || event_->query();
}

int64_t Moment::until(const Moment& later) const {
  if (!event_) return later.host_ns_ - host_ns_;
  return static_cast<int64_t>(1e6 * event_->elapsedTime(*later.event_));
}

int64_t Moment::age() const {
  if (!event_) return host_now() - host_ns_;
  // An event of a stream without work comes at once.
  c10::Event now(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
  now.record(c10::impl::VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_));
  now.synchronize();
  return static_cast<int64_t>(1e6 * event_->elapsedTime(now));
}

void Timeline::watch(int64_t step) {
  std::lock_guard<std::mutex> lock(mutex_);
  spans_.clear();
  is_over_ = is_full_ = false;
  step_ = step;
}

bool Timeline::notes(const transport::Where& where) {
  const int64_t step = step_;
  if (step < 0) return false;
  if (where.step > step && where.is_backward()) is_over_ = true;
  return where.step == step && !is_full_;
}

void Timeline::add(Span span) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (span.where.step != step_) return;
  spans_.push_back(std::move(span));
  is_full_ = spans_.size() >= kMaxSpans;
}

std::optional<Timeline::Totals> Timeline::finish() {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto has_come = [](const Span& span) { return span.end.has_come(); };
  if (step_ < 0 || !is_over_ || !std::all_of(spans_.begin(), spans_.end(), has_come))
    return std::nullopt;
  step_ = -1;
  if (is_full_) return Totals{kNotTimed, kNotTimed};
  finished_ = std::move(spans_);
  spans_.clear();
  int64_t attention = 0, waiting = 0;
  for (const Span& span : finished_) {
    const std::string_view phase = span.where.phase;
    if (phase == kAttention) attention += span.begin.until(span.end);
    if (phase.starts_with("wait")) waiting += span.begin.until(span.end);
  }
  constexpr int64_t kNanosecondsPerMicrosecond = 1000;
  return Totals{attention / kNanosecondsPerMicrosecond, waiting / kNanosecondsPerMicrosecond};
}

std::tuple<std::vector<std::string>, at::Tensor> Timeline::finished() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> phases;
  at::Tensor times = at::empty({static_cast<int64_t>(finished_.size()), 3}, at::kLong);
  if (finished_.empty()) return {phases, times};
  const auto earlier = [](const Span& a, const Span& b) { return a.begin < b.begin; };
  const Moment& first = std::min_element(finished_.begin(), finished_.end(), earlier)->begin;
  const int64_t origin = nanoseconds<std::chrono::system_clock>() - first.age();
  int64_t* row = times.mutable_data_ptr<int64_t>();
  for (const Span& span : finished_) {
    phases.push_back(text_of(span.where));
    *row++ = span.where.layer;
    *row++ = origin + first.until(span.begin);
    *row++ = origin + first.until(span.end);
  }
  return {phases, times};
}

Range::Range(Timeline& timeline, const transport::Where& where, c10::Device device)
    : record_(at::RecordScope::USER_SCOPE), span_(timeline, where, device) {
  if (record_.isActive()) record_.before(range_name(where));
}

}  // namespace distca::ops
