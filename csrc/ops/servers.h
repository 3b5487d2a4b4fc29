#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <type_traits>
#include <vector>

#include "transport/failures.h"
#include "transport/process_group/control.h"

namespace distca::ops {

// What rank 0 is about to do with the other ranks. Servers, which run no model, do their part when
// they get the notice. Ranks that train know it from their program.
struct Notice {
  enum Kind : int64_t { kEnd, kPlan, kJoin, kRefused, kForward, kRecomputed, kBackward };
  static constexpr size_t kNumDetails = 10, kNumReleased = 8;
  // Details of a call of attention. Those of a plan are in distca/planning/serving.py.
  enum Detail { kHeadsQ, kHeadsKv, kHeadDim, kHeadDimV, kDtype, kSoftmaxScale, kSoftcap };

  int64_t kind = kEnd;
  int64_t step = -1;
  int64_t caller = -1;
  int64_t kept = 0;  // number of the forward call that keeps inputs, or kept them; 0: none
  std::array<int64_t, kNumDetails> details{};
  std::array<int64_t, kNumReleased> released{};  // forward calls without a backward pass to come

  static Notice of(const std::vector<int64_t>& words);
  std::vector<int64_t> words() const;
};
constexpr size_t kNoticeWords = sizeof(Notice) / sizeof(int64_t);
static_assert(std::is_trivially_copyable_v<Notice>);

// Carries notices from rank 0 to the servers of a group. All other ranks count them, so that
// servers notice a rank that leaves early.
class Servers {
 public:
  // `group` consists of rank 0 and the servers; null on all other ranks. It has no timeout, because
  // servers wait for as long as no rank needs them.
  Servers(c10::intrusive_ptr<c10d::ProcessGroup> group,
          std::shared_ptr<transport::FailureBoard> failures, double timeout_s);

  // Does not wait for the servers. Does nothing on a server.
  void tell(Notice notice);
  // Waits for the next notice, on a server. Throws DistBackendError if a rank fails meanwhile.
  Notice next();
  // Sends the last notice, and waits until servers have all of them. Does nothing after a failure.
  void end();

  // Returns the number for a forward call that keeps inputs. `watch` says which tensor autograd
  // holds for its backward pass; `number_of` finds the call by that tensor.
  int64_t new_number();
  void watch(const at::Tensor& kept, int64_t number);
  int64_t number_of(const at::Tensor& kept);

 private:
  struct Coming {
    at::Tensor words;
    transport::Pending pending;
  };
  struct Watched {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int64_t number;
  };
  bool tells() const { return group_ && group_->getRank() == 0; }
  bool is_server() const { return group_ && group_->getRank() > 0; }
  Coming broadcast(const Notice& notice);
  void release(Notice& notice);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<transport::FailureBoard> failures_;
  transport::Patience patience_;
  double timeout_s_;
  std::mutex mutex_;  // training and backward passes tell on different threads
  bool has_ended_ = false;
  std::optional<Coming> coming_;
  std::deque<Coming> sent_;
  std::vector<Watched> watched_;
  int64_t last_number_ = 0;
};

}  // namespace distca::ops
