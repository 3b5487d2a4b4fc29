#pragma once

#include <deque>
#include <span>
#include <unordered_map>
#include <vector>

#include "problem.h"

namespace distca::planner {

// Counts the work that the search may still do, in steps. Handling an item or a segment, or
// estimating seconds, takes about one step. The search counts work instead of time, so that equal
// inputs stop at the same place on every rank.
struct Budget {
  int64_t left;

  bool is_spent() const { return left <= 0; }
};

// Moves part of one of the donor's items to a receiver.
struct Move {
  int64_t donor;
  int64_t receiver;
  Item item;  // one of the donor's own
  Range slice;
  double relief;   // seconds off the donor
  double seconds;  // of the slice; above the relief if the split costs extra tiles
  int64_t bytes;   // into the receiver
};

// Tracks who computes what during the search, and the load of servers and links.
class Assignment {
 public:
  // Servers and links must finish within `limit` seconds. All work is charged to the budget.
  Assignment(const Problem& problem, double limit, Budget& budget);

  const Problem& problem() const { return problem_; }
  void spend(int64_t steps) const { budget_.left -= steps; }
  bool is_budget_spent() const { return budget_.is_spent(); }

  // Returns the seconds at speed 1 above the rank's limit; negative below it.
  double surplus(int64_t rank) const { return seconds_[rank] - limit(rank); }
  double limit(int64_t rank) const { return problem_.most_seconds(rank, limit_); }
  double seconds(int64_t rank) const { return seconds_[rank]; }
  // Returns the seconds that the rank can still receive. The scarcest of compute, transfers and
  // memory decides.
  double capacity(int64_t rank) const;

  // Returns the home rows that a rank still computes, the largest item first.
  const std::deque<Item>& own(int64_t rank);
  // Returns those of one document, in any order.
  std::span<const Item> own_of(int64_t rank, int64_t document) const;
  // Returns the rows of the document that the receiver already has.
  const RangeSet& keys_on(int64_t receiver, int64_t document);
  // Returns the bytes into a receiver that already has `keys`.
  int64_t bytes_of(int64_t document, Range rows, const RangeSet& keys = {}) const;
  // Returns the bytes that the rank may still send to other nodes.
  double node_bytes_left(int64_t rank) const;

  // Returns the move of a slice of the donor's item to a receiver that already has `keys`.
  Move move_of(int64_t donor, const Item& item, Range slice, int64_t receiver,
               const RangeSet& keys = {}) const;
  // Returns whether the links and the receiver's memory stay within their limits.
  bool links_fit(const Move& move) const;
  void apply(const Move& move);
  // Moves the donor's largest items of at most `max_seconds` whole, one by one, while their sum is
  // at most `max_seconds` and links and memory have capacity. Returns the sum. Once the budget is
  // spent, only a donor of speed 0 moves items of cut documents, and it ignores links.
  double give_whole_documents(int64_t donor, int64_t receiver, double max_seconds);

  // The tasks of documents with one home rank on other servers, by document and position. To cut
  // such a document anew, take back all of its tasks and move new ones.
  std::vector<Task> tasks_away() const;
  int64_t home_of(int64_t document) const {
    return problem_.pack.segments_of(problem_.document(document))[0].rank;
  }
  Item whole(int64_t document) const;
  void take_back(std::span<const Task> tasks);
  // Returns the move that makes a task of rows that their home still computes.
  Move move_of(const Task& task) const;

  // Returns whether no memory cap is exceeded and ranks of speed 0 compute nothing.
  bool is_valid() const;
  bool is_over_cap(int64_t rank) const {
    return static_cast<double>(load(rank).held_bytes) > problem_.options.cap_bytes(rank);
  }
  const Load& load(int64_t rank) const { return traffic_[rank]; }  // without seconds
  std::vector<Load> loads() const { return traffic_.loads(seconds_, visiting_); }  // [num_ranks]
  std::vector<Task> tasks() const;                                                 // in plan order

 private:
  using ItemsByDocument = std::unordered_map<int64_t, std::vector<Item>>;

  struct Rank {
    std::deque<Item> own;  // home rows, the largest first; only once opened
    bool is_open = false;
    ItemsByDocument rest;      // the part of `own` of every document that has rows elsewhere
    ItemsByDocument received;  // rows of other homes
  };

  bool has_lone_home(int64_t document) const {
    return problem_.document(document).num_segments == 1;
  }
  std::span<const Item> received_of(int64_t rank, int64_t document) const;
  std::vector<Item>& rest_of(int64_t rank, int64_t document);
  size_t find_own(int64_t rank, const Item& item) const;
  void insert_own(int64_t rank, const Item& item);
  void erase_own(int64_t rank, const Item& item);
  void erase_own(int64_t rank, size_t first, size_t last);
  void receive(int64_t rank, Item item);
  void add_seconds(int64_t rank, const Item& item, int times);
  void settle(int64_t rank);
  double time_left(int64_t rank) const { return limit_ - problem_.options.lag_seconds(rank); }
  double link_seconds_left(int64_t rank, double link_seconds) const;
  void count(int64_t document, int64_t rank, int64_t times);
  double give_all_of(int64_t document, int64_t donor, int64_t receiver, double max_seconds);

  const Problem& problem_;
  const double limit_;
  std::vector<double> seconds_;   // [num_ranks] at speed 1
  std::vector<double> visiting_;  // [num_ranks] part of them that needs rows of other homes
  Traffic traffic_;
  std::vector<Rank> ranks_;
  std::vector<char> is_shared_;  // [documents] rows have left home, or there are several homes
  Budget& budget_;
  RangeSet keys_;            // scratch of keys_on
  std::vector<Range> rows_;  // scratch of count
};

}  // namespace distca::planner
