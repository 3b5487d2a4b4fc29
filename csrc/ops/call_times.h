#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>

#include "timeline.h"

namespace distca::ops {

// Times on this rank that plans depend on. No times are noted before the first take(). Thread-safe.
class Times {
 public:
  void add(Span span);
  // Returns the times of spans that have ended on the device since the last call: int64
  // [num_spans, 4] of (step, layer, whether in the backward pass, nanoseconds).
  at::Tensor take();

 protected:
  bool are_taken() const { return are_taken_; }

 private:
  static constexpr size_t kMaxSpans = 4096;  // that are kept until take()

  std::atomic<bool> are_taken_ = false;
  std::mutex mutex_;
  std::deque<Span> spans_;
};

// How long the tasks of some calls take, without waits for rows.
class TaskTimes : public Times {
 public:
  // Returns whether to time a call's tasks: those of sampled calls, but not of recomputed ones.
  bool notes(const transport::Where& where) const;
};

// How long the work between two consecutive calls of attention takes, if both are for the same
// documents. It consists of linear layers and of waits for the collectives that these need.
// Recomputed calls count as calls of the backward pass. The work between the two passes is left
// out.
class GapTimes : public Times {
 public:
  // Notes that a call begins, or that it has ended, under a plan for the documents of `batch`.
  void begin(const transport::Where& where, int64_t batch, c10::Device device);
  void end(const transport::Where& where, int64_t batch, c10::Device device);

 private:
  struct End {
    int64_t batch;
    bool is_backward;
    Moment moment;
  };
  bool notes(int64_t batch) const;

  std::mutex last_mutex_;
  std::optional<End> last_;
};

struct CallTimes {
  TaskTimes tasks;
  GapTimes gaps;
};

}  // namespace distca::ops
