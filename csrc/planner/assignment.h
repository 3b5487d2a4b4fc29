#pragma once

#include <set>
#include <utility>
#include <vector>

#include "plan.h"
#include "ranges.h"
#include "scheduler.h"

namespace distca::planner {

// Query rows of one document on one server.
struct Item {
  int64_t document;
  Range rows;
  double seconds;
};

struct Server {
  double seconds = 0;
  int64_t bytes_in = 0;
  int64_t bytes_out = 0;
  std::vector<Item> own;     // home rows, which may move on; dearest first on a donor
  std::vector<Item> guests;  // rows of other homes; they stay
};

// Keys of one document that a server has, at home or fetched.
struct Holder {
  int64_t server;
  RangeSet keys;
};

// The head or the tail of one of the donor's own items goes to a receiver.
struct Move {
  int64_t donor;
  int64_t receiver;
  size_t item;  // index in the donor's own items
  Range slice;
  Range rest;     // stays with the donor
  double relief;  // seconds off the donor
  int64_t bytes;  // into the receiver
};

// Who computes what while a plan is being made, and what that costs servers and links.
class Assignment {
 public:
  Assignment(const Pack& pack, const PlanOptions& options, const Limits& limits,
             const std::vector<Task>& home, const std::vector<Load>& home_loads);

  const Server& server(int64_t rank) const { return servers_[rank]; }
  // Servers that have keys of a document, by rank; empty while its only home is the only one.
  const std::vector<Holder>& holders(int64_t document) const { return holders_[document]; }
  // (-seconds, rank) of servers above the limit, and (-room, rank) of those with room.
  const std::set<std::pair<double, int64_t>>& donors() const { return donors_; }
  const std::set<std::pair<double, int64_t>>& receivers() const { return receivers_; }

  double seconds(int64_t document, Range rows) const;
  double surplus(int64_t rank) const { return servers_[rank].seconds - limits_.seconds; }
  double room(int64_t rank) const;

  // Bytes into a receiver that is not home to these query rows.
  int64_t bytes_of(int64_t document, Range rows, int64_t receiver) const;
  // Whether the slice keeps the receiver, its link and the donor's link within the limits.
  bool fits(const Item& item, Range slice, int64_t donor, int64_t receiver) const;
  // Whether the links of all homes of the slice's keys stay within the limits.
  bool key_homes_fit(const Move& move);

  void apply(const Move& move);
  void retire(int64_t donor) { donors_.erase({-servers_[donor].seconds, donor}); }
  std::vector<Task> tasks() const;  // in plan order

 private:
  const Holder* find_holder(int64_t document, int64_t rank) const;
  void hold(int64_t document, int64_t rank, Range keys);
  void collect_key_bytes(const Move& move);
  void take(const Move& move, int64_t document);
  void list(int64_t rank);
  void unlist(int64_t rank);

  const Pack& pack_;
  const PlanOptions& options_;
  const Limits limits_;
  const double link_bytes_;  // in, and out, within limits_.link_seconds
  std::vector<Server> servers_;
  std::vector<std::vector<Holder>> holders_;  // [documents]
  std::vector<int64_t> key_bytes_;            // [num_ranks] zero between calls
  std::set<std::pair<double, int64_t>> donors_;
  std::set<std::pair<double, int64_t>> receivers_;
};

}  // namespace distca::planner
