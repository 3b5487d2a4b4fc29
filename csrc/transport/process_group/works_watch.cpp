#include "works_watch.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace distca::transport {

WorksWatch::WorksWatch(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device,
                       std::string group_name, int64_t rank)
    : group_(std::move(group)), device_(device), rank_(rank) {
  latest_.group = std::move(group_name);
}

void WorksWatch::add(const Wait& wait) {
  c10::Event end(device_.type());
  end.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  std::lock_guard lock(mutex_);
  waits_.push_back({std::move(end), wait});
  latest_ = wait;
}

Seal WorksWatch::seal([[maybe_unused]] const Where& where) {
#ifdef DISTCA_WITH_CUDA
  return {tag_of(where), static_cast<uint32_t>(rank_), broken_.on_device()};
#else
  return {};
#endif
}

Watched::State WorksWatch::look() {
  std::lock_guard lock(mutex_);
  const size_t num_before = waits_.size();
  try {
    while (!waits_.empty() && waits_.front().end.query()) waits_.pop_front();
  } catch (const std::exception&) {
    return State::kGone;
  }
  if (waits_.empty()) return State::kIdle;
  return waits_.size() < num_before ? State::kMoving : State::kStill;
}

Wait WorksWatch::place() {
  std::lock_guard lock(mutex_);
  Wait wait = waits_.empty() ? latest_ : waits_.front().wait;
  wait.activity = describe(wait.where);
  return wait;
}

std::string WorksWatch::complaint() {
#ifdef DISTCA_WITH_CUDA
  if (broken_.read(static_cast<int>(BrokenSeal::kIsFound)) == 0) return "";
  const uint32_t tag = broken_.read(static_cast<int>(BrokenSeal::kTag));
  const uint32_t rank = broken_.read(static_cast<int>(BrokenSeal::kRank));
  const uint32_t expected = broken_.read(static_cast<int>(BrokenSeal::kExpected));
  const Where near = place().where;
  return describe_mismatch(rank, where_of(tag, near), rank_, where_of(expected, near));
#else
  return "";
#endif
}

void WorksWatch::release() {
  group_->getBackend(device_.type())->abort();
}

}  // namespace distca::transport
