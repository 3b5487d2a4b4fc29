#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <deque>
#include <mutex>

#include "timeline.h"

namespace distca::ops {

// How long tasks of sampled calls take on this rank, without waits for rows. For any thread.
class TaskTimes {
 public:
  // Returns whether tasks of this call are timed: the call must be sampled and not recomputed, and
  // take() must have been called before.
  bool notes(const transport::Where& where) const;
  void add(Span span);
  // Returns the times of tasks that the device has finished since the last take(): int64
  // [num_spans, 4] of (step, layer, whether in the backward pass, nanoseconds).
  at::Tensor take();

 private:
  static constexpr size_t kMaxSpans = 4096;  // kept if nobody takes times any more

  std::atomic<bool> are_taken_ = false;
  std::mutex mutex_;
  std::deque<Span> spans_;
};

}  // namespace distca::ops
