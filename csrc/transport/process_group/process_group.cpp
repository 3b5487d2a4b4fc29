#include <ATen/ops/empty.h>
#ifdef DISTCA_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#endif

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "../head_part.h"
#include "../registry.h"
#include "core/rows.h"
#include "stream_waits.h"

namespace distca::transport {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr int64_t kPartAlignment = 16;  // bytes

Tensors rows_like(const Tensors& tensors, int64_t num_rows) {
  Tensors rows;
  for (const at::Tensor& tensor : tensors) {
    rows.push_back(at::empty(sizes_with(tensor, num_rows), tensor.options()));
  }
  return rows;
}

// Tensors whose rows travel one route together. A record holds the bytes of one row of each, side
// by side, at multiples of 16 bytes so that every part is a valid strided tensor at the other end
// and rows copy as 16-byte words. It may begin with a seal. Data from a peer then begins with one,
// even if the peer sends records of another size.
struct Load {
  Tensors tensors;
  const Route& route;
};

// Rows of one size that all ranks of a group exchange, ordered by peer.
struct RowBatch {
  at::Tensor sent;      // uint8 [sum(counts.send), row_bytes], contiguous
  at::Tensor received;  // uint8 [sum(counts.recv), row_bytes], complete when the works are
  RowCounts counts;
};

int64_t row_bytes(const at::Tensor& tensor) {
  return c10::multiply_integers(tensor.sizes().slice(1)) * tensor.element_size();
}

int64_t seal_bytes(const Seal& seal) {
  return seal.host != nullptr ? kSealBytes : 0;
}

RowBatch new_batch(const Load& load, const RowCounts& counts, const Seal& seal) {
  int64_t record_bytes = seal_bytes(seal);
  for (const at::Tensor& tensor : load.tensors) {
    record_bytes += round_up(row_bytes(tensor), kPartAlignment);
  }
  const auto records = [&](const std::vector<int64_t>& num_rows) {
    const int64_t sum = std::accumulate(num_rows.begin(), num_rows.end(), int64_t{0});
    return at::empty({sum, record_bytes}, load.tensors[0].options().dtype(at::kByte));
  };
  return {records(counts.send), records(counts.recv), counts};
}

// Returns the rows of each of the load's tensors in `records`, whose memory they share.
Tensors parts_of(const at::Tensor& records, const Load& load, const Seal& seal) {
  Tensors parts;
  int64_t offset = seal_bytes(seal);
  for (const at::Tensor& tensor : load.tensors) {
    const at::Tensor bytes = records.narrow(1, offset, row_bytes(tensor));
    parts.push_back(bytes.view(tensor.scalar_type()).view(sizes_with(tensor, records.size(0))));
    offset += round_up(row_bytes(tensor), kPartAlignment);
  }
  return parts;
}

// Returns the bytes that this rank sends or receives, whichever are more.
[[maybe_unused]] int64_t most_bytes(const std::vector<RowBatch>& batches) {
  int64_t sent = 0, received = 0;
  for (const RowBatch& batch : batches) {
    sent += batch.sent.numel();
    received += batch.received.numel();
  }
  return std::max(sent, received);
}

bool any_row(const std::vector<int64_t>& num_rows) {
  return std::any_of(num_rows.begin(), num_rows.end(), [](int64_t count) { return count > 0; });
}

// Starts an exchange of rows. On a device, a stream must wait for it.
Works exchange(c10d::ProcessGroup& group, const std::vector<RowBatch>& batches) {
  const c10::DeviceType device = batches[0].sent.device().type();
  const bool coalesces = group.getBackend(device)->supportsCoalescing();
  Works works;
  // One launch for all batches: a second one would queue behind the attention kernels.
  if (coalesces) group.startCoalescing(device);
  for (const auto& [sent, received, counts] : batches) {
    at::Tensor input = sent, output = received;
    std::vector<int64_t> send = counts.send, recv = counts.recv;
    works.push_back(group.alltoall_base(output, input, recv, send));
  }
  if (coalesces) works = {group.endCoalescing(device)};
  return works;
}

// Describes how the places of ranks (WhereWords by rank) differ. Returns "" if all are equal.
std::string difference_of(const at::Tensor& places) {
  std::map<WhereWords, std::vector<int64_t>> ranks_by_place;
  for (int64_t rank = 0; rank < places.size(0); ++rank) {
    WhereWords words;
    std::memcpy(words.data(), places[rank].const_data_ptr(), sizeof(words));
    ranks_by_place[words].push_back(rank);
  }
  if (ranks_by_place.size() == 1) return "";
  RanksByPlace described;
  for (const auto& [words, ranks] : ranks_by_place) {
    described.push_back({describe(where_of(words)), ranks});
  }
  return describe_places(std::move(described), "is in", "are in") +
         ", and rows of one call would have served another" + kSameCalls;
}

class ProcessGroupTransport : public Transport {
 public:
  explicit ProcessGroupTransport(const Opening& opening)
      : opening_(opening), calls_(opening.group, opening.patience) {}

  std::unique_ptr<RoundTrip> begin(const Routes& routes, Cargo cargo, const HeadParts& parts,
                                   const Where& where) override;
  bool takes_parts() const override { return true; }
  bool shares_device() const override { return true; }

  std::vector<ExchangeTime> take_times() override {
#ifdef DISTCA_WITH_CUDA
    if (streams_) return streams_->take_times();
#endif
    return {};
  }

  // Returns the seal of this call's rows if a stream, not the host, waits for them (see Seal).
  Seal seal([[maybe_unused]] const Where& where, const c10::Device& device) {
#ifdef DISTCA_WITH_CUDA
    if (!device.is_cpu()) return streams_of(device).seal(where);
#endif
    return {};
  }

  // Starts an exchange of rows. On the CPU it only starts to compare calls, and rows follow in
  // finish(). Every rank must start exchanges in the same order, and finish them in that order.
  Gathering start(const std::vector<RowBatch>& batches, const Where& where) {
#ifdef DISTCA_WITH_CUDA
    const c10::Device device = batches[0].sent.device();
    if (!device.is_cpu()) {
      streams_of(device).check();
      streams_->begin(where);
      Pending pending = start_rows(batches, where, "");
      hold_current_stream();
      return {{}, pending};
    }
#endif
    const WhereWords own = words_of(where);
    return calls_.start({reinterpret_cast<const char*>(own.data()), sizeof(own)}, where,
                        describe(where));
  }

#ifdef DISTCA_WITH_CUDA
  // Starts an exchange in which this rank only receives, on a device. It does not wait for the
  // current stream. So allocate `batches` before the call's first exchange starts: that exchange
  // waits for earlier uses of their memory.
  Gathering start_to_receive(const std::vector<RowBatch>& batches, const Where& where) {
    streams_->check();
    const c10::cuda::CUDAStreamGuard aside(streams_->marks());
    streams_->begin(where);
    return {{}, start_rows(batches, where, "")};
  }
#endif

  // Lets an exchange that is ready begin before the next kernels of the device's current stream.
  void let_begin([[maybe_unused]] const c10::Device& device) {
#ifdef DISTCA_WITH_CUDA
    if (!device.is_cpu()) hold_current_stream();
#endif
  }

  // On the CPU the host waits for rows. On a device the current stream waits if this rank receives
  // rows, or if it may not run ahead while this rank's rows leave.
  void finish(const Gathering& started, const std::vector<RowBatch>& batches,
              [[maybe_unused]] bool may_run_ahead) {
    Patience& patience = *opening_.patience;
    const auto& [places, pending] = started;
    const Where& where = pending.wait.where;
#ifdef DISTCA_WITH_CUDA
    if (!batches[0].sent.device().is_cpu()) {
      const bool receives = std::any_of(batches.begin(), batches.end(), [](const RowBatch& batch) {
        return batch.received.numel() > 0;
      });
      if (receives || !may_run_ahead) {
        patience.wait_on_stream(pending);
        streams_->release();
      } else {
        for (const RowBatch& batch : batches) streams_->hold(batch.sent);
        if (where.is_last()) streams_->release_later();
        const c10::cuda::CUDAStreamGuard aside(streams_->marks());
        patience.wait_on_stream(pending);
      }
      patience.guard(where, [&] { streams_->add(pending, most_bytes(batches)); });
      return;
    }
#endif
    // gloo matches messages by their order alone: if sizes differ, it returns stale memory or
    // aborts.
    patience.wait_on_host(pending);
    const std::string difference = difference_of(places);
    if (!difference.empty()) patience.fail_together(where, difference);
    patience.wait_on_host(start_rows(batches, where, describe(where)));
  }

 private:
  Pending start_rows(const std::vector<RowBatch>& batches, const Where& where,
                     const std::string& activity) {
    return opening_.patience->start(where, activity,
                                    [&] { return exchange(*opening_.group, batches); });
  }

  Opening opening_;
  ControlPlane calls_;
#ifdef DISTCA_WITH_CUDA
  StreamWaits& streams_of(const c10::Device& device) {
    if (!streams_) streams_ = std::make_unique<StreamWaits>(opening_, device);
    return *streams_;
  }

  std::unique_ptr<StreamWaits> streams_;
#endif
};

class SlotTrip : public RoundTrip {
 public:
  SlotTrip(ProcessGroupTransport& transport, const Routes& routes, const Cargo& cargo,
           const HeadParts& parts, const Where& where)
      : transport_(transport),
        routes_(routes),
        only_receives_results_(only_receives_results(routes, cargo)),
        kept_(parts.count),
        where_(where),
        seal_(transport.seal(where, cargo.inputs.q.device())) {
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
        transport_.let_begin(cargos_[i].inputs.q.device());
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
    shipment.started = transport_.start(shipment.batches, where_.in(phase));
    return shipment;
  }

  // Returns what was received for each load, still packed.
  std::vector<Arrival> receive(const Shipment& shipment, bool may_run_ahead) {
    transport_.finish(shipment.started, shipment.batches, may_run_ahead);
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

  // If there are none, the trip is for timing, and ranks that only send wait, too.
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
    expected.started = transport_.start_to_receive(expected.batches, where_.in(kCombine));
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

  ProcessGroupTransport& transport_;
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

std::unique_ptr<RoundTrip> ProcessGroupTransport::begin(const Routes& routes, Cargo cargo,
                                                        const HeadParts& parts,
                                                        const Where& where) {
  return std::make_unique<SlotTrip>(*this, routes, cargo, parts, where);
}

}  // namespace

std::unique_ptr<Transport> open_process_group(const Opening& opening) {
  return std::make_unique<ProcessGroupTransport>(opening);
}

}  // namespace distca::transport
