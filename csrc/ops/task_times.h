#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <mutex>

#include "timeline.h"

namespace distca::ops {

// How long tasks of some calls take on this rank, waits for rows left out. For any thread.
class TaskTimes {
 public:
  void add(Span span);
  // Returns the times of tasks that the device has come to the end of since the last call: int64
  // [num_spans, 4] of (step, layer, whether in the backward pass, nanoseconds).
  at::Tensor take();

 private:
  static constexpr size_t kMaxSpans = 4096;  // of calls whose times nobody takes

  std::mutex mutex_;
  std::deque<Span> spans_;
};

// Times tasks until its scope ends, if their call is sampled. Recomputed tasks are not timed.
class TaskTimer {
 public:
  TaskTimer(TaskTimes& times, const transport::Where& where, c10::Device device);
  TaskTimer(const TaskTimer&) = delete;
  ~TaskTimer();

 private:
  TaskTimes& times_;
  transport::Where where_;
  c10::Device device_;
  std::optional<Moment> begin_;
};

}  // namespace distca::ops
