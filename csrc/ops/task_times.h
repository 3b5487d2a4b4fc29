#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <deque>
#include <mutex>

#include "timeline.h"

namespace distca::ops {

// How long tasks of some calls take on this rank, waits for rows left out. For any thread.
class TaskTimes {
 public:
  // Whether tasks are to be noted: those of sampled calls, but not recomputed ones, and none before
  // the first take().
  bool notes(const transport::Where& where) const;
  void add(Span span);
  // Returns the times of tasks that the device has come to the end of since the last call: int64
  // [num_spans, 4] of (step, layer, whether in the backward pass, nanoseconds).
  at::Tensor take();

 private:
  static constexpr size_t kMaxSpans = 4096;  // of calls whose times nobody takes any more

  std::atomic<bool> are_taken_ = false;
  std::mutex mutex_;
  std::deque<Span> spans_;
};

}  // namespace distca::ops
