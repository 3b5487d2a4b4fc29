#include "rendezvous.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <utility>

namespace distca::transport::peer {
namespace {

using c10::intrusive_ptr;
using std::chrono::milliseconds;

// Numbers the exchanges of one rendezvous of symmetric memory from 1 in the keys of a store.
//
// PyTorch's keys are <kind>/<number of the exchange in this process>/<rank>. Ranks that have taken
// part in different numbers of exchanges, for example in other groups, would wait for each other
// under different keys. Consecutive keys with the same prefix belong to one exchange. All ranks of
// a rendezvous make the same exchanges in the same order, so their numbers agree.
class NumberedStore : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;

  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    PrefixStore::set(numbered(key), value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    return PrefixStore::get(numbered(key));
  }
  void wait(const std::vector<std::string>& keys) override {
    PrefixStore::wait(all_numbered(keys));
  }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    PrefixStore::wait(all_numbered(keys), timeout);
  }

 private:
  std::string numbered(const std::string& key) {
    const size_t rank = key.rfind('/');
    TORCH_INTERNAL_ASSERT(rank != std::string::npos, "unexpected key of a rendezvous: ", key);
    if (key.compare(0, rank, exchange_) != 0) {
      exchange_ = key.substr(0, rank);
      ++num_exchanges_;
    }
    return std::to_string(num_exchanges_) + key.substr(rank);
  }

  std::vector<std::string> all_numbered(std::vector<std::string> keys) {
    std::ranges::transform(keys, keys.begin(), [this](const auto& key) { return numbered(key); });
    return keys;
  }

  std::string exchange_;  // the latest: <kind>/<number in this process>
  int64_t num_exchanges_ = 0;
};

// Registers the ranks of a group under a new name, for one rendezvous. The new group uses the store
// of the original group and has no backend.
class NamedRanks {
 public:
  NamedRanks(const c10d::ProcessGroup& group, const std::string& group_name) {
    const int rank = group.getRank();
    // Each rank counts its own rendezvous. They are collective, so all get the same number.
    const int64_t number = group.getStore()->add(c10::str("distca/num_meetings/", rank), 1);
    name_ = c10::str(group_name, "/meeting/", number);
    ranks_ = c10::make_intrusive<c10d::ProcessGroup>(
        c10::make_intrusive<NumberedStore>(c10::str("distca/meeting/", number), group.getStore()),
        rank, group.getSize());
    c10d::register_process_group(name_, ranks_);
  }
  NamedRanks(const NamedRanks&) = delete;
  ~NamedRanks() { c10d::unregister_process_group(name_); }

  const std::string& name() const { return name_; }

 private:
  std::string name_;
  intrusive_ptr<c10d::ProcessGroup> ranks_;
};

}  // namespace

std::vector<char*> rendezvous(const at::Tensor& tensor, const std::string& group_name) {
  const NamedRanks ranks(*c10d::resolve_process_group(group_name), group_name);
  const auto shared = c10d::symmetric_memory::rendezvous(tensor, ranks.name());
  std::vector<char*> addresses;
  for (void* address : shared->get_buffer_ptrs()) addresses.push_back(static_cast<char*>(address));
  return addresses;
}

}  // namespace distca::transport::peer
