#include "board_watch.h"

#include <algorithm>
#include <utility>

namespace distca::transport::peer {
namespace {

constexpr size_t kMaxCalls = 64;  // remembered, to say where a rank is

}  // namespace

void BoardWatch::begin(uint32_t epoch, const Wait& wait) {
  std::lock_guard lock(mutex_);
  if (calls_.size() == kMaxCalls) calls_.pop_front();
  calls_.push_back({epoch, wait});
}

BoardWatch::Seen BoardWatch::read() const {
  return {read(HostWord::kStarted), read(HostWord::kResults), read(HostWord::kFinished)};
}

Watched::State BoardWatch::look() {
  const Seen before = std::exchange(last_, read());
  if (last_.started == last_.finished) return State::kIdle;
  return last_ == before ? State::kStill : State::kMoving;
}

Wait BoardWatch::place() {
  const bool has_results = last_.results == last_.started;
  std::lock_guard lock(mutex_);
  const auto call = std::find_if(calls_.begin(), calls_.end(),
                                 [this](const Call& call) { return call.epoch == last_.started; });
  if (call == calls_.end()) return {};
  Wait wait = call->wait;
  wait.activity = describe(wait.where.in(has_results ? kCombine : kDispatch));
  return wait;
}

std::string BoardWatch::complaint() {
  if (read(HostWord::kMismatch) == 0) return "";
  const Where near = place().where.in(kCombine);
  return describe_mismatch(read(HostWord::kTheirRank), where_of(read(HostWord::kTheirTag), near),
                           rank_, where_of(read(HostWord::kOwnTag), near));
}

void BoardWatch::release() {
  words_.write(static_cast<int>(HostWord::kReleased), 1);  // for later kernels, too
}

}  // namespace distca::transport::peer
