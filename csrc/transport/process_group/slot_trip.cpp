#include "slot_trip.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace distca::transport {
namespace {

bool any_row(const std::vector<int64_t>& num_rows) {
  return std::any_of(num_rows.begin(), num_rows.end(), [](int64_t count) { return count > 0; });
}

class SlotTrip : public RoundTrip {
 public:
  SlotTrip(Exchanges& exchanges, const Routes& routes, const Cargo& cargo, const HeadParts& parts,
           const Where& where)
      : exchanges_(exchanges),
        routes_(routes),
        only_receives_results_(only_receives_results(routes, cargo)),
        kept_(parts.count),
        where_(where),
        seal_(exchanges.seal(where, cargo.inputs.q.device())) {
    for (const HeadPart& part : in_order(parts)) {
      Inputs* kept = nullptr;
      if (cargo.kept != nullptr) {
        kept = &kept_[part.index];
        *kept = part.of(*cargo.kept);
      }
      cargos_.push_back(part.of(cargo, kept));
    }
  }

  void dispatch() override {
    for (const Cargo& cargo : cargos_) {
      if (!only_receives_results_) break;
      const Tensors queries = rows_like(cargo.query_results, 0);
      const Tensors keys = rows_like(cargo.key_results, 0);
      combined_.push_back(new_shipment(results_of(queries, keys), kHome));
    }
    for (const Cargo& cargo : cargos_) {
      const auto& [q, k, v] = cargo.inputs;
      const bool again = moves_again(cargo);
      std::vector<Load> loads;
      if (!cargo.with_queries.empty()) loads.push_back({cargo.with_queries, routes_.queries});
      loads.push_back({{q}, again ? routes_.keeping->queries : routes_.queries});
      if (k.defined()) loads.push_back({{k, v}, again ? routes_.keeping->keys : routes_.keys});
      dispatched_.push_back(send(new_shipment(std::move(loads), kServer), kServer));
    }
  }

  Visiting arrive() override {
    const Cargo& cargo = cargos_[num_arrived_];
    const Visiting visiting = placed(cargo);
    if (cargo.kept != nullptr) restore(routes_, *cargo.kept, visiting.inputs);
    expect_results(visiting);
    return visiting;
  }

  void arrive_in(const Visiting& room) override {
    place_in(room, cargos_[num_arrived_]);
    expect_results(room);
  }

  void combine() override {
    if (only_receives_results_) return;
    combined_.push_back(send(new_shipment(std::exchange(results_, {}), kHome), kHome));
  }

  // Exchanges run in order, and kernels that follow on the stream, such as matrix products, could
  // delay each of them by milliseconds. So the stream goes on only when the last one can begin.
  void collect() override {
    for (size_t i = 0; i < cargos_.size(); ++i) {
      const bool is_last = i + 1 == cargos_.size();
      if (is_last && i > 0 && !only_receives_results_)
        exchanges_.let_begin(cargos_[i].inputs.q.device());
      collect(cargos_[i], std::exchange(combined_[i], {}), is_last);
    }
  }

  void deliver() override {
    dispatch();
    for (size_t i = 0; i < cargos_.size(); ++i) arrive();
  }

 private:
  enum Destination { kServer, kHome };

  static bool only_receives_results(const Routes& routes, const Cargo& cargo) {
    return !cargo.inputs.q.is_cpu() && !cargo.query_results.empty() &&
           !any_row(routes.queries.counts.recv) && !any_row(routes.keys.counts.recv);
  }

  // Loads that travel together.
  struct Shipment {
    std::vector<Load> loads;
    std::vector<RowBatch> batches;
    Gathering started;
  };

  // Received rows of a load, by tensor and slot.
  struct Arrival {
    Packing packing;
    Tensors parts;

    void unpack(size_t part, const at::Tensor& to, const at::Tensor& row) {
      packing.copies.push_back({.src = parts[part], .dst = to, .dst_row = row});
    }
  };

  void collect(const Cargo& cargo, const Shipment& combined, bool may_run_ahead) {
    std::vector<Arrival> arrivals = receive(combined, may_run_ahead);
    for (size_t i = 0; i < cargo.query_results.size(); ++i) {
      arrivals[0].unpack(i, cargo.query_results[i], routes_.queries.home_row);
    }
    const Tensors& keys = cargo.key_results;
    const size_t num_sums = routes_.sums_keys ? keys.size() : 0;
    for (size_t i = num_sums; i < keys.size(); ++i) {
      arrivals[1].unpack(i, keys[i], routes_.key_sums.row);
    }
    unpack(arrivals);
    for (size_t i = 0; i < num_sums; ++i) {
      reduce_rows(arrivals[1].parts[i], routes_.key_sums, keys[i], seal_.spoiled);
    }
  }

  bool moves_again(const Cargo& cargo) const {
    return cargo.kept != nullptr && routes_.keeping.has_value();
  }

  // Returns loads that have yet to leave.
  Shipment new_shipment(std::vector<Load> loads, Destination destination) const {
    Shipment shipment{std::move(loads), {}, {}};
    for (const Load& load : shipment.loads) {
      const auto& [to_server, from_home] = load.route.counts;
      const bool leaves_home = destination == kServer;
      const RowCounts counts = leaves_home ? load.route.counts : RowCounts{from_home, to_server};
      shipment.batches.push_back(new_batch(load, counts, seal_));
    }
    return shipment;
  }

  Shipment send(Shipment shipment, Destination destination) {
    std::vector<Packing> packings;
    for (size_t i = 0; i < shipment.loads.size(); ++i) {
      const Load& load = shipment.loads[i];
      const at::Tensor& row =
          destination == kServer ? load.route.home_row : load.route.visiting_row;
      const at::Tensor& records = packings.emplace_back(shipment.batches[i].sent).records;
      const Tensors parts = parts_of(records, load, seal_);
      for (size_t j = 0; j < parts.size(); ++j) {
        packings.back().copies.push_back({load.tensors[j], parts[j], row});
      }
    }
    pack_rows(packings, seal_);
    const char* phase = destination == kServer ? kDispatch : kCombine;
    shipment.started = exchanges_.start(shipment.batches, where_.in(phase));
    return shipment;
  }

  // Returns what was received for each load, still packed.
  std::vector<Arrival> receive(const Shipment& shipment, bool may_run_ahead) {
    exchanges_.finish(shipment.started, shipment.batches, may_run_ahead);
    std::vector<Arrival> arrivals;
    for (size_t i = 0; i < shipment.loads.size(); ++i) {
      const at::Tensor& records = shipment.batches[i].received;
      arrivals.push_back({{records}, parts_of(records, shipment.loads[i], seal_)});
    }
    return arrivals;
  }

  void unpack(const std::vector<Arrival>& arrivals) {
    std::vector<Packing> packings;
    for (const Arrival& arrival : arrivals) packings.push_back(arrival.packing);
    unpack_rows(packings, seal_);
  }

  // Returns whether results travel back. A trip without results is for timing, so ranks that only
  // send wait, too.
  bool has_results() const { return !cargos_[0].query_results.empty(); }

  // Prepares for the results of the part that arrived last. On a device, a rank without visiting
  // rows starts to receive them at once. In combine() this would be after its visiting tasks of
  // another transport, and servers would wait for those.
  void expect_results([[maybe_unused]] const Visiting& visiting) {
    const size_t part = num_arrived_++;
    dispatched_[part] = {};  // its memory may be used again
    if (!only_receives_results_) {
      results_ = results_of(visiting.query_results, visiting.key_results);
      return;
    }
#ifdef DISTCA_WITH_CUDA
    Shipment& expected = combined_[part];
    expected.started = exchanges_.start_to_receive(expected.batches, where_.in(kCombine));
#endif
  }

  std::vector<Load> results_of(const Tensors& queries, const Tensors& keys) const {
    std::vector<Load> results{{queries, routes_.queries}};
    if (!keys.empty()) results.push_back({keys, routes_.keys});
    return results;
  }

  // Returns the tensors of each load among `visiting`.
  static std::vector<Tensors> tensors_of(const Visiting& visiting, const Cargo& cargo) {
    const auto& [q, k, v] = visiting.inputs;
    std::vector<Tensors> loads;
    if (!cargo.with_queries.empty()) loads.push_back(visiting.with_queries);
    loads.push_back({q});
    if (cargo.inputs.k.defined()) loads.push_back({k, v});
    return loads;
  }

  void place_in(const Visiting& room, const Cargo& cargo) {
    const Shipment& shipment = dispatched_[num_arrived_];
    std::vector<Arrival> arrivals = receive(shipment, has_results());
    const std::vector<Tensors> places = tensors_of(room, cargo);
    for (size_t i = 0; i < arrivals.size(); ++i) {
      for (size_t j = 0; j < places[i].size(); ++j) {
        arrivals[i].unpack(j, places[i][j], shipment.loads[i].route.visiting_row);
      }
    }
    unpack(arrivals);
  }

  // Copies unless slot i holds visiting row i and no visiting row is missing.
  Visiting placed(const Cargo& cargo) {
    const Shipment& shipment = dispatched_[num_arrived_];
    std::vector<Arrival> arrivals = receive(shipment, has_results());
    std::vector<Tensors> rows;
    for (size_t i = 0; i < arrivals.size(); ++i) {
      const Route& route = shipment.loads[i].route;
      const Tensors& parts = arrivals[i].parts;
      const bool is_in_place =
          route.visiting_row.numel() == 0 && parts[0].size(0) == route.num_visiting;
      rows.push_back(is_in_place ? parts : rows_like(parts, route.num_visiting));
      for (size_t j = 0; j < parts.size() && !is_in_place; ++j) {
        arrivals[i].unpack(j, rows[i][j], route.visiting_row);
      }
    }
    unpack(arrivals);
    const size_t of_q = cargo.with_queries.empty() ? 0 : 1;
    Inputs inputs{.q = rows[of_q][0], .k = {}, .v = {}};
    if (cargo.inputs.k.defined()) {
      inputs.k = rows.back()[0];
      inputs.v = rows.back()[1];
    }
    return {.inputs = inputs,
            .with_queries = cargo.with_queries.empty() ? Tensors{} : rows.front(),
            .query_results = rows_like(cargo.query_results, routes_.queries.num_visiting),
            .key_results = rows_like(cargo.key_results, routes_.keys.num_visiting)};
  }

  Exchanges& exchanges_;
  const Routes& routes_;
  bool only_receives_results_;  // on a device: see expect_results()
  std::vector<Inputs> kept_;    // by part; undefined tensors if nothing was kept
  std::vector<Cargo> cargos_;   // by part
  Where where_;
  Seal seal_;
  size_t num_arrived_ = 0;
  std::vector<Shipment> dispatched_;  // by part
  std::vector<Load> results_;         // of the part that arrived last, if rows visit this rank
  std::vector<Shipment> combined_;    // by part
};

}  // namespace

std::unique_ptr<RoundTrip> new_slot_trip(Exchanges& exchanges, const Routes& routes,
                                         const Cargo& cargo, const HeadParts& parts,
                                         const Where& where) {
  return std::make_unique<SlotTrip>(exchanges, routes, cargo, parts, where);
}

}  // namespace distca::transport
