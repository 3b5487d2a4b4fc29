#include "works_watch.h"

#include <ATen/ops/zeros.h>
#ifdef DISTCA_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#endif

namespace distca::transport {

WorksWatch::WorksWatch(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device,
                       std::string group_name, int64_t rank)
    : group_(std::move(group)),
      device_(device),
      rank_(rank)
#ifdef DISTCA_WITH_CUDA
      ,
      spoiled_(at::zeros({1}, at::TensorOptions(device).dtype(at::kInt))),
      marks_(device)
#endif
{
  latest_.group = std::move(group_name);
#ifdef DISTCA_WITH_CUDA
  c10::cuda::getCurrentCUDAStream(device_.index()).synchronize();  // other streams read it, too
#endif
}

void WorksWatch::add([[maybe_unused]] const Patience::Works& works, const Wait& wait) {
  [[maybe_unused]] const uint32_t number = [&] {
    std::lock_guard lock(mutex_);  // not while the driver is called, which may wait
    waits_.push_back({++num_waits_, wait});
    latest_ = wait;
    return num_waits_;
  }();
#ifdef DISTCA_WITH_CUDA
  const c10::cuda::CUDAStreamGuard guard(marks_.stream());
  for (const auto& work : works) work->wait();
  write_on_stream(ended_.on_device() + number % HostWords::kSize, number, marks_.stream());
#endif
}

Seal WorksWatch::seal([[maybe_unused]] const Where& where) {
#ifdef DISTCA_WITH_CUDA
  return {tag_of(where), static_cast<uint32_t>(rank_), broken_.on_device(),
          static_cast<uint32_t*>(spoiled_.data_ptr())};
#else
  return {};
#endif
}

// A later wait may have overwritten the word.
bool WorksWatch::has_ended([[maybe_unused]] const Waiting& waiting) const {
#ifdef DISTCA_WITH_CUDA
  const uint32_t ended = ended_.read(static_cast<int>(waiting.number % HostWords::kSize));
  return static_cast<int32_t>(ended - waiting.number) >= 0;
#else
  return true;
#endif
}

Watched::State WorksWatch::look() {
  std::lock_guard lock(mutex_);
  const size_t num_before = waits_.size();
  while (!waits_.empty() && has_ended(waits_.front())) waits_.pop_front();
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
