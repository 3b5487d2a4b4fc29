#include "servers.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <thread>
#include <utility>

namespace distca::ops {
namespace {

using transport::Where;
using Words = std::array<int64_t, kNoticeWords>;

constexpr std::chrono::milliseconds kPoll{2};
constexpr std::chrono::milliseconds kLook{500};  // from one look at failures to the next
constexpr Where kWhere{transport::kNotice, "", -1, -1};

bool is_done(const transport::Works& works) {
  return std::ranges::all_of(works, [](const auto& work) { return work->isCompleted(); });
}

}  // namespace

Notice Notice::of(const std::vector<int64_t>& words) {
  TORCH_CHECK_VALUE(words.size() == kNoticeWords, "notice has ", words.size(), " words; expected ",
                    kNoticeWords, ", as next_notice returns them");
  Words copy{};
  std::ranges::copy(words, copy.begin());
  return std::bit_cast<Notice>(copy);
}

std::vector<int64_t> Notice::words() const {
  const auto copy = std::bit_cast<Words>(*this);
  return {copy.begin(), copy.end()};
}

Servers::Servers(c10::intrusive_ptr<c10d::ProcessGroup> group,
                 std::shared_ptr<transport::FailureBoard> failures, double timeout_s)
    : group_(std::move(group)),
      failures_(std::move(failures)),
      patience_(failures_, transport::kNotices),
      timeout_s_(timeout_s) {
  patience_.set_awaited(false);  // a server that waits for notices holds up no other rank
}

Servers::Coming Servers::broadcast(const Notice& notice) {
  Coming coming{at::empty({static_cast<int64_t>(kNoticeWords)}, at::kLong), {}};
  std::ranges::copy(notice.words(), coming.words.mutable_data_ptr<int64_t>());
  coming.pending = patience_.start(kWhere, "the next call of attention", [&] {
    std::vector<at::Tensor> tensors{coming.words};
    return group_ ? transport::Works{group_->broadcast(tensors)} : transport::Works{};
  });
  return coming;
}

void Servers::tell(Notice notice) {
  if (is_server()) return;
  const std::lock_guard lock(mutex_);
  release(notice);
  Coming sent = broadcast(notice);
  failures_->complete(transport::kNotices);
  if (!tells()) return;
  while (!sent_.empty() && is_done(sent_.front().pending.works)) sent_.pop_front();
  sent_.push_back(std::move(sent));
}

Notice Servers::next() {
  TORCH_CHECK_VALUE(is_server() && !has_ended_, "distca: only a server of an open group waits for ",
                    "notices; pass its rank in `servers` to distca.init");
  Coming coming = coming_ ? *std::exchange(coming_, std::nullopt) : broadcast({});
  patience_.wait_on_host(coming.pending);
  const auto* words = coming.words.const_data_ptr<int64_t>();
  const Notice notice = Notice::of({words, words + kNoticeWords});
  has_ended_ = notice.kind == Notice::kEnd;
  if (!has_ended_) coming_ = broadcast({});  // so that the next notice arrives during this call
  return notice;
}

void Servers::end() {
  if (is_server() || has_ended_) return;
  if (failures_->alarmed()) return failures_->abandon();
  has_ended_ = true;
  tell({});
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  for (Clock::time_point look = start + kLook; !sent_.empty(); std::this_thread::sleep_for(kPoll)) {
    while (!sent_.empty() && is_done(sent_.front().pending.works)) sent_.pop_front();
    const Clock::time_point now = Clock::now();
    if (now < look) continue;
    look = now + kLook;
    const bool is_late = now - start > std::chrono::duration<double>(timeout_s_);
    if (is_late || failures_->alarmed() || failures_->has_dead_peer()) return failures_->abandon();
  }
}

int64_t Servers::new_number() {
  const std::lock_guard lock(mutex_);
  return ++last_number_;
}

void Servers::watch(const at::Tensor& kept, int64_t number) {
  if (!tells()) return;
  const std::lock_guard lock(mutex_);
  watched_.push_back({kept.storage().getWeakStorageImpl(), number});
}

int64_t Servers::number_of(const at::Tensor& kept) {
  if (!tells()) return 0;
  const std::lock_guard lock(mutex_);
  const auto* storage = kept.storage().unsafeGetStorageImpl();
  const auto found = std::ranges::find_if(watched_, [storage](const Watched& each) {
    return each.storage._unsafe_get_target() == storage && !each.storage.expired();
  });
  TORCH_CHECK_VALUE(found != watched_.end(), "kept is not the tensor that the forward pass ",
                    "returned, as if saved tensors were moved off the device; servers need that ",
                    "very tensor: set keep_inputs_gb to 0");
  return found->number;
}

// Names forward calls whose kept inputs nobody can need any more.
void Servers::release(Notice& notice) {
  auto next = notice.released.begin();
  std::erase_if(watched_, [&](const Watched& each) {
    if (next == notice.released.end() || !each.storage.expired()) return false;
    *next++ = each.number;
    return true;
  });
}

}  // namespace distca::ops
