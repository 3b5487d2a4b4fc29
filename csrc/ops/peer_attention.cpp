#include "peer_attention.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "attention/delta.h"
#include "transport/peer/peer.h"
#include "transport/row_view.h"

namespace distca::ops {
namespace {

namespace peer = transport::peer;
static_assert(kMaxPeers == peer::kMaxPeers);

// A tensor of visiting rows, or of returned ones, in the buffer of every rank: at the same place on
// all, with room for the rank that has most. `rows` gives dtype and shape of a row.
struct Region {
  at::Tensor rows;
  int64_t offset = 0;

  int64_t row_bytes() const {
    return rows.size(0) > 0 ? rows.nbytes() / rows.size(0) : rows.element_size() * row_numel();
  }
  int64_t row_numel() const {
    int64_t numel = 1;
    for (const int64_t size : rows.sizes().slice(1)) numel *= size;
    return numel;
  }
};

// Results of visiting rows, where their server writes them and where their home gets them.
struct Results {
  Region visiting;
  Region returned;
};

// Regions one after the other, for a round.
class Buffers {
 public:
  Buffers(peer::PeerTransport& transport, const Round& round)
      : transport_(transport), round_(round), rank_(transport.rank()) {}

  Region for_queries(const at::Tensor& rows) {
    return add(rows, round_.peers->deliveries.max_visiting_q);
  }
  Region for_keys(const at::Tensor& rows) {
    return add(rows, round_.peers->deliveries.max_visiting_k);
  }
  Results for_query_results(const at::Tensor& rows) {
    return {for_queries(rows), add(rows, round_.peers->deliveries.max_returned_q)};
  }
  Results for_key_results(const at::Tensor& rows) {
    return {for_keys(rows), add(rows, round_.peers->deliveries.max_returned_k)};
  }
  int64_t num_bytes() const { return next_; }

  // Where a rank's own server, or another, left a result for this one.
  peer::Gather::Source source(const Results& results, int64_t server, int64_t result_row) const {
    const Region& region = server == rank_ ? results.visiting : results.returned;
    return {own_row(region, result_row), server};
  }

  char* row(const Region& region, int64_t rank, int64_t index) const {
    return transport_.buffer(rank) + region.offset + index * region.row_bytes();
  }
  char* own_row(const Region& region, int64_t index) const { return row(region, rank_, index); }

  // This rank's visiting rows.
  at::Tensor queries(const Region& region) const {
    return visiting(region, round_.queries.num_visiting);
  }
  at::Tensor keys(const Region& region) const { return visiting(region, round_.keys.num_visiting); }

 private:
  Region add(const at::Tensor& rows, int64_t num_rows) {
    constexpr int64_t kAlignment = 1024;
    Region region{rows, next_};
    next_ += (num_rows * region.row_bytes() + kAlignment - 1) / kAlignment * kAlignment;
    return region;
  }
  at::Tensor visiting(const Region& region, int64_t num_rows) const {
    std::vector<int64_t> sizes = region.rows.sizes().vec();
    sizes[0] = num_rows;
    return at::from_blob(own_row(region, 0), sizes, region.rows.options());
  }

  peer::PeerTransport& transport_;
  const Round& round_;
  int64_t rank_;
  int64_t next_ = 0;
};

// Home rows that copies can read: at multiples of 16 bytes.
at::Tensor aligned(const at::Tensor& tensor) {
  const transport::RowView view = transport::row_view(tensor);
  const bool can = reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.stride_bytes % 16 == 0;
  return can || tensor.dim() < 3 ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

// What goes with each query row, and with each key row. Inputs go in the forward pass and, where
// their server did not keep them, again in the backward pass.
struct Sent {
  std::vector<Region> queries, query_inputs, key_inputs;
  bool again;
};

// The last parcel, if it is for this rank, or a new one.
peer::Parcel& parcel_for(int64_t rank, std::vector<peer::Parcel>& parcels) {
  if (!parcels.empty() && parcels.back().rank == rank) return parcels.back();
  return parcels.emplace_back(rank, std::vector<peer::RowBlock>{});
}

std::vector<peer::Parcel> parcels_of(const Round& round, const Buffers& buffers, const Sent& sent) {
  std::vector<peer::Parcel> parcels;
  for (const planner::Delivery& delivery : round.peers->deliveries.sent) {
    peer::Parcel& parcel = parcel_for(delivery.server, parcels);
    const auto add = [&](const Region& region, const std::vector<planner::RowPlace>& places) {
      const transport::RowView rows = transport::row_view(region.rows);
      for (const planner::RowPlace& place : places) {
        parcel.blocks.push_back({rows.data + place.home_row * rows.stride_bytes,
                                 buffers.row(region, delivery.server, place.visiting_row),
                                 rows.stride_bytes, rows.row_bytes, place.num_rows,
                                 rows.row_bytes});
      }
    };
    for (const Region& region : sent.queries) add(region, delivery.queries);
    if (sent.again && delivery.is_kept) continue;
    for (const Region& region : sent.query_inputs) add(region, delivery.queries);
    for (const Region& region : sent.key_inputs) add(region, delivery.keys);
  }
  return parcels;
}

// What other homes get back from this rank. Homes that get nothing have no parcel: a word that
// nobody waits for might be raised after the next call's.
std::vector<peer::Parcel> returned_parcels(const Round& round, const Buffers& buffers,
                                           const std::vector<Results>& of_queries,
                                           const std::vector<Results>& of_keys) {
  std::vector<peer::Parcel> parcels;
  for (const planner::Return& returned : round.peers->deliveries.returned) {
    peer::Parcel& parcel = parcel_for(returned.home, parcels);
    const auto add = [&](const Results& results, const std::vector<planner::RowPlace>& places) {
      const int64_t row_bytes = results.visiting.row_bytes();
      for (const planner::RowPlace& place : places) {
        parcel.blocks.push_back({buffers.own_row(results.visiting, place.visiting_row),
                                 buffers.row(results.returned, returned.home, place.result_row),
                                 row_bytes, row_bytes, place.num_rows, row_bytes});
      }
    };
    for (const Results& results : of_queries) add(results, returned.queries);
    for (const Results& results : of_keys) add(results, returned.keys);
  }
  std::erase_if(parcels, [](const peer::Parcel& parcel) { return parcel.blocks.empty(); });
  return parcels;
}

// Ranks whose rows visit this one, itself included.
peer::RankSet senders_of(const Round& round, int64_t rank) {
  peer::RankSet ranks = 0;
  for (const planner::Return& returned : round.peers->deliveries.returned) {
    ranks |= peer::RankSet{1} << returned.home;
  }
  for (const planner::Delivery& delivery : round.peers->deliveries.sent) {
    if (delivery.server == rank) ranks |= peer::RankSet{1} << rank;
  }
  return ranks;
}

// Home rows of `to` from the servers' results.
void take_queries(const Round& round, const Buffers& buffers, const Results& results,
                  const at::Tensor& to, std::vector<peer::Gather>& gathers) {
  const transport::RowView rows = transport::row_view(to);
  for (const planner::Delivery& delivery : round.peers->deliveries.sent) {
    for (const planner::RowPlace& place : delivery.queries) {
      gathers.push_back({rows.data + place.home_row * rows.row_bytes,
                         place.num_rows * rows.row_bytes,
                         {buffers.source(results, delivery.server, place.result_row)},
                         false});
    }
  }
}

void add_key_gradients(const Round& round, const Buffers& buffers, const Results& results,
                       const at::Tensor& to, std::vector<peer::Gather>& gathers) {
  const transport::RowView rows = transport::row_view(to);
  for (const KeyGradients& shared : round.peers->key_gradients) {
    peer::Gather& gather = gathers.emplace_back(rows.data + shared.home_row * rows.row_bytes,
                                                shared.num_rows * rows.row_bytes,
                                                std::vector<peer::Gather::Source>{}, true);
    for (const auto& [server, result_row] : shared.sources) {
      gather.sources.push_back(buffers.source(results, server, result_row));
    }
  }
}

peer::Addend addend_of(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf ? peer::Addend::kFloat16 : peer::Addend::kBfloat16;
}

// What is sent stays as it is until it has left, also where an exception ends the call.
class Sending {
 public:
  explicit Sending(peer::PeerTransport& transport) : transport_(transport) {}
  Sending(const Sending&) = delete;
  ~Sending() {
    try {
      transport_.await_sent();
    } catch (const std::exception&) {
      // The device is lost: nothing is sent any more.
    }
  }

 private:
  peer::PeerTransport& transport_;
};

}  // namespace

bool uses_peer_memory(const Call& call, double softmax_scale) {
  const auto has_peers = [](const Round& round) { return round.peers.has_value(); };
  return call.session->peer_transport() != nullptr &&
         attention::reads_in_place(call.inputs.q, softmax_scale) &&
         std::all_of(call.layout.rounds.begin(), call.layout.rounds.end(), has_peers);
}

std::tuple<at::Tensor, at::Tensor> peer_forward(const Call& call, const Kept& kept,
                                                const attention::Params& params) {
  peer::PeerTransport& transport = *call.session->peer_transport();
  const at::Tensor q = aligned(call.inputs.q), k = aligned(call.inputs.k),
                   v = aligned(call.inputs.v);
  const auto [out, lse] = attention::new_results(q);
  for (size_t i = 0; i < call.layout.rounds.size(); ++i) {
    const Round& round = call.layout.rounds[i];
    Buffers buffers(transport, round);
    const Region to_q = buffers.for_queries(q), to_k = buffers.for_keys(k),
                 to_v = buffers.for_keys(v);
    const Results outs = buffers.for_query_results(out), lses = buffers.for_query_results(lse);
    transport.begin(buffers.num_bytes(), call.where);
    const Sending sending(transport);
    in_phase(call, kDispatch, [&] {
      transport.send(parcels_of(round, buffers, {{}, {to_q}, {to_k, to_v}, false}));
    });
    // Separate launches, not one that waits for flags: blocks that take tasks of both lists by
    // turns lose the keys that they share in L2, a tenth of their speed and more.
    const attention::ForwardRows early{q, k, v, round.early, out, lse};
    in_phase(call, kEarlyTasks, [&] { attention::forward(early, params); });
    in_phase(call, kWaitForRows,
             [&] { transport.await_arrivals(senders_of(round, transport.rank())); });
    in_phase(call, kVisitingTasks, [&] {
      attention::forward(
          {buffers.queries(to_q), buffers.keys(to_k), buffers.keys(to_v), round.visiting,
           buffers.queries(outs.visiting), buffers.queries(lses.visiting)},
          params);
    });
    in_phase(call, kCombine, [&] {
      transport.return_results(returned_parcels(round, buffers, {outs, lses}, {}));
    });
    keep(round, {buffers.queries(to_q), buffers.keys(to_k), buffers.keys(to_v)}, kept.rounds[i]);
    const attention::ForwardRows late{q, k, v, round.late, out, lse};
    in_phase(call, kLateTasks, [&] { attention::forward(late, params); });
    std::vector<peer::Gather> gathers;
    take_queries(round, buffers, outs, out, gathers);
    take_queries(round, buffers, lses, lse, gathers);
    in_phase(call, kWaitForResults, [&] { transport.end(gathers, addend_of(q)); });
  }
  return {out, lse};
}

void peer_exchange(const Call& call) {
  peer::PeerTransport& transport = *call.session->peer_transport();
  const auto& [q, k, v] = call.inputs;
  for (const Round& round : call.layout.rounds) {
    Buffers buffers(transport, round);
    const Region to_q = buffers.for_queries(aligned(q)), to_k = buffers.for_keys(aligned(k)),
                 to_v = buffers.for_keys(aligned(v));
    transport.begin(buffers.num_bytes(), call.where);
    transport.send(parcels_of(round, buffers, {{}, {to_q}, {to_k, to_v}, false}));
    transport.end_on_arrival(senders_of(round, transport.rank()));
  }
}

namespace {

struct BackwardInputs {
  at::Tensor q, k, v, grad;
  attention::Saved saved;
  at::Tensor delta;  // of the rows that are sent
};

// Of the rows that are sent, and of few between them; the others hold anything. It is formed at
// home, so that `out` never travels. Home tasks form their own.
at::Tensor delta_of_sent(const std::vector<Round>& rounds, const at::Tensor& out,
                         const at::Tensor& grad) {
  constexpr int64_t kRowsOfALaunch = 1024;  // what it takes, about
  std::vector<Run> runs;
  for (const Round& round : rounds) {
    for (const planner::Delivery& delivery : round.peers->deliveries.sent) {
      for (const planner::RowPlace& place : delivery.queries) {
        runs.push_back({place.home_row, place.num_rows});
      }
    }
  }
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.first < b.first; });
  const at::Tensor delta = attention::empty_row_dots(out);
  for (size_t i = 0; i < runs.size();) {
    const int64_t first = runs[i].first;
    int64_t last = first;
    for (; i < runs.size() && (last == first || runs[i].first <= last + kRowsOfALaunch); ++i) {
      last = std::max(last, runs[i].first + runs[i].length);
    }
    const auto rows = [&](const at::Tensor& tensor) {
      return tensor.narrow(0, first, last - first);
    };
    attention::row_dots_into(rows(out), rows(grad), rows(delta));
  }
  return delta;
}

struct Gradients {
  at::Tensor dq, dk, dv;
};

void backward_round(const Call& call, const Round& round, const BackwardInputs& inputs,
                    const VisitingInputs& kept, const Gradients& gradients,
                    const attention::Params& params) {
  peer::PeerTransport& transport = *call.session->peer_transport();
  const auto& [q, k, v, grad, saved, delta] = inputs;
  const auto& [dq, dk, dv] = gradients;
  Buffers buffers(transport, round);
  const Region to_q = buffers.for_queries(q), to_grad = buffers.for_queries(grad),
               to_lse = buffers.for_queries(saved.lse), to_delta = buffers.for_queries(delta),
               to_k = buffers.for_keys(k), to_v = buffers.for_keys(v);
  const Results dqs = buffers.for_query_results(dq), dks = buffers.for_key_results(dk),
                dvs = buffers.for_key_results(dv);
  transport.begin(buffers.num_bytes(), call.where);
  const Sending sending(transport);
  in_phase(call, kDispatch, [&] {
    transport.send(
        parcels_of(round, buffers, {{to_grad, to_lse, to_delta}, {to_q}, {to_k, to_v}, true}));
    // Nobody uses the buffer any more, once the stream gets here.
    restore(round, kept, {buffers.queries(to_q), buffers.keys(to_k), buffers.keys(to_v)});
  });
  const attention::BackwardRows early{grad, q, k, v, saved, round.early, dq, dk, dv};
  in_phase(call, kEarlyTasks, [&] { attention::backward(early, params); });
  in_phase(call, kWaitForRows,
           [&] { transport.await_arrivals(senders_of(round, transport.rank())); });
  in_phase(call, kVisitingTasks, [&] {
    attention::backward({buffers.queries(to_grad),
                         buffers.queries(to_q),
                         buffers.keys(to_k),
                         buffers.keys(to_v),
                         {buffers.queries(to_lse), buffers.queries(to_delta), {}},
                         round.visiting,
                         buffers.queries(dqs.visiting),
                         buffers.keys(dks.visiting),
                         buffers.keys(dvs.visiting)},
                        params);
  });
  in_phase(call, kCombine, [&] {
    transport.return_results(returned_parcels(round, buffers, {dqs}, {dks, dvs}));
  });
  const attention::BackwardRows late{grad, q, k, v, saved, round.late, dq, dk, dv};
  in_phase(call, kLateTasks, [&] { attention::backward(late, params); });
  std::vector<peer::Gather> gathers;
  take_queries(round, buffers, dqs, dq, gathers);
  add_key_gradients(round, buffers, dks, dk, gathers);
  add_key_gradients(round, buffers, dvs, dv, gathers);
  in_phase(call, kWaitForResults, [&] { transport.end(gathers, addend_of(q)); });
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> peer_backward(
    const Call& call, const at::Tensor& grad_out, const at::Tensor& out, const at::Tensor& lse,
    const Kept& kept, const attention::Params& params) {
  const at::Tensor grad = aligned(grad_out);
  const BackwardInputs inputs{aligned(call.inputs.q), aligned(call.inputs.k),
                              aligned(call.inputs.v), grad,
                              {lse, {}, out},         delta_of_sent(call.layout.rounds, out, grad)};
  const Round& first = call.layout.rounds[0];  // it has all home tasks
  const auto [dk, dv] = attention::new_key_gradients(inputs.k, {&first.early, &first.late});
  const Gradients gradients{at::empty(inputs.q.sizes(), inputs.q.options()), dk, dv};
  for (size_t i = 0; i < call.layout.rounds.size(); ++i) {
    backward_round(call, call.layout.rounds[i], inputs, kept.rounds[i], gradients, params);
  }
  return {gradients.dq, dk, dv};
}

}  // namespace distca::ops
