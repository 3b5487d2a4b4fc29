#include "works_watch.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace distca::transport {

void WorksWatch::add(const Where& where) {
  c10::Event end(device_.type());
  end.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  std::lock_guard lock(mutex_);
  waits_.push_back({std::move(end), where});
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

Where WorksWatch::place() {
  std::lock_guard lock(mutex_);
  return waits_.front().where;
}

void WorksWatch::release() {
  group_->getBackend(device_.type())->abort();
}

}  // namespace distca::transport
