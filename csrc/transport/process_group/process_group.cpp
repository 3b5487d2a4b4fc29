#include "process_group.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "../record.h"
#include "exchange.h"
#include "head_start.h"

namespace distca::transport {
namespace {

// Of the streams of one device.
struct StreamWatchdog {
  WorksWatch watch;
  Watchdog watchdog;

  StreamWatchdog(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device,
                 std::shared_ptr<FailureBoard> failures, double timeout_s)
      : watch(std::move(group), device, failures->group(), failures->rank()),
        watchdog(watch, std::move(failures), timeout_s) {}
};

class ProcessGroupTransport : public Transport {
 public:
  ProcessGroupTransport(c10::intrusive_ptr<c10d::ProcessGroup> group,
                        std::shared_ptr<Patience> patience, std::shared_ptr<FailureBoard> failures,
                        double timeout_s)
      : group_(std::move(group)),
        patience_(std::move(patience)),
        failures_(std::move(failures)),
        timeout_s_(timeout_s) {}

  std::unique_ptr<RoundTrip> begin(const Routes& routes, Cargo cargo, const Where& where) override;

  std::unique_ptr<Exchange> start(const std::vector<RowBatch>& batches, const Where& where) {
    const c10::Device device = batches[0].rows.device();
    if (device.is_cpu()) return exchange_on_cpu(group_, batches, patience_, where);
    StreamWatchdog& streams = streams_of(device);
    streams.watchdog.check();
    auto exchange = exchange_on_stream(*group_, batches, patience_, streams.watch, where);
    give_head_start(device);
    return exchange;
  }

  // Returns the seal of this call's rows if a stream, not the host, waits for them (see Seal).
  Seal seal(const Where& where, const c10::Device& device) {
    if (device.is_cpu()) return {};
    return streams_of(device).watch.seal(where);
  }

 private:
  StreamWatchdog& streams_of(const c10::Device& device) {
    if (!streams_) {
      streams_ = std::make_unique<StreamWatchdog>(group_, device, failures_, timeout_s_);
    }
    return *streams_;
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<Patience> patience_;
  std::shared_ptr<FailureBoard> failures_;
  double timeout_s_;
  std::unique_ptr<StreamWatchdog> streams_;
};

// Tensors whose rows travel one route together. Each row of all of them forms one record.
struct Load {
  std::vector<at::Tensor> tensors;
  const Route& route;
};

// A load's received rows, as strided views of one buffer, and their seals.
struct Arrival {
  std::vector<at::Tensor> parts;
  SealedRows seals;
};

RowBatch pack_home(const Load& load, const Record& record, const Seal& seal) {
  const auto& [tensors, route] = load;
  const at::Tensor rows = record.allocate(route.home_row.size(0));
  for (size_t idx = 0; idx < tensors.size(); ++idx) {
    const bool is_first = idx == 0;  // one seal per record
    gather_rows(tensors[idx], route.home_row, record.part(rows, idx),
                is_first ? SealedRows{rows, seal} : SealedRows{});
  }
  return {rows, route.counts};
}

RowBatch pack_visiting(const Load& load, const Record& record, const Seal& seal) {
  const auto& [tensors, route] = load;
  const at::Tensor rows = record.allocate(route.num_visiting);
  for (size_t idx = 0; idx < tensors.size(); ++idx) {
    scatter_and_seal_rows(tensors[idx], route.slot, record.part(rows, idx), {rows, seal});
  }
  return {rows, {route.counts.recv, route.counts.send}};
}

// Loads in flight: home rows to their servers if pack_home packs them, or visiting rows to their
// homes, where they arrive in the slots that the homes sent.
class Shipment {
 public:
  using Pack = RowBatch(const Load& load, const Record& record, const Seal& seal);
  Shipment(ProcessGroupTransport& transport, const Where& where, const std::vector<Load>& loads,
           Pack& pack);

  // Returns the received rows by slot.
  std::vector<Arrival> arrive();

 private:
  std::vector<Record> records_;
  Seal seal_;
  std::unique_ptr<Exchange> exchange_;
};

Shipment::Shipment(ProcessGroupTransport& transport, const Where& where,
                   const std::vector<Load>& loads, Pack& pack)
    : seal_(transport.seal(where, loads[0].tensors[0].device())) {
  std::vector<RowBatch> batches;
  for (const Load& load : loads) {
    const Record& record = records_.emplace_back(load.tensors, seal_.broken != nullptr);
    batches.push_back(pack(load, record, seal_));
  }
  exchange_ = transport.start(batches, where);
}

std::vector<Arrival> Shipment::arrive() {
  const std::vector<at::Tensor> received = exchange_->wait();
  exchange_.reset();
  std::vector<Arrival> arrivals(records_.size());
  for (size_t i = 0; i < records_.size(); ++i) {
    for (size_t idx = 0; idx < records_[i].num_parts(); ++idx) {
      arrivals[i].parts.push_back(records_[i].part(received[i], idx));
    }
    arrivals[i].seals = {received[i], seal_};
  }
  return arrivals;
}

at::Tensor rows_like(const at::Tensor& tensor, int64_t num_rows) {
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes[0] = num_rows;
  return at::empty(sizes, tensor.options());
}

std::vector<at::Tensor> rows_like(const std::vector<at::Tensor>& tensors, int64_t num_rows) {
  std::vector<at::Tensor> rows;
  for (const at::Tensor& tensor : tensors) rows.push_back(rows_like(tensor, num_rows));
  return rows;
}

class SlotTrip : public RoundTrip {
 public:
  SlotTrip(ProcessGroupTransport& transport, const Routes& routes, Cargo cargo, const Where& where)
      : transport_(transport), routes_(routes), cargo_(std::move(cargo)), where_(where) {}

  void dispatch() override {
    const auto& [q, k, v] = cargo_.inputs;
    std::vector<Load> loads;
    if (!cargo_.with_queries.empty()) loads.push_back({cargo_.with_queries, routes_.queries});
    loads.push_back({{q}, moves_again() ? routes_.keeping->queries : routes_.queries});
    loads.push_back({{k, v}, moves_again() ? routes_.keeping->keys : routes_.keys});
    under_way_.emplace(transport_, where_.in(kDispatch), loads, pack_home);
    for (const Load& load : loads) slots_.push_back(load.route.slot);
  }

  Visiting arrive() override {
    std::vector<Arrival> arrivals = in_visiting_order();
    for (const Arrival& arrival : arrivals) check_seals(arrival.seals);
    Visiting visiting;
    if (!cargo_.with_queries.empty()) visiting.with_queries = arrivals.front().parts;
    const std::vector<at::Tensor>& keys = arrivals.back().parts;
    visiting.inputs = whole({arrivals[arrivals.size() - 2].parts[0], keys[0], keys[1]});
    query_results_ = rows_like(cargo_.query_results, routes_.queries.num_visiting);
    key_results_ = rows_like(cargo_.key_results, routes_.keys.num_visiting);
    visiting.query_results = query_results_;
    visiting.key_results = key_results_;
    return visiting;
  }

  void combine() override {
    std::vector<Load> loads;
    loads.push_back({query_results_, routes_.queries});
    if (!key_results_.empty()) loads.push_back({key_results_, routes_.keys});
    under_way_.emplace(transport_, where_.in(kCombine), loads, pack_visiting);
  }

  void collect() override {
    const std::vector<Arrival> arrivals = under_way_->arrive();
    for (size_t i = 0; i < cargo_.query_results.size(); ++i) {
      scatter_rows(arrivals[0].parts[i], routes_.queries.home_row, cargo_.query_results[i],
                   arrivals[0].seals);
    }
    for (size_t i = 0; i < cargo_.key_results.size(); ++i) {
      reduce_rows(arrivals[1].parts[i], routes_.key_sums, cargo_.key_results[i], arrivals[1].seals);
    }
  }

  void deliver() override {
    dispatch();
    in_visiting_order();
  }

 private:
  bool moves_again() const { return cargo_.kept != nullptr && routes_.keeping.has_value(); }

  // Copies only if slots are in another order.
  std::vector<Arrival> in_visiting_order() {
    std::vector<Arrival> arrivals = under_way_->arrive();
    for (size_t i = 0; i < arrivals.size(); ++i) {
      if (slots_[i].numel() == 0) continue;
      for (at::Tensor& part : arrivals[i].parts) {
        const at::Tensor ordered = at::empty(part.sizes(), part.options());
        gather_rows(part, slots_[i], ordered);
        part = ordered;
      }
    }
    return arrivals;
  }

  // Returns all visiting inputs, whether they have just arrived or were kept.
  Inputs whole(Inputs arrived) const {
    if (!moves_again() || routes_.keeping->kept_q.size(0) == 0) return arrived;
    const auto all_rows = [](const at::Tensor& rows, const at::Tensor& row, int64_t num_rows) {
      const at::Tensor all = rows_like(rows, num_rows);
      scatter_rows(rows, row, all);
      return all;
    };
    const Keeping& keeping = *routes_.keeping;
    const Inputs all{all_rows(arrived.q, keeping.moved_q, routes_.queries.num_visiting),
                     all_rows(arrived.k, keeping.moved_k, routes_.keys.num_visiting),
                     all_rows(arrived.v, keeping.moved_k, routes_.keys.num_visiting)};
    restore(routes_, *cargo_.kept, all);
    return all;
  }

  ProcessGroupTransport& transport_;
  const Routes& routes_;
  Cargo cargo_;
  Where where_;
  std::optional<Shipment> under_way_;
  std::vector<at::Tensor> slots_;  // of each load's visiting rows
  std::vector<at::Tensor> query_results_, key_results_;
};

std::unique_ptr<RoundTrip> ProcessGroupTransport::begin(const Routes& routes, Cargo cargo,
                                                        const Where& where) {
  return std::make_unique<SlotTrip>(*this, routes, std::move(cargo), where);
}

}  // namespace

std::unique_ptr<Transport> make_process_group_transport(
    c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<Patience> patience,
    std::shared_ptr<FailureBoard> failures, double timeout_s) {
  return std::make_unique<ProcessGroupTransport>(std::move(group), std::move(patience),
                                                 std::move(failures), timeout_s);
}

}  // namespace distca::transport
