#include "hybrid.h"

#include <ATen/ops/empty.h>

#include <numeric>
#include <utility>
#include <vector>

#include "transport/head_part.h"

namespace distca::transport {
namespace {

// Every rank takes the same steps of both trips in the same order, so waits form no cycle; see
// docs/hybrid.md. Rows between nodes start first, because their links are slower.
class HybridTrip : public RoundTrip {
 public:
  HybridTrip(Transport& inside, Transport& between, const Routes& routes, Cargo cargo,
             const HeadParts& parts, const Where& where)
      : routes_(routes), cargo_(std::move(cargo)), parts_(in_order(parts)) {
    TORCH_INTERNAL_ASSERT(routes.by_node, "routes are not split by node");
    const auto& [routes_inside, routes_between] = *routes.by_node;
    Cargo sent_by_both = cargo_;
    const std::vector<int64_t>& sent = routes.keys.counts.send;
    const int64_t num_sent = std::accumulate(sent.begin(), sent.end(), int64_t{0});
    for (at::Tensor& rows : sent_by_both.key_results) {
      rows = at::empty(sizes_with(rows, num_sent), rows.options());
    }
    key_results_ = sent_by_both.key_results;
    between_ = between.begin(routes_between, sent_by_both, parts, where);
    inside_ = inside.begin(routes_inside, std::move(sent_by_both), parts, where);
  }

  void dispatch() override {
    between_->dispatch();
    inside_->dispatch();
  }

  Visiting arrive() override {
    const Visiting visiting = inside_->arrive();
    between_->arrive_in(visiting);
    const HeadPart& part = parts_[num_arrived_++];
    if (cargo_.kept != nullptr) restore(routes_, part.of(*cargo_.kept), visiting.inputs);
    return visiting;
  }

  void combine() override {
    between_->combine();
    inside_->combine();
  }

  // Sums gradients of a key in the order of all its servers, as one transport alone would.
  void collect() override {
    between_->collect();
    inside_->collect();
    for (size_t i = 0; i < key_results_.size(); ++i) {
      reduce_rows(key_results_[i], routes_.key_sums, cargo_.key_results[i]);
    }
  }

  void deliver() override {
    between_->dispatch();
    inside_->deliver();
    between_->arrive();
  }

 private:
  const Routes& routes_;
  Cargo cargo_;
  std::vector<HeadPart> parts_;
  size_t num_arrived_ = 0;
  std::vector<at::Tensor> key_results_;  // [keys sent, ...], of both transports
  std::unique_ptr<RoundTrip> inside_, between_;
};

}  // namespace

std::unique_ptr<RoundTrip> HybridTransport::begin(const Routes& routes, Cargo cargo,
                                                  const HeadParts& parts, const Where& where) {
  return std::make_unique<HybridTrip>(*inside_, *between_, routes, std::move(cargo), parts, where);
}

}  // namespace distca::transport
