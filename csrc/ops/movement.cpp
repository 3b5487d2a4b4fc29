#include "movement.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>

#include "transport/rows.h"

namespace distca::ops {

std::vector<Arrival> Shipment::arrive(const at::Tensor& senders) {
  const std::vector<at::Tensor> received = [&] {
    const Range range(*timeline_, wait_, routes_[0]->home_row.device());
    return exchange_->wait();
  }();
  exchange_.reset();
  if (received.size() > records_.size()) senders_ = received.back();
  std::vector<Arrival> cargos(records_.size());
  for (size_t i = 0; i < records_.size(); ++i) {
    for (size_t idx = 0; idx < records_[i].num_parts(); ++idx) {
      cargos[i].parts.push_back(records_[i].part(received[i], idx));
    }
    cargos[i].seals = {records_[i].seals(received[i]), seal_, senders};
  }
  return cargos;
}

std::vector<Arrival> Shipment::arrive_visiting() {
  std::vector<Arrival> cargos = arrive();
  for (size_t i = 0; i < cargos.size(); ++i) {
    if (routes_[i]->slot.numel() == 0) continue;
    for (at::Tensor& part : cargos[i].parts) {
      const at::Tensor ordered = at::empty(part.sizes(), part.options());
      transport::gather_rows(part, routes_[i]->slot, ordered);
      part = ordered;
    }
  }
  return cargos;
}

namespace {

// Allocates this call's seals, a row for each rank that gets rows of any cargo.
transport::RowBatch seals_for_servers(const std::vector<Cargo>& home) {
  const auto any = [&home](std::vector<int64_t> transport::RowCounts::*counts) {
    std::vector<int64_t> has((home[0].route.counts.*counts).size(), 0);
    for (const Cargo& cargo : home) {
      for (size_t rank = 0; rank < has.size(); ++rank) {
        if ((cargo.route.counts.*counts)[rank] > 0) has[rank] = 1;
      }
    }
    return has;
  };
  transport::RowCounts counts{any(&transport::RowCounts::send), any(&transport::RowCounts::recv)};
  const int64_t num_sent = std::accumulate(counts.send.begin(), counts.send.end(), int64_t{0});
  const at::TensorOptions options(home[0].tensors[0].device());
  return {at::empty({num_sent, transport::kSealBytes}, options.dtype(at::kByte)), counts};
}

// Packs home rows into records. Writes the seals with the first cargo that has rows.
transport::RowBatch pack(const Cargo& cargo, const transport::Record& record,
                         transport::SealedRows& seals) {
  const auto& [tensors, route] = cargo;
  const at::Tensor rows = record.allocate(route.home_row.size(0));
  for (size_t idx = 0; idx < tensors.size(); ++idx) {
    transport::gather_rows(tensors[idx], route.home_row, record.part(rows, idx), seals);
    if (rows.size(0) > 0) seals = {};
  }
  return {rows, route.counts};
}

// Packs visiting rows into records with their seals.
transport::RowBatch pack_results(const Cargo& cargo, const transport::Record& record,
                                 const transport::Seal& seal) {
  const auto& [tensors, route] = cargo;
  const at::Tensor rows = record.allocate(route.num_visiting);
  transport::scatter_and_seal_rows(tensors[0], route.slot, record.part(rows, 0),
                                   {record.seals(rows), seal, {}});
  for (size_t idx = 1; idx < tensors.size(); ++idx) {
    transport::scatter_rows(tensors[idx], route.slot, record.part(rows, idx));
  }
  return {rows, {route.counts.recv, route.counts.send}};
}

}  // namespace

Shipment send_to_servers(Session& session, const transport::Where& where,
                         const std::vector<Cargo>& home) {
  const at::Device device = home[0].tensors[0].device();
  const Range range(*session.timeline(), where, device);
  const transport::Seal seal = session.transport().seal(where, device);
  std::vector<transport::Record> records;
  std::vector<const Route*> routes;
  std::vector<transport::RowBatch> batches;
  transport::SealedRows seals;
  if (seal.broken != nullptr) {
    batches.push_back(seals_for_servers(home));
    seals = {batches[0].rows, seal, {}};
  }
  for (const Cargo& cargo : home) {
    routes.push_back(&cargo.route);
    batches.push_back(pack(cargo, records.emplace_back(cargo.tensors), seals));
  }
  std::rotate(batches.begin(), batches.end() - records.size(), batches.end());  // seals come last
  auto exchange = session.transport().start(batches, where);
  return {std::move(records), std::move(routes),      std::move(exchange),
          session.timeline(), where.in(kWaitForRows), {}};
}

Shipment send_home(Session& session, const transport::Where& where,
                   const std::vector<Cargo>& visiting) {
  const at::Device device = visiting[0].tensors[0].device();
  const Range range(*session.timeline(), where, device);
  const transport::Seal seal = session.transport().seal(where, device);
  std::vector<transport::Record> records;
  std::vector<const Route*> routes;
  std::vector<transport::RowBatch> batches;
  for (const Cargo& cargo : visiting) {
    routes.push_back(&cargo.route);
    const bool is_sealed = seal.broken != nullptr;
    batches.push_back(pack_results(cargo, records.emplace_back(cargo.tensors, is_sealed), seal));
  }
  auto exchange = session.transport().start(batches, where);
  return {std::move(records), std::move(routes),         std::move(exchange),
          session.timeline(), where.in(kWaitForResults), seal};
}

}  // namespace distca::ops
