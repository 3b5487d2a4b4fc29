#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "../head_part.h"
#include "core/rows.h"
#include "peer.h"

namespace distca::transport::peer {
namespace {

// A tensor of visiting or returned rows in every rank's buffer. All ranks use the same offset and
// leave room for the rank with most rows. `rows` gives the dtype and shape of a row.
struct Region {
  at::Tensor rows;
  int64_t offset = 0;

  int64_t row_bytes() const { return row_view(rows).row_bytes; }
};

// The regions of one result with the heads of one part. A server writes it to `visiting`, and its
// home receives it in `returned` and moves it to rows of `home`.
struct ResultRegions {
  at::Tensor home;
  Region visiting;
  Region returned;
};

// Returns `tensor`, or a copy, with rows at multiples of 16 bytes, as the copy kernels need.
at::Tensor aligned(const at::Tensor& tensor) {
  const RowView view = row_view(tensor);
  const bool can = reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.stride_bytes % 16 == 0;
  return can || tensor.dim() < 3 ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

// Returns the last parcel if it is for this rank, else a new one.
Parcel& parcel_for(int64_t rank, std::vector<Parcel>& parcels) {
  if (!parcels.empty() && parcels.back().rank == rank) return parcels.back();
  return parcels.emplace_back(rank, std::vector<RowBlock>{});
}

// Turns places of rows into addresses in the ranks' buffers.
class PeerTrip : public RoundTrip {
 public:
  PeerTrip(PeerTransport& transport, const Routes& routes, Cargo cargo, const HeadParts& parts,
           const Where& where)
      : transport_(transport),
        routes_(routes),
        cargo_(std::move(cargo)),
        parts_(in_order(parts)),
        query_results_(parts.count),
        key_results_(parts.count) {
    const Movement& movement = routes_.movement;
    const int64_t num_q = movement.max_visiting_q, num_k = movement.max_visiting_k;
    q_ = add_region(aligned(cargo_.inputs.q), num_q);
    for (const at::Tensor& rows : cargo_.with_queries) {
      with_queries_.push_back(add_region(aligned(rows), num_q));
    }
    k_ = add_region(aligned(cargo_.inputs.k), num_k);
    v_ = add_region(aligned(cargo_.inputs.v), num_k);
    for (const HeadPart& part : parts_) {
      const Cargo of_part = part.of(cargo_, nullptr);
      for (const at::Tensor& rows : of_part.query_results) {
        query_results_[part.index].push_back(
            {rows, add_region(rows, num_q), add_region(rows, movement.max_returned_q)});
      }
      for (const at::Tensor& rows : of_part.key_results) {
        key_results_[part.index].push_back(
            {rows, add_region(rows, num_k), add_region(rows, movement.max_returned_k)});
      }
    }
    transport_.open(num_bytes_, where);
  }

  // Waits until all rows have left, even after an exception: they must not change before that.
  ~PeerTrip() override {
    try {
      transport_.await_sent();
    } catch (const std::exception&) {
      // The device is lost, so it sends nothing more.
    }
  }

  void dispatch() override {
    transport_.send(home_rows());
    // When the stream gets here, no rank uses the buffer any more.
    if (cargo_.kept != nullptr) restore(routes_, *cargo_.kept, visiting_inputs());
  }

  Visiting arrive() override {
    if (num_arrived_ == 0) transport_.await_arrivals(senders());
    const HeadPart& part = parts_[num_arrived_++];
    Visiting rows;
    rows.inputs = part.of(visiting_inputs());
    for (const Region& region : with_queries_) {
      rows.with_queries.push_back(part.of_queries(visiting(region, routes_.queries.num_visiting)));
    }
    for (const ResultRegions& results : query_results_[part.index]) {
      rows.query_results.push_back(visiting(results.visiting, routes_.queries.num_visiting));
    }
    for (const ResultRegions& results : key_results_[part.index]) {
      rows.key_results.push_back(visiting(results.visiting, routes_.keys.num_visiting));
    }
    return rows;
  }

  void combine() override {
    if (num_arrived_ == parts_.size()) transport_.return_results(visiting_results());
  }

  void collect() override {
    std::vector<Gather> gathers;
    for (const auto& of_part : query_results_) {
      for (const ResultRegions& results : of_part) take_queries(results, gathers);
    }
    for (const auto& of_part : key_results_) {
      for (const ResultRegions& results : of_part) add_keys(results, gathers);
    }
    const bool is_half = cargo_.inputs.q.scalar_type() == at::kHalf;
    transport_.end(gathers, is_half ? Addend::kFloat16 : Addend::kBfloat16);
  }

  void deliver() override {
    transport_.send(home_rows());
    transport_.end_on_arrival(senders());
  }

 private:
  Region add_region(const at::Tensor& rows, int64_t num_rows) {
    constexpr int64_t kAlignment = 1024;
    Region region{rows, num_bytes_};
    num_bytes_ += round_up(num_rows * region.row_bytes(), kAlignment);
    return region;
  }

  char* row(const Region& region, int64_t rank, int64_t index) const {
    return transport_.buffer(rank) + region.offset + index * region.row_bytes();
  }

  at::Tensor visiting(const Region& region, int64_t num_rows) const {
    return at::from_blob(row(region, transport_.rank(), 0), sizes_with(region.rows, num_rows),
                         region.rows.options());
  }

  Inputs visiting_inputs() const {
    return {visiting(q_, routes_.queries.num_visiting), visiting(k_, routes_.keys.num_visiting),
            visiting(v_, routes_.keys.num_visiting)};
  }

  // Returns the ranks whose rows visit this one, itself included.
  RankSet senders() const {
    RankSet ranks = 0;
    for (const Delivery* delivery : visitors(routes_.movement, transport_.rank())) {
      ranks |= RankSet{1} << delivery->peer;
    }
    return ranks;
  }

  std::vector<Parcel> home_rows() const {
    std::vector<Parcel> parcels;
    for (const Delivery& delivery : routes_.movement.sent) {
      Parcel& parcel = parcel_for(delivery.peer, parcels);
      const auto add = [&](const Region& region, const std::vector<RowPlace>& places) {
        const RowView rows = row_view(region.rows);
        for (const RowPlace& place : places) {
          parcel.blocks.push_back({rows.data + place.home_row * rows.stride_bytes,
                                   row(region, delivery.peer, place.visiting_row),
                                   rows.stride_bytes, rows.row_bytes, place.num_rows,
                                   rows.row_bytes});
        }
      };
      for (const Region& region : with_queries_) add(region, delivery.queries);
      if (cargo_.kept != nullptr && delivery.is_kept) continue;
      add(q_, delivery.queries);
      add(k_, delivery.keys);
      add(v_, delivery.keys);
    }
    return parcels;
  }

  // Returns the results that go back to other homes. A home without results gets no parcel, because
  // nobody would wait for its word, which might then be raised after the next call's.
  std::vector<Parcel> visiting_results() const {
    std::vector<Parcel> parcels;
    for (const Delivery& delivery : routes_.movement.received) {
      Parcel& parcel = parcel_for(delivery.peer, parcels);
      const auto add = [&](const ResultRegions& results, const std::vector<RowPlace>& places) {
        const int64_t row_bytes = results.visiting.row_bytes();
        for (const RowPlace& place : places) {
          parcel.blocks.push_back({row(results.visiting, transport_.rank(), place.visiting_row),
                                   row(results.returned, delivery.peer, place.result_row),
                                   row_bytes, row_bytes, place.num_rows, row_bytes});
        }
      };
      for (const auto& of_part : query_results_) {
        for (const ResultRegions& results : of_part) add(results, delivery.queries);
      }
      for (const auto& of_part : key_results_) {
        for (const ResultRegions& results : of_part) add(results, delivery.keys);
      }
    }
    std::erase_if(parcels, [](const Parcel& parcel) { return parcel.blocks.empty(); });
    return parcels;
  }

  // Returns where `server`, this rank or another, left a result for this rank.
  Gather::Source source(const ResultRegions& results, int64_t server, int64_t result_row) const {
    const int64_t own = transport_.rank();
    return {row(server == own ? results.visiting : results.returned, own, result_row), server};
  }

  // Returns a gather, without sources yet, for `num_rows` home rows from `home_row` on.
  static Gather gather_to(const ResultRegions& results, int64_t home_row, int64_t num_rows) {
    const RowView to = row_view(results.home);
    return {
        to.data + home_row * to.stride_bytes, to.stride_bytes, num_rows, to.row_bytes, {}, false};
  }

  void take_queries(const ResultRegions& results, std::vector<Gather>& gathers) const {
    for (const Delivery& delivery : routes_.movement.sent) {
      for (const RowPlace& place : delivery.queries) {
        Gather& gather = gathers.emplace_back(gather_to(results, place.home_row, place.num_rows));
        gather.sources = {source(results, delivery.peer, place.result_row)};
      }
    }
  }

  void add_keys(const ResultRegions& results, std::vector<Gather>& gathers) const {
    for (const KeyGradients& shared : routes_.key_gradients) {
      Gather& gather = gathers.emplace_back(gather_to(results, shared.home_row, shared.num_rows));
      gather.adds = routes_.sums_keys;
      for (const auto& [server, result_row] : shared.sources) {
        gather.sources.push_back(source(results, server, result_row));
      }
    }
  }

  PeerTransport& transport_;
  const Routes& routes_;
  Cargo cargo_;
  int64_t num_bytes_ = 0;  // of all regions
  std::vector<HeadPart> parts_;
  size_t num_arrived_ = 0;
  std::vector<Region> with_queries_;
  Region q_, k_, v_;
  std::vector<std::vector<ResultRegions>> query_results_, key_results_;  // by part
};

}  // namespace

std::unique_ptr<RoundTrip> PeerTransport::begin(const Routes& routes, Cargo cargo,
                                                const HeadParts& parts, const Where& where) {
  return std::make_unique<PeerTrip>(*this, routes, std::move(cargo), parts, where);
}

}  // namespace distca::transport::peer
