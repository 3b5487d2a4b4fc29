#include "keeping.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

namespace distca::ops {
namespace {

int64_t num_rows(const Round& round, at::Tensor transport::Keeping::*rows) {
  const auto& keeping = round.routes.keeping;
  return keeping ? ((*keeping).*rows).size(0) : 0;
}

// Of q of so many rows, and of k and v.
int64_t num_elements(const transport::Inputs& inputs, int64_t num_queries, int64_t num_keys) {
  const auto& [q, k, v] = inputs;
  return num_queries * q.size(1) * q.size(2) + num_keys * k.size(1) * (k.size(2) + v.size(2));
}

int64_t num_kept_elements(const Call& call) {
  int64_t num = 0;
  for (const Round& round : call.layout->rounds) {
    num += num_elements(call.inputs, num_rows(round, &transport::Keeping::kept_q),
                        num_rows(round, &transport::Keeping::kept_k));
  }
  return num;
}

// Tracks kept inputs while autograd holds them. Calls that keep nothing count as calls, too.
class LiveKept {
 public:
  void add(const at::Tensor& elements) {
    const std::lock_guard lock(mutex_);
    live_.push_back({elements.storage().getWeakStorageImpl(), elements.nbytes()});
    update_peak();
  }
  KeptPeak take_peak() {
    const std::lock_guard lock(mutex_);
    const KeptPeak taken = std::exchange(peak_, {});
    update_peak();
    return taken;
  }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    size_t num_bytes;
  };
  void update_peak() {
    std::erase_if(live_, [](const Entry& entry) { return entry.storage.expired(); });
    int64_t num_bytes = 0;
    for (const Entry& entry : live_) num_bytes += static_cast<int64_t>(entry.num_bytes);
    peak_.num_bytes = std::max(peak_.num_bytes, num_bytes);
    peak_.num_calls = std::max(peak_.num_calls, static_cast<int64_t>(live_.size()));
  }
  std::mutex mutex_;
  std::vector<Entry> live_;
  KeptPeak peak_;
};

LiveKept& live_kept() {
  static auto* live = new LiveKept;  // storages may outlive static objects
  return *live;
}

Kept in_parts(const Call& call, const at::Tensor& elements) {
  const auto& [q, k, v] = call.inputs;
  Kept kept{elements, {}};
  int64_t next = 0;
  const auto part = [&](int64_t num_rows, const at::Tensor& like) {
    const int64_t num = num_rows * like.size(1) * like.size(2);
    const at::Tensor rows =
        elements.narrow(0, next, num).view({num_rows, like.size(1), like.size(2)});
    next += num;
    return rows;
  };
  for (const Round& round : call.layout->rounds) {
    const int64_t num_q = num_rows(round, &transport::Keeping::kept_q);
    const int64_t num_k = num_rows(round, &transport::Keeping::kept_k);
    kept.rounds.push_back({part(num_q, q), part(num_k, k), part(num_k, v)});
  }
  return kept;
}

}  // namespace

Kept new_kept(const Call& call, int64_t num_queries, int64_t num_keys) {
  const at::Tensor& q = call.inputs.q;
  if (num_queries == 0 && num_keys == 0) {
    const at::Tensor nothing = at::empty({0}, q.options());
    live_kept().add(nothing);
    return {nothing, std::vector<transport::Inputs>(call.layout->rounds.size())};
  }
  const int64_t room = num_elements(call.inputs, num_queries, num_keys);
  const int64_t expected = num_kept_elements(call);
  TORCH_CHECK_VALUE(num_queries >= 0 && num_keys >= 0 && room >= expected, "num_kept_queries is ",
                    num_queries, " and num_kept_keys ", num_keys, ", which is room for ", room,
                    " elements; expected ", expected,
                    ", for which torch.ops.distca.kept_rows(layout) makes room, or zeros");
  const at::Tensor elements = at::empty({room}, q.options());
  elements.narrow(0, expected, room - expected).zero_();  // equal inputs give equal outputs
  live_kept().add(elements);
  return in_parts(call, elements);
}

KeptPeak take_kept_peak() {
  return live_kept().take_peak();
}

Kept kept_of(const Call& call, const at::Tensor& elements) {
  const int64_t expected = num_kept_elements(call);
  const at::Tensor& q = call.inputs.q;
  TORCH_CHECK_VALUE(elements.dim() == 1 && elements.size(0) >= expected &&
                        elements.is_contiguous() && elements.scalar_type() == q.scalar_type() &&
                        elements.device() == q.device(),
                    "kept is ", elements.toString(), " of ", elements.sizes(),
                    " elements; expected the ", expected, " of ", q.toString(),
                    " that the forward pass of this plan returns while gradients are enabled");
  return in_parts(call, elements);
}

}  // namespace distca::ops
