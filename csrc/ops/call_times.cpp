#include "call_times.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

namespace distca::ops {
namespace {

bool is_forward(const transport::Where& where) {
  return std::string_view(where.pass) == "forward";
}

bool is_recomputed(const transport::Where& where) {
  return !is_forward(where) && !where.is_backward();
}

}  // namespace

void Times::add(Span span) {
  const std::lock_guard lock(mutex_);
  spans_.push_back(std::move(span));
  if (spans_.size() > kMaxSpans) spans_.pop_front();
}

at::Tensor Times::take() {
  are_taken_ = true;
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> words;
  for (; !spans_.empty() && spans_.front().end.has_come(); spans_.pop_front()) {
    const auto& [where, begin, end] = spans_.front();
    words.insert(words.end(), {where.step, where.layer, !is_forward(where), begin.until(end)});
  }
  const at::Tensor times = at::empty({static_cast<int64_t>(words.size()) / 4, 4}, at::kLong);
  std::copy(words.begin(), words.end(), times.mutable_data_ptr<int64_t>());
  return times;
}

bool TaskTimes::notes(const transport::Where& where) const {
  return are_taken() && where.is_sampled() && !is_recomputed(where);
}

// Times all calls of the first batches, so that plans soon know how ranks differ. Later it times
// all calls of about every second batch, because a gap needs both of its calls. Batches are
// numbered by plans, of which a step may have several, so their parity would not do.
bool GapTimes::notes(int64_t batch) const {
  constexpr int64_t kFirstBatches = 16;
  constexpr uint64_t kGoldenRatio = 0x9E3779B97F4A7C15;  // over 1, times 2^64
  const bool is_sampled = static_cast<uint64_t>(batch) * kGoldenRatio >> 63 == 0;
  return are_taken() && batch >= 0 && (batch < kFirstBatches || is_sampled);
}

void GapTimes::begin(const transport::Where& where, int64_t batch, c10::Device device) {
  if (!notes(batch)) return;
  const std::lock_guard lock(last_mutex_);
  if (last_ && last_->batch == batch && last_->is_backward == !is_forward(where)) {
    add({where, std::move(last_->moment), Moment(device)});
  }
  last_.reset();
}

void GapTimes::end(const transport::Where& where, int64_t batch, c10::Device device) {
  if (!notes(batch)) return;
  const std::lock_guard lock(last_mutex_);
  last_.emplace(batch, !is_forward(where), Moment(device));
}

}  // namespace distca::ops
