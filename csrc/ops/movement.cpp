#include "movement.h"

#include <ATen/ops/empty.h>

#include "transport/rows.h"

namespace distca::ops {

std::vector<Arrival> Shipment::arrive() {
  const std::vector<at::Tensor> received = [&] {
    const Range range(*timeline_, wait_, routes_[0]->home_row.device());
    return exchange_->wait();
  }();
  exchange_.reset();
  std::vector<Arrival> cargos(records_.size());
  for (size_t i = 0; i < records_.size(); ++i) {
    for (size_t idx = 0; idx < records_[i].num_parts(); ++idx) {
      cargos[i].parts.push_back(records_[i].part(received[i], idx));
    }
    cargos[i].seals = {received[i], seal_};
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

std::vector<Arrival> Shipment::arrive_for_tasks() {
  std::vector<Arrival> cargos = arrive_visiting();
  for (const Arrival& cargo : cargos) transport::check_seals(cargo.seals);
  return cargos;
}

namespace {

// Packs home rows into records.
transport::RowBatch pack_home(const Cargo& cargo, const transport::Record& record,
                              const transport::Seal& seal) {
  const auto& [tensors, route] = cargo;
  const at::Tensor rows = record.allocate(route.home_row.size(0));
  for (size_t idx = 0; idx < tensors.size(); ++idx) {
    const bool is_first = idx == 0;  // one seal a record
    transport::gather_rows(tensors[idx], route.home_row, record.part(rows, idx),
                           is_first ? transport::SealedRows{rows, seal} : transport::SealedRows{});
  }
  return {rows, route.counts};
}

// Packs visiting rows into records.
transport::RowBatch pack_visiting(const Cargo& cargo, const transport::Record& record,
                                  const transport::Seal& seal) {
  const auto& [tensors, route] = cargo;
  const at::Tensor rows = record.allocate(route.num_visiting);
  for (size_t idx = 0; idx < tensors.size(); ++idx) {
    transport::scatter_and_seal_rows(tensors[idx], route.slot, record.part(rows, idx),
                                     {rows, seal});
  }
  return {rows, {route.counts.recv, route.counts.send}};
}

template <typename Pack>
Shipment send(Session& session, const transport::Where& where, const char* wait,
              const std::vector<Cargo>& cargos, Pack&& pack) {
  const at::Device device = cargos[0].tensors[0].device();
  const Range range(*session.timeline(), where, device);
  const transport::Seal seal = session.transport().seal(where, device);
  const bool is_sealed = seal.broken != nullptr;
  std::vector<transport::Record> records;
  std::vector<const Route*> routes;
  std::vector<transport::RowBatch> batches;
  for (const Cargo& cargo : cargos) {
    routes.push_back(&cargo.route);
    batches.push_back(pack(cargo, records.emplace_back(cargo.tensors, is_sealed), seal));
  }
  auto exchange = session.transport().start(batches, where);
  return {std::move(records), std::move(routes), std::move(exchange),
          session.timeline(), where.in(wait),    seal};
}

}  // namespace

Shipment send_to_servers(Session& session, const transport::Where& where,
                         const std::vector<Cargo>& home) {
  return send(session, where, kWaitForRows, home, pack_home);
}

Shipment send_home(Session& session, const transport::Where& where,
                   const std::vector<Cargo>& visiting) {
  return send(session, where, kWaitForResults, visiting, pack_visiting);
}

}  // namespace distca::ops
