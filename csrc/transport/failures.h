#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "where.h"

namespace distca::transport {

inline constexpr const char* kSameCalls =
    ". All ranks of a group must make the same attention calls and plans in the same order";

// Returns "rank 2 waits in a, while ranks 0 1 wait in b", with `one` and `many` for the verbs.
// Places of few ranks come first.
using RanksByPlace = std::vector<std::pair<std::string, std::vector<int64_t>>>;
std::string describe_places(RanksByPlace places, const char* one, const char* many);

// Some ranks of a group are short of memory. All of its ranks throw this at the same point, so that
// no rank is left waiting, and the group can go on.
class GroupOutOfMemory : public c10::OutOfMemoryError {
  using c10::OutOfMemoryError::OutOfMemoryError;
};

// Returns an exception's message without the stack trace of torch or Python.
std::string message_of(const std::exception& error);

// Lets the ranks of a group tell each other, through the group's store, when something breaks. No
// call waits longer than a few seconds for a rank that is gone. A group with a reported failure
// cannot be used again: its ranks may be anywhere in the step.
class FailureBoard : public std::enable_shared_from_this<FailureBoard> {
 public:
  // `group` is the name of the process group. The board has its own store client, so that calls
  // which wait in the store elsewhere in the process do not delay it.
  FailureBoard(const c10::intrusive_ptr<c10d::Store>& store, std::string group, int64_t rank,
               int64_t num_ranks);

  const std::string& group() const { return group_; }
  int64_t rank() const { return rank_; }

  // Describes this rank's process and configuration, for introduce() on every rank.
  std::string introduction(const std::string& configuration) const;

  // Takes every rank's introduction, by rank. Throws ValueError unless all have the same
  // configuration.
  void introduce(const std::vector<std::string>& introductions);

  // Publishes this rank's error; only the first is kept, and none after diagnose().
  void announce(const std::string& message) noexcept;

  // Whether any rank has announced an error or noticed a lost peer.
  bool alarmed() noexcept;

  // Whether the process of a rank on this host is gone.
  bool has_dead_peer() const noexcept;

  // Publishes a sentence about several ranks, which all ranks then quote; only the first is kept.
  void announce_mismatch(const std::string& sentence) noexcept;

  // Count the exchanges that this rank begins and completes in a channel: kLayers, kAgreements,
  // kPlans or kNotices. `begin` returns the wait for an exchange; `activity` says in words what all
  // ranks do at this point.
  Wait begin(const std::string& channel, const Where& where, const std::string& activity);
  void complete(const std::string& channel);

  // Tells all groups of this process that it has waited long in an exchange of this group. Returns
  // a sentence if this rank and another of the group wait for each other, in whatever groups, so
  // that neither can go on; else an empty string.
  std::string find_deadlock(const Wait& wait) noexcept;

  // Publishes that this rank has left, and `how`: a sentence without its subject.
  void leave(const std::string& how) noexcept;

  // Names the ranks that left before they completed exchange `position` of the channel (nullopt:
  // the first that this rank has not completed), in a sentence that is empty if there are none.
  // Leaves out ranks that left because of an error on any rank.
  std::string find_departed(const std::string& channel,
                            std::optional<int64_t> position = std::nullopt) noexcept;

  // Notes that an exchange was given up. It may stay under way until the process group's timeout.
  void abandon() noexcept { has_abandoned_ = true; }

  // Returns whether exchanges of this rank may still be under way that nobody waits for.
  bool may_be_busy() const noexcept { return has_abandoned_ || reported_; }

  // Finds the cause after communication failed here, at `where`. Waits shortly until the other
  // ranks have reported, have noticed a failure too, or are seen to be gone, and then until those
  // that noticed it have found its cause. Returns a sentence that names the ranks at fault, first
  // error first, or says where each rank gave up.
  std::string diagnose(const std::string& own_error, const std::string& where) noexcept;

  // The same after an exchange of `channel` failed, which ranks may have left. Returns the sentence
  // of find_departed() if there are such ranks.
  std::string diagnose(const std::string& channel, const std::string& own_error,
                       const std::string& where) noexcept;

 private:
  enum class Blame { kNone, kPossible, kCertain };
  // What is known about another rank.
  struct Finding {
    Blame blame;
    bool has_answered;
    int64_t order;  // of announced errors; silent ranks come after all of them
    std::string text;
  };

  template <typename F>
  void with_store(F&& use) noexcept;
  void publish(const char* kind, const std::string& text, const char* flag = nullptr) noexcept;
  std::optional<std::string> published(const std::string& key) noexcept;
  Progress progress(const Wait& wait) const;
  Channel& channel(const std::string& name);
  Finding examine(int64_t rank) noexcept;
  std::string find_cause(const std::string& own_error) noexcept;
  bool still_reads(int64_t rank) noexcept;

  c10::intrusive_ptr<c10d::Store> store_;
  std::string group_;
  int64_t rank_;
  int64_t num_ranks_;
  std::map<int64_t, int64_t> pids_;  // of the other ranks that are seen in /proc here
  std::atomic<bool> reported_ = false;
  std::atomic<bool> store_is_lost_ = false;
  std::atomic<bool> has_abandoned_ = false;
  mutable std::mutex mutex_;
  std::vector<Channel> channels_{{kLayers}, {kAgreements}, {kPlans}, {kNotices}};
};

}  // namespace distca::transport
