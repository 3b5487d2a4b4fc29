#include "task_times.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

namespace distca::ops {
namespace {

bool is_backward(const transport::Where& where) {
  return std::string_view(where.pass) == "backward";
}

}  // namespace

bool TaskTimes::notes(const transport::Where& where) const {
  return are_taken_ && where.is_sampled() &&
         (is_backward(where) || std::string_view(where.pass) == "forward");
}

void TaskTimes::add(Span span) {
  const std::lock_guard lock(mutex_);
  spans_.push_back(std::move(span));
  if (spans_.size() > kMaxSpans) spans_.pop_front();
}

at::Tensor TaskTimes::take() {
  are_taken_ = true;
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

}  // namespace distca::ops
