#pragma once

#include <limits>
#include <span>
#include <unordered_map>
#include <vector>

#include "../model/loads.h"
#include "../model/options.h"
#include "../model/plan.h"
#include "../model/ranges.h"
#include "budget.h"
#include "shares.h"

namespace distca::planner {

// The home cut: every segment computed where its rows live.
struct Home {
  Home(const Pack& pack, const PlanOptions& options);

  std::span<const Share> shares_of(int64_t rank) const {
    return {shares.data() + first[rank], static_cast<size_t>(first[rank + 1] - first[rank])};
  }
  // Returns the same shares in descending order of seconds, sorted on first use.
  std::span<const Share> dearest_first(int64_t rank) const;

  std::vector<Share> shares;    // by rank, document, position
  std::vector<int64_t> first;   // [num_ranks + 1] index into shares
  std::vector<double> seconds;  // [num_ranks] at speed 1
  Traffic traffic;

 private:
  mutable std::vector<std::vector<Share>> dearest_;  // [num_ranks] empty until asked for
};

// Part of a share of the donor goes to a receiver.
struct Move {
  int64_t donor;
  int64_t receiver;
  size_t share;  // index in the donor's own shares
  Range slice;
  double relief;   // seconds off the donor
  double seconds;  // that the slice takes; more than the relief where a cut costs something
  int64_t bytes;   // into the receiver
};

// Rows of a document that lies on one rank, the donor, and that a receiver computes.
struct Given {
  int64_t document;
  int64_t donor;
  int64_t receiver;
  Range rows;
};

// Who computes what while a plan is being made, and what that costs servers and links.
class Assignment {
 public:
  // Servers and links must finish within `limit` seconds. All work is charged to the budget.
  Assignment(const Pack& pack, const PlanOptions& options, const Home& home, double limit,
             Budget& budget);

  void spend(int64_t steps) const { budget_.spend(steps); }
  bool is_budget_spent() const { return budget_.is_spent(); }

  // Seconds at speed 1 above the limit of a rank, and below it.
  double surplus(int64_t rank) const { return seconds_[rank] - limit(rank); }
  double limit(int64_t rank) const { return limit_ * options_.speed(rank); }
  double seconds(int64_t rank) const { return seconds_[rank]; }
  int64_t bytes_in(int64_t rank) const { return traffic_[rank].bytes_in; }
  // The least share of what the rank may take that is left: of its compute, ingress, memory.
  double room(int64_t rank) const;

  double seconds(int64_t document, Range rows) const {
    return options_.cost.seconds(options_.mask, rows, pack_.documents[document].length);
  }
  // The donor's home rows that it still computes, dearest first.
  std::span<const Share> own(int64_t rank);
  // Returns those of one document, in no order.
  std::span<const Share> own_of(int64_t rank, int64_t document) const;
  // Returns the index of a share that the donor still computes.
  size_t find_own(int64_t rank, const Share& share) const { return ranks_[rank].own.find(share); }

  // Rows that a receiver has of a document already.
  const RangeSet& keys_on(int64_t receiver, int64_t document);
  // Bytes into a receiver that has the keys `held`.
  int64_t bytes_of(int64_t document, Range rows, const RangeSet& held) const;
  // Bytes that the rank may still send to other nodes.
  double node_bytes_left(int64_t rank) const;
  // Whether the bytes keep links and the receiver's memory within their limits.
  bool links_fit(const Move& move) const;

  void apply(const Move& move);
  // Gives away the donor's dearest shares of at most `most` seconds whole, one by one, while their
  // sum is at most `most` and links and memory have room. Returns the sum. Once the budget is
  // spent, only a donor that serves nothing gives shares of cut documents, and it ignores links.
  double give_wholes(int64_t donor, int64_t receiver, double most);

  // Of all documents that lie on one rank, by document.
  std::vector<Given> given() const;
  Share whole(int64_t document) const;
  // Gives back to the donor what the receivers have of one document, of which it has the rest.
  void take_back(std::span<const Given> given);
  // To give rows of a document that the donor still computes.
  Move move_of(const Given& given) const;
  // Whether memory caps are kept and ranks that serve nothing compute nothing.
  bool is_valid() const;
  bool is_over_cap(int64_t rank) const {
    return static_cast<double>(traffic_[rank].held_bytes) > options_.cap_bytes(rank);
  }
  const Load& load(int64_t rank) const { return traffic_[rank]; }  // without seconds
  double total_bytes() const;
  // Of the slowest server, at its speed, and of the slowest server or link.
  double slowest_seconds() const;
  double makespan() const;
  // In plan order; adjacent ranges of a server are not joined.
  std::vector<Task> tasks() const;

 private:
  struct Rank {
    DearestFirst own;           // home rows; only once opened
    std::vector<Share> guests;  // rows of other homes, in order; they stay
    std::vector<Share> wholes;  // as guests: documents that came whole, of which no more can come
    // What is left of `own`, for documents that have given rows away.
    std::unordered_map<int64_t, std::vector<Share>> left;
    bool is_open = false;
  };

  // Which part of a document is away from home.
  enum class Away : char { kNothing, kRows, kWhole };

  void open(int64_t rank);
  bool has_lone_home(int64_t document) const { return pack_.documents[document].num_segments == 1; }
  std::vector<Share>& left_of(int64_t rank, int64_t document);
  bool is_idle(int64_t rank) const;
  double give_all_of(int64_t document, int64_t donor, int64_t receiver, double most);
  void insert_own(int64_t rank, const Share& share);
  void count(int64_t document, int64_t rank, int64_t times);
  void take(const Move& move, int64_t document);

  const Pack& pack_;
  const PlanOptions& options_;
  const Home& home_;
  const double limit_;
  std::vector<double> seconds_;  // [num_ranks] at speed 1
  Traffic traffic_;
  std::vector<Rank> ranks_;
  std::vector<Away> away_;  // [documents] kRows from the first where one crosses ranks
  Budget& budget_;
  RangeSet keys_;            // scratch of keys_on
  std::vector<Range> rows_;  // scratch of count
};

}  // namespace distca::planner
