#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "layout_tensor.h"
#include "session.h"
#include "transport/record.h"
#include "transport/rows.h"

namespace distca::ops {

// Tensors whose rows travel a route together, side by side in one record per row.
struct Cargo {
  std::vector<at::Tensor> tensors;
  const Route& route;
};

// Received rows of a cargo: strided views of one buffer, and their seals.
struct Arrival {
  std::vector<at::Tensor> parts;
  transport::SealedRows seals;

  const at::Tensor& operator[](size_t idx) const { return parts[idx]; }
};

// Rows on their way: for each cargo, the tensors that arrive.
class Shipment {
 public:
  // `wait` is the phase of arriving.
  Shipment(std::vector<transport::Record> records, std::vector<const Route*> routes,
           std::unique_ptr<transport::Exchange> exchange, std::shared_ptr<Timeline> timeline,
           const transport::Where& wait, const transport::Seal& seal)
      : records_(std::move(records)),
        routes_(std::move(routes)),
        exchange_(std::move(exchange)),
        timeline_(std::move(timeline)),
        wait_(wait),
        seal_(seal) {}

  // Returns the received rows by slot.
  std::vector<Arrival> arrive();

  // Returns them in visiting order, a copy only where slots are not in that order.
  std::vector<Arrival> arrive_visiting();

  // Does the same for tasks that compute with the rows: see check_seals.
  std::vector<Arrival> arrive_for_tasks();

 private:
  std::vector<transport::Record> records_;
  std::vector<const Route*> routes_;
  std::unique_ptr<transport::Exchange> exchange_;
  std::shared_ptr<Timeline> timeline_;
  transport::Where wait_;
  transport::Seal seal_;
};

// Home rows to the servers that visit them.
Shipment send_to_servers(Session& session, const transport::Where& where,
                         const std::vector<Cargo>& home);

// Visiting rows back to their homes; they arrive in the slots that the home sent.
Shipment send_home(Session& session, const transport::Where& where,
                   const std::vector<Cargo>& visiting);

}  // namespace distca::ops
