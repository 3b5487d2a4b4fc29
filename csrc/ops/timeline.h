#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/Event.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "transport/failures.h"

namespace distca::ops {

// Phases that a rank waits in begin with "wait".
inline constexpr const char* kAttention = "attention";  // a layer's pass, all of it
using transport::kCombine;
using transport::kDispatch;
inline constexpr const char* kEarlyTasks = "early home tasks";  // while rows travel
inline constexpr const char* kLateTasks = "late home tasks";    // while results travel
inline constexpr const char* kVisitingTasks = "visiting tasks";
inline constexpr const char* kWaitForRows = "wait for rows";
inline constexpr const char* kWaitForResults = "wait for results";

// A point in time: the host's, and on a device that of its current stream.
class Moment {
 public:
  explicit Moment(c10::Device device);

  bool has_come() const;
  // Whether the host was here before it was at `other`.
  bool operator<(const Moment& other) const { return host_ns_ < other.host_ns_; }
  // Nanoseconds from here to `later`, a moment of the same device.
  int64_t until(const Moment& later) const;
  // Nanoseconds from here to now. On a device it has come.
  int64_t age() const;

 private:
  c10::Device device_;
  int64_t host_ns_;
  std::optional<c10::Event> event_;
};

struct Span {
  transport::Where where;
  Moment begin;
  Moment end;
};

// When the phases of one step's attention began and ended on this rank. For any thread.
class Timeline {
 public:
  // Notes calls under the plan of `step` from now on. What was finished before stays.
  void watch(int64_t step);

  // Whether a phase is to be noted.
  bool notes(const transport::Where& where);
  void add(Span span);

  static constexpr size_t kMaxSpans = 16384;
  static constexpr int64_t kNotTimed = -1;
  struct Totals {
    int64_t attention_us = 0;
    int64_t waiting_us = 0;
  };
  // Of the watched step, once a backward pass under a later plan has begun and the device has come
  // to the last of its phases; then the step is finished. Where a plan serves without end, only
  // kMaxSpans are noted, and totals are kNotTimed.
  std::optional<Totals> finish();

  // Of the step that was finished last: "forward early home tasks" for each span, and int64
  // [num_spans, 3] of (layer, begin, end), nanoseconds since 1970.
  std::tuple<std::vector<std::string>, at::Tensor> finished() const;

 private:
  mutable std::mutex mutex_;
  std::atomic<int64_t> step_ = -1;
  std::atomic<bool> is_over_ = false;
  std::atomic<bool> is_full_ = false;
  std::vector<Span> spans_;
  std::vector<Span> finished_;
};

// Adds a span that ends with this scope to a Timeline or to TaskTimes, if they note this place.
template <typename Spans>
class ScopedSpan {
 public:
  ScopedSpan(Spans& spans, const transport::Where& where, c10::Device device)
      : spans_(spans), where_(where), device_(device) {
    if (spans.notes(where)) begin_.emplace(device);
  }
  ScopedSpan(const ScopedSpan&) = delete;
  ~ScopedSpan() {
    if (!begin_) return;
    try {
      spans_.add({where_, std::move(*begin_), Moment(device_)});
    } catch (const std::exception&) {
      // The next call reports an error of the device. Here, only the span is lost.
    }
  }

 private:
  Spans& spans_;
  transport::Where where_;
  c10::Device device_;
  std::optional<Moment> begin_;
};

// A phase that ends with its scope: a range of torch's profiler, and through it of NVTX, called
// "distca forward layer 3 dispatch"; a span of the timeline where it notes the step. Layers count
// from 0 under each plan. Costs two flags where nobody looks.
class Range {
 public:
  Range(Timeline& timeline, const transport::Where& where, c10::Device device);

 private:
  at::RecordFunction record_;
  ScopedSpan<Timeline> span_;
};

}  // namespace distca::ops
