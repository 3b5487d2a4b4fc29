#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>

#include "timeline.h"

namespace distca::ops {

// Times that plans are made with. None are noted before the first take(). For any thread.
class Times {
 public:
  void add(Span span);
  // Returns the times of spans that the device has come to the end of since the last call: int64
  // [num_spans, 4] of (step, layer, whether in the backward pass, nanoseconds).
  at::Tensor take();

 protected:
  bool are_taken() const { return are_taken_; }

 private:
  static constexpr size_t kMaxSpans = 4096;  // of calls whose times nobody takes any more

  std::atomic<bool> are_taken_ = false;
  std::mutex mutex_;
  std::deque<Span> spans_;
};

// How long tasks of some calls take on this rank, waits for rows left out.
class TaskTimes : public Times {
 public:
  // Whether tasks are to be noted: those of sampled calls, but not recomputed ones.
  bool notes(const transport::Where& where) const;
};

// How long the work between one call of attention and the next takes, for calls of the same
// documents: linear layers, and waits for collectives that they need. Recomputed calls belong to
// the backward pass. The work between the two passes is left out.
class GapTimes : public Times {
 public:
  // A call begins, or has ended, under a plan for the documents of `batch`.
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
