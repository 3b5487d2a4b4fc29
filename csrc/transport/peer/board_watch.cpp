#include "board_watch.h"

#include <algorithm>
#include <utility>

namespace distca::transport::peer {
namespace {

constexpr size_t kMaxCalls = 64;  // remembered, to say where a rank is

}  // namespace

void BoardWatch::begin(uint32_t epoch, const Where& where) {
  std::lock_guard lock(mutex_);
  if (calls_.size() == kMaxCalls) calls_.pop_front();
  calls_.push_back({epoch, where});
}

BoardWatch::Seen BoardWatch::read() const {
  return {words_.read(HostWord::kStarted), words_.read(HostWord::kResults),
          words_.read(HostWord::kFinished)};
}

Watched::State BoardWatch::look() {
  const Seen before = std::exchange(last_, read());
  if (last_.started == last_.finished) return State::kIdle;
  return last_ == before ? State::kStill : State::kMoving;
}

Where BoardWatch::place() {
  const bool has_results = last_.results == last_.started;
  std::lock_guard lock(mutex_);
  const auto call = std::find_if(calls_.begin(), calls_.end(),
                                 [this](const Call& call) { return call.epoch == last_.started; });
  const Where where = call == calls_.end() ? Where{"", "", -1, -1} : call->where;
  return where.in(has_results ? "combine" : "dispatch");
}

void BoardWatch::release() {
  words_.write(HostWord::kReleased, 1);  // kernels that come later find it too
}

}  // namespace distca::transport::peer
