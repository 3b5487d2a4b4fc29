#include "task_times.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <exception>
#include <string_view>
#include <utility>
#include <vector>

namespace distca::ops {
namespace {

bool is_backward(const transport::Where& where) {
  return std::string_view(where.pass) == "backward";
}

bool is_timed(const transport::Where& where) {
  return where.is_sampled() && (is_backward(where) || std::string_view(where.pass) == "forward");
}

}  // namespace

void TaskTimes::add(Span span) {
  const std::lock_guard lock(mutex_);
  spans_.push_back(std::move(span));
  if (spans_.size() > kMaxSpans) spans_.pop_front();
}

at::Tensor TaskTimes::take() {
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> words;
  for (; !spans_.empty() && spans_.front().end.has_come(); spans_.pop_front()) {
    const auto& [where, begin, end] = spans_.front();
    words.insert(words.end(), {where.step, where.layer, is_backward(where), begin.until(end)});
  }
  const at::Tensor times = at::empty({static_cast<int64_t>(words.size()) / 4, 4}, at::kLong);
  std::copy(words.begin(), words.end(), times.mutable_data_ptr<int64_t>());
  return times;
}

TaskTimer::TaskTimer(TaskTimes& times, const transport::Where& where, c10::Device device)
    : times_(times), where_(where), device_(device) {
  if (is_timed(where)) begin_.emplace(device);
}

TaskTimer::~TaskTimer() {
  if (!begin_) return;
  try {
    times_.add({where_, std::move(*begin_), Moment(device_)});
  } catch (const std::exception&) {
    // A device that fails says so at the next call; the time is lost.
  }
}

}  // namespace distca::ops
