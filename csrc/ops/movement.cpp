#include "movement.h"

#include <ATen/ops/empty.h>

#include "transport/rows.h"

namespace distca::ops {

std::vector<at::Tensor> Shipment::arrive() {
  const at::Tensor records = exchange_->wait();
  exchange_.reset();
  std::vector<at::Tensor> parts;
  for (size_t idx = 0; idx < record_.num_parts(); ++idx) {
    parts.push_back(record_.part(records, idx));
  }
  return parts;
}

Shipment send_to_servers(Session& session, const transport::Where& where,
                         const std::vector<at::Tensor>& home, const Route& route) {
  transport::Record record(home);
  const at::Tensor records = record.allocate(route.home_row.size(0));
  for (size_t idx = 0; idx < home.size(); ++idx) {
    transport::gather_rows(home[idx], route.home_row, record.part(records, idx));
  }
  auto exchange = session.transport().start(records, route.counts, where);
  return {std::move(record), std::move(exchange)};
}

std::vector<at::Tensor> visiting_rows(Shipment shipment, const Route& route) {
  std::vector<at::Tensor> slots = shipment.arrive();
  if (route.slot.numel() == 0) return slots;
  std::vector<at::Tensor> visiting;
  for (const at::Tensor& part : slots) {
    visiting.push_back(at::empty(part.sizes(), part.options()));
    transport::gather_rows(part, route.slot, visiting.back());
  }
  return visiting;
}

Shipment send_home(Session& session, const transport::Where& where,
                   const std::vector<at::Tensor>& visiting, const Route& route) {
  transport::Record record(visiting);
  const at::Tensor records = record.allocate(route.num_visiting);
  for (size_t idx = 0; idx < visiting.size(); ++idx) {
    transport::scatter_rows(visiting[idx], route.slot, record.part(records, idx));
  }
  const transport::RowCounts homeward{route.counts.recv, route.counts.send};
  auto exchange = session.transport().start(records, homeward, where);
  return {std::move(record), std::move(exchange)};
}

}  // namespace distca::ops
