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
    cargos[i].seals = {records_[i].seals(received[i]), seal_};
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

// Starts one exchange; `pack(cargo, record)` gives each cargo's rows and counts.
template <typename Pack>
Shipment ship(Session& session, const transport::Where& where, const char* wait,
              const std::vector<Cargo>& cargos, const transport::Seal& seal, Pack&& pack) {
  const Range range(*session.timeline(), where, cargos[0].tensors[0].device());
  std::vector<transport::Record> records;
  std::vector<const Route*> routes;
  std::vector<transport::RowBatch> batches;
  for (const Cargo& cargo : cargos) {
    const transport::Record& record = records.emplace_back(cargo.tensors, seal.broken != nullptr);
    routes.push_back(&cargo.route);
    batches.push_back(pack(cargo, record));
  }
  auto exchange = session.transport().start(batches, where);
  return {std::move(records), std::move(routes), std::move(exchange),
          session.timeline(), where.in(wait),    seal};
}

}  // namespace

Shipment send_to_servers(Session& session, const transport::Where& where,
                         const std::vector<Cargo>& home) {
  return ship(session, where, kWaitForRows, home, {},
              [](const Cargo& cargo, const transport::Record& record) {
                const auto& [tensors, route] = cargo;
                const at::Tensor rows = record.allocate(route.home_row.size(0));
                for (size_t idx = 0; idx < tensors.size(); ++idx) {
                  transport::gather_rows(tensors[idx], route.home_row, record.part(rows, idx));
                }
                return transport::RowBatch{rows, route.counts};
              });
}

Shipment send_home(Session& session, const transport::Where& where,
                   const std::vector<Cargo>& visiting) {
  const at::Device device = visiting[0].tensors[0].device();
  const transport::Seal seal = session.transport().seal(where, device);
  return ship(session, where, kWaitForResults, visiting, seal,
              [&seal](const Cargo& cargo, const transport::Record& record) {
                const auto& [tensors, route] = cargo;
                const at::Tensor rows = record.allocate(route.num_visiting);
                const transport::SealedRows seals{record.seals(rows), seal};
                transport::scatter_and_seal_rows(tensors[0], route.slot, record.part(rows, 0),
                                                 seals);
                for (size_t idx = 1; idx < tensors.size(); ++idx) {
                  transport::scatter_rows(tensors[idx], route.slot, record.part(rows, idx));
                }
                return transport::RowBatch{rows, {route.counts.recv, route.counts.send}};
              });
}

}  // namespace distca::ops
