#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace distca::transport {

// Where in a step a rank communicates, for the error that names it.
struct Where {
  const char* phase;  // "plan", "agreement", "dispatch", "combine", ...
  const char* pass;   // "forward", "backward"; "" outside the layers
  int64_t layer;      // attention calls of this pass under the current plan, from 0; -1 outside
  int64_t step;       // plans this group has used before; -1 before the first

  Where in(const char* another_phase) const { return {another_phase, pass, layer, step}; }
};

std::string describe(const Where& where);

// Memory is short on some ranks of a group, and all of its ranks throw this at the same point:
// nobody is left waiting, and the group goes on.
class GroupOutOfMemory : public c10::OutOfMemoryError {
  using c10::OutOfMemoryError::OutOfMemoryError;
};

// What an exception says, without the stack that torch's errors and Python's carry.
std::string message_of(const std::exception& error);

// What the ranks of a group tell each other, through the group's store, when something breaks.
// Nothing here waits for a rank that is gone for longer than a few seconds. A group on whose board
// a failure stands is lost: its ranks may be anywhere in the step.
class FailureBoard {
 public:
  FailureBoard(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t num_ranks);

  // This rank's process and configuration, for introduce() on every rank.
  std::string introduction(const std::string& configuration) const;

  // Takes every rank's introduction, by rank. Throws ValueError unless all have the same
  // configuration.
  void introduce(const std::vector<std::string>& introductions);

  // Publishes this rank's error; only the first is kept, and none after diagnose(). Never throws.
  void announce(const std::string& message) noexcept;

  // Whether any rank has announced an error or noticed a lost peer.
  bool alarmed() noexcept;

  // Whether the process of a rank on this host is gone.
  bool has_dead_peer() const noexcept;

  // A rank that waits for long says in what, after how many exchanges of a channel.
  struct Waiting {
    std::string channel;
    int64_t num_completed;
    std::string activity;
  };

  // Returns a sentence when another rank waits in something else at the same point of the channel:
  // neither can go on. Empty while there is hope.
  std::string find_deadlock(const Waiting& waiting) noexcept;

  // This rank has completed so many exchanges of a channel.
  void complete(const std::string& channel, int64_t num_completed);

  // Publishes that this rank takes part in nothing more, and `how` it left: a sentence without its
  // subject. Never throws.
  void leave(const std::string& how) noexcept;

  // Returns a sentence that names ranks which left before they completed exchange `idx` of the
  // channel; empty while all may still come. Ranks that announced an error are not among them.
  std::string find_departed(const std::string& channel, int64_t idx) noexcept;

  // An exchange was given up; it may be under way for as long as the process group's timeout.
  void abandon() noexcept { has_abandoned_ = true; }

  // Whether exchanges of this rank may still be under way although nobody waits for them.
  bool may_be_busy() const noexcept { return has_abandoned_ || reported_; }

  // After communication failed here: waits shortly until the others have reported, noticed it too
  // or are seen to be gone, and returns a sentence that names the ranks at fault, first error
  // first.
  std::string diagnose(const std::string& own_error) noexcept;

 private:
  struct Process {
    std::string space;  // within which process ids mean something
    int64_t pid = 0;
  };
  enum class Verdict { kUnknown, kInnocent, kAtFault, kLeft };
  struct Finding {
    Verdict verdict = Verdict::kUnknown;
    int64_t order = 0;  // of announced errors; silent ranks come after all of them
    std::string text;
  };

  std::string key(const std::string& kind, int64_t rank) const;
  template <typename F>
  bool with_store(F&& use) noexcept;
  bool sees(const Process& process) const;
  bool posted(const std::string& kind, int64_t rank, std::string& value) noexcept;
  Finding examine(int64_t rank) noexcept;
  std::vector<Finding> examine_all() noexcept;

  c10::intrusive_ptr<c10d::Store> store_;
  int64_t rank_;
  int64_t num_ranks_;
  Process self_;
  std::vector<Process> processes_;  // [num_ranks_], empty before introduce()
  std::atomic<bool> reported_ = false;
  std::atomic<bool> store_is_lost_ = false;
  std::atomic<bool> has_abandoned_ = false;
  std::mutex mutex_;
  std::map<std::string, int64_t> completed_;  // exchanges, by channel
};

}  // namespace distca::transport
