// A transport that moves CPU rows through the group's store. It includes only distca's headers.
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "transport/registry.h"

namespace {

namespace transport = distca::transport;
using distca::Delivery;
using distca::HeadParts;
using distca::RowPlace;
using transport::Cargo;
using transport::Inputs;
using transport::Routes;
using transport::Visiting;
using Bytes = std::vector<uint8_t>;
using Tensors = std::vector<at::Tensor>;

int64_t rounds_begun = 0;

class MailboxTransport;

class MailboxTrip : public transport::RoundTrip {
 public:
  MailboxTrip(MailboxTransport& mailbox, const Routes& routes, Cargo cargo);

  void dispatch() override;
  Visiting arrive() override;
  void combine() override;
  void collect() override;
  void deliver() override {
    dispatch();
    arrive();
  }

 private:
  MailboxTransport& mailbox_;
  const Routes& routes_;
  Cargo cargo_;
  Visiting visiting_;
};

class MailboxTransport : public transport::Transport {
 public:
  explicit MailboxTransport(const transport::Opening& opening)
      : store_(opening.group->getStore()),
        name_(opening.failures->group()),
        rank_(opening.failures->rank()) {}

  std::unique_ptr<transport::RoundTrip> begin(const Routes& routes, Cargo cargo, const HeadParts&,
                                              const transport::Where&) override {
    ++num_rounds_;
    ++rounds_begun;
    return std::make_unique<MailboxTrip>(*this, routes, std::move(cargo));
  }

  int64_t rank() const { return rank_; }
  void send(const char* phase, int64_t peer, const Bytes& bytes) {
    store_->set(key(phase, rank_, peer), bytes);
  }
  Bytes receive(const char* phase, int64_t peer) { return store_->get(key(phase, peer, rank_)); }

 private:
  std::string key(const char* phase, int64_t from, int64_t to) const {
    return name_ + "/" + phase + "/" + std::to_string(num_rounds_) + "/" + std::to_string(from) +
           "/" + std::to_string(to);
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::string name_;
  int64_t rank_;
  int64_t num_rounds_ = 0;
};

at::Tensor rows_of(const at::Tensor& tensor, int64_t first, int64_t num_rows) {
  return tensor.narrow(0, first, num_rows);
}

void pack(const Tensors& tensors, const std::vector<RowPlace>& places, int64_t RowPlace::*first,
          Bytes& bytes) {
  for (const at::Tensor& tensor : tensors) {
    for (const RowPlace& place : places) {
      const at::Tensor rows = rows_of(tensor, place.*first, place.num_rows).contiguous();
      const auto* data = static_cast<const uint8_t*>(rows.const_data_ptr());
      bytes.insert(bytes.end(), data, data + rows.nbytes());
    }
  }
}

struct Message {
  Bytes bytes;
  size_t position = 0;
};

// Calls take(rows of the tensor, rows of the message) for each run of rows.
template <typename Take>
void unpack(const Tensors& tensors, const std::vector<RowPlace>& places, int64_t RowPlace::*first,
            Message& message, Take&& take) {
  for (const at::Tensor& tensor : tensors) {
    for (const RowPlace& place : places) {
      const at::Tensor to = rows_of(tensor, place.*first, place.num_rows);
      const at::Tensor from = at::empty(to.sizes(), to.options());
      std::memcpy(from.mutable_data_ptr(), message.bytes.data() + message.position, from.nbytes());
      message.position += from.nbytes();
      take(to, from);
    }
  }
}

void overwrite(const at::Tensor& to, const at::Tensor& from) {
  to.copy_(from);
}
void add(const at::Tensor& to, const at::Tensor& from) {
  to.add_(from);
}

Tensors rows_like(const Tensors& tensors, int64_t num_rows) {
  Tensors rows;
  for (const at::Tensor& tensor : tensors) {
    std::vector<int64_t> sizes = tensor.sizes().vec();
    sizes[0] = num_rows;
    rows.push_back(at::empty(sizes, tensor.options()));
  }
  return rows;
}

MailboxTrip::MailboxTrip(MailboxTransport& mailbox, const Routes& routes, Cargo cargo)
    : mailbox_(mailbox), routes_(routes), cargo_(std::move(cargo)) {
  int64_t num_queries = 0, num_keys = 0;
  for (const Delivery* delivery : visitors(routes_.movement, mailbox_.rank())) {
    for (const RowPlace& place : delivery->queries) num_queries += place.num_rows;
    for (const RowPlace& place : delivery->keys) num_keys += place.num_rows;
  }
  const auto& [q, k, v] = cargo_.inputs;
  const Tensors keys = rows_like({k, v}, num_keys);
  visiting_ = {{rows_like({q}, num_queries)[0], keys[0], keys[1]},
               rows_like(cargo_.with_queries, num_queries),
               rows_like(cargo_.query_results, num_queries),
               rows_like(cargo_.key_results, num_keys)};
}

void MailboxTrip::dispatch() {
  const auto& [q, k, v] = cargo_.inputs;
  std::map<int64_t, Bytes> by_server;
  for (const Delivery& delivery : routes_.movement.sent) {
    Bytes& bytes = by_server[delivery.peer];
    pack(cargo_.with_queries, delivery.queries, &RowPlace::home_row, bytes);
    if (cargo_.kept != nullptr && delivery.is_kept) continue;
    pack({q}, delivery.queries, &RowPlace::home_row, bytes);
    pack({k, v}, delivery.keys, &RowPlace::home_row, bytes);
  }
  for (const auto& [server, bytes] : by_server) mailbox_.send("rows", server, bytes);
}

Visiting MailboxTrip::arrive() {
  const auto& [q, k, v] = visiting_.inputs;
  std::map<int64_t, Message> by_home;
  for (const Delivery* delivery : visitors(routes_.movement, mailbox_.rank())) {
    Message& message = by_home[delivery->peer];
    if (message.bytes.empty()) message.bytes = mailbox_.receive("rows", delivery->peer);
    unpack(visiting_.with_queries, delivery->queries, &RowPlace::visiting_row, message, overwrite);
    if (cargo_.kept != nullptr && delivery->is_kept) continue;
    unpack({q}, delivery->queries, &RowPlace::visiting_row, message, overwrite);
    unpack({k, v}, delivery->keys, &RowPlace::visiting_row, message, overwrite);
  }
  if (cargo_.kept != nullptr) restore(routes_, *cargo_.kept, visiting_.inputs);
  return visiting_;
}

void MailboxTrip::combine() {
  std::map<int64_t, Bytes> by_home;
  for (const Delivery* delivery : visitors(routes_.movement, mailbox_.rank())) {
    Bytes& bytes = by_home[delivery->peer];
    pack(visiting_.query_results, delivery->queries, &RowPlace::visiting_row, bytes);
    pack(visiting_.key_results, delivery->keys, &RowPlace::visiting_row, bytes);
  }
  for (const auto& [home, bytes] : by_home) mailbox_.send("results", home, bytes);
}

void MailboxTrip::collect() {
  std::map<int64_t, Message> by_server;
  for (const Delivery& delivery : routes_.movement.sent) {
    Message& message = by_server[delivery.peer];
    if (message.bytes.empty()) message.bytes = mailbox_.receive("results", delivery.peer);
    unpack(cargo_.query_results, delivery.queries, &RowPlace::home_row, message, overwrite);
    unpack(cargo_.key_results, delivery.keys, &RowPlace::home_row, message, add);
  }
}

int64_t num_rounds() {
  return rounds_begun;
}

void add_mailbox() {
  transport::add_transport("mailbox", [](const transport::Opening& opening) {
    return std::unique_ptr<transport::Transport>(new MailboxTransport(opening));
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(distca_tests, m) {
  m.def("add_mailbox() -> ()", add_mailbox);
  m.def("mailbox_rounds() -> int", num_rounds);
}
