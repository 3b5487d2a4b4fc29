#include "movement.h"

#include <ATen/ops/empty.h>

#include "transport/rows.h"

namespace distca::ops {

std::vector<std::vector<at::Tensor>> Shipment::arrive() {
  const std::vector<at::Tensor> received = exchange_->wait();
  exchange_.reset();
  std::vector<std::vector<at::Tensor>> cargos(records_.size());
  for (size_t i = 0; i < records_.size(); ++i) {
    for (size_t idx = 0; idx < records_[i].num_parts(); ++idx) {
      cargos[i].push_back(records_[i].part(received[i], idx));
    }
  }
  return cargos;
}

std::vector<std::vector<at::Tensor>> Shipment::arrive_visiting() {
  std::vector<std::vector<at::Tensor>> cargos = arrive();
  for (size_t i = 0; i < cargos.size(); ++i) {
    if (routes_[i]->slot.numel() == 0) continue;
    for (at::Tensor& part : cargos[i]) {
      const at::Tensor ordered = at::empty(part.sizes(), part.options());
      transport::gather_rows(part, routes_[i]->slot, ordered);
      part = ordered;
    }
  }
  return cargos;
}

Shipment send_to_servers(Session& session, const transport::Where& where,
                         const std::vector<Cargo>& home) {
  std::vector<transport::Record> records;
  std::vector<const Route*> routes;
  std::vector<transport::RowBatch> batches;
  for (const Cargo& cargo : home) {
    const transport::Record& record = records.emplace_back(cargo.tensors);
    const at::Tensor rows = record.allocate(cargo.route.home_row.size(0));
    for (size_t idx = 0; idx < cargo.tensors.size(); ++idx) {
      transport::gather_rows(cargo.tensors[idx], cargo.route.home_row, record.part(rows, idx));
    }
    routes.push_back(&cargo.route);
    batches.push_back({rows, cargo.route.counts});
  }
  auto exchange = session.transport().start(batches, where);
  return {std::move(records), std::move(routes), std::move(exchange)};
}

Shipment send_home(Session& session, const transport::Where& where,
                   const std::vector<Cargo>& visiting) {
  std::vector<transport::Record> records;
  std::vector<const Route*> routes;
  std::vector<transport::RowBatch> batches;
  for (const Cargo& cargo : visiting) {
    const transport::Record& record = records.emplace_back(cargo.tensors);
    const at::Tensor rows = record.allocate(cargo.route.num_visiting);
    for (size_t idx = 0; idx < cargo.tensors.size(); ++idx) {
      transport::scatter_rows(cargo.tensors[idx], cargo.route.slot, record.part(rows, idx));
    }
    routes.push_back(&cargo.route);
    batches.push_back({rows, {cargo.route.counts.recv, cargo.route.counts.send}});
  }
  auto exchange = session.transport().start(batches, where);
  return {std::move(records), std::move(routes), std::move(exchange)};
}

}  // namespace distca::ops
