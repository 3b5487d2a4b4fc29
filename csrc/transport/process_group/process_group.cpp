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
  // finish(). Every rank must start exchanges in the same order, and finish each before it starts
  // the next.
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

  // On the CPU the host waits for rows. On a device the current stream waits, but only if this rank
  // receives rows. Otherwise the stream goes on while this rank's rows leave.
  void finish(const Gathering& started, const std::vector<RowBatch>& batches) {
    Patience& patience = *opening_.patience;
    const auto& [places, pending] = started;
    const Where& where = pending.wait.where;
#ifdef DISTCA_WITH_CUDA
    if (!batches[0].sent.device().is_cpu()) {
      const bool receives = std::any_of(batches.begin(), batches.end(), [](const RowBatch& batch) {
        return batch.received.numel() > 0;
      });
      if (receives) {
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
      : transport_(transport), routes_(routes), kept_(parts.count), where_(where) {
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
      const auto& [q, k, v] = cargo.inputs;
      const bool again = moves_again(cargo);
      std::vector<Load> loads;
      if (!cargo.with_queries.empty()) loads.push_back({cargo.with_queries, routes_.queries});
      loads.push_back({{q}, again ? routes_.keeping->queries : routes_.queries});
      if (k.defined()) loads.push_back({{k, v}, again ? routes_.keeping->keys : routes_.keys});
      dispatched_.push_back(send(std::move(loads), kDispatch, &Route::home_row));
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
    combined_.push_back(send(std::exchange(results_, {}), kCombine, &Route::visiting_row));
  }

  void collect() override {
    for (size_t i = 0; i < cargos_.size(); ++i)
      collect(cargos_[i], std::exchange(combined_[i], {}));
  }

  void deliver() override {
    dispatch();
    for (size_t i = 0; i < cargos_.size(); ++i) arrive();
  }

 private:
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

  void collect(const Cargo& cargo, const Shipment& combined) {
    std::vector<Arrival> arrivals = receive(combined);
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

  // Sends rows of all loads: to servers from `row` of their home, or back from `row` of the server.
  Shipment send(std::vector<Load> loads, const char* phase, const at::Tensor Route::*row) {
    seal_ = transport_.seal(where_, cargos_[0].inputs.q.device());
    Shipment shipment{std::move(loads), {}, {}};
    std::vector<Packing> packings;
    for (const Load& load : shipment.loads) {
      const auto& [to_server, from_home] = load.route.counts;
      const bool is_home = row == &Route::home_row;
      const RowCounts counts = is_home ? load.route.counts : RowCounts{from_home, to_server};
      shipment.batches.push_back(new_batch(load, counts, seal_));
      const at::Tensor& records = packings.emplace_back(shipment.batches.back().sent).records;
      const Tensors parts = parts_of(records, load, seal_);
      for (size_t i = 0; i < parts.size(); ++i) {
        packings.back().copies.push_back({load.tensors[i], parts[i], load.route.*row});
      }
    }
    pack_rows(packings, seal_);
    shipment.started = transport_.start(shipment.batches, where_.in(phase));
    return shipment;
  }

  // Returns what was received for each load, still packed.
  std::vector<Arrival> receive(const Shipment& shipment) {
    transport_.finish(shipment.started, shipment.batches);
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

  void expect_results(const Visiting& visiting) {
    dispatched_[num_arrived_++] = {};  // its memory may be used again
    results_.push_back({visiting.query_results, routes_.queries});
    if (!visiting.key_results.empty()) results_.push_back({visiting.key_results, routes_.keys});
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
    std::vector<Arrival> arrivals = receive(shipment);
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
    std::vector<Arrival> arrivals = receive(shipment);
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
  std::vector<Inputs> kept_;   // by part; undefined if the cargo has none
  std::vector<Cargo> cargos_;  // by part
  Where where_;
  Seal seal_;
  size_t num_arrived_ = 0;
  std::vector<Shipment> dispatched_;  // by part
  std::vector<Load> results_;         // of the part that arrived last
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
