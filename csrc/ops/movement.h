#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "layout_tensor.h"
#include "session.h"
#include "transport/record.h"

namespace distca::ops {

// Rows of several tensors of equal length on their way, side by side in one record per row.
class Shipment {
 public:
  Shipment(transport::Record record, std::unique_ptr<transport::Exchange> exchange)
      : record_(std::move(record)), exchange_(std::move(exchange)) {}

  // Received rows of each tensor, by slot: strided views of one buffer.
  std::vector<at::Tensor> arrive();

 private:
  transport::Record record_;
  std::unique_ptr<transport::Exchange> exchange_;
};

// Home rows to the servers that visit them.
Shipment send_to_servers(Session& session, const transport::Where& where,
                         const std::vector<at::Tensor>& home, const Route& route);

// The arrived rows of a route in visiting order (a copy only where slots are not in that order).
std::vector<at::Tensor> visiting_rows(Shipment shipment, const Route& route);

// Visiting rows back to their homes; they arrive in the slots that the home sent.
Shipment send_home(Session& session, const transport::Where& where,
                   const std::vector<at::Tensor>& visiting, const Route& route);

}  // namespace distca::ops
