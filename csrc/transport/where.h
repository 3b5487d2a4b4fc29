#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

namespace distca::transport {

// Phases of a call that moves rows.
inline constexpr const char* kDispatch = "dispatch";
inline constexpr const char* kCombine = "combine";
// Phase of a server that waits for a call.
inline constexpr const char* kNotice = "the wait for the next call";

// The place in a step where a rank communicates. Ranks compare it, so that rows of one call never
// serve another, and errors name it.
struct Where {
  const char* phase;    // "plan", "agreement", "dispatch", "combine", ...
  const char* pass;     // "forward", "recomputed forward", "backward"; "" outside the layers
  int64_t layer;        // number of the call in this pass and plan, from 0; -1 outside the layers
  int64_t step;         // number of plans this group used before this one; -1 before the first
  int64_t caller = -1;  // number of the calling module, see name_caller; -1: unknown

  Where in(const char* another_phase) const { return {another_phase, pass, layer, step, caller}; }
  // Returns whether to time the call. Only one call in four is timed, because events delay the
  // computing stream by a microsecond. Over the steps, every layer is timed in both passes.
  bool is_sampled() const { return (step + layer) % 4 == 0; }
  // Returns whether this is the backward pass of the first layer, with which a batch ends.
  bool is_last() const { return layer == 0 && is_backward(); }
  bool is_backward() const { return std::string_view(pass) == "backward"; }
};

std::string describe(const Where& where);

// Converts a place to numbers, which mean the same on all ranks, and back.
constexpr size_t kWhereWords = 5;
using WhereWords = std::array<int64_t, kWhereWords>;
WhereWords words_of(const Where& where);
Where where_of(const WhereWords& words);

// Returns the call in 32 bits, for kernels to compare: step, pass, layer and caller, without the
// phase. Tags repeat after 256 steps, 1024 layers or 4095 callers. Calls that ranks can confuse are
// closer together.
uint32_t tag_of(const Where& where);

// Returns the call with this tag that is nearest to `near`.
Where where_of(uint32_t tag, const Where& near);

// Sets a caller's name for errors. Callers have the same numbers on all ranks.
void name_caller(int64_t caller, const std::string& name);

// Channels of a group: calls of attention, agreements on them, plans, and notices to servers.
inline constexpr const char* kLayers = "layers";
inline constexpr const char* kAgreements = "agreements";
inline constexpr const char* kPlans = "plans";
inline constexpr const char* kNotices = "notices";

// Counts the exchanges that a rank has begun in one channel of a group. Ranks that run the same
// program begin the same exchanges in the same order.
struct Channel {
  std::string name;
  int64_t num_entered = 0;
  int64_t num_completed = 0;
  std::deque<WhereWords> latest{};  // kRemembered at most

  static constexpr size_t kRemembered = 32;

  // Counts an exchange that begins. Returns its position in the channel, from 0.
  int64_t enter(const Where& where);

  // Returns whether the exchange at this position has begun and is the one at `where`. Positions
  // too old to be remembered count as such.
  bool has_entered(int64_t position, const Where& where) const;
};

// An exchange in which a rank waits.
struct Wait {
  std::string group;  // name of the process group
  std::string channel;
  int64_t position = 0;
  Where where{"", "", -1, -1};
  std::string activity;    // what all ranks do at this point, in words
  bool is_stream = false;  // a device waits; the host may go on
  double seconds = 0;

  bool operator==(const Wait& other) const {
    return group == other.group && channel == other.channel && position == other.position &&
           words_of(where) == words_of(other.where);
  }
};

// What a rank tells the other ranks of a group: the exchange in which it waits, in this group or
// another, and how far it is in each channel of this group.
struct Progress {
  Wait wait;
  std::vector<Channel> channels;

  std::string encode() const;
  static Progress decode(const std::string& text);
  const Channel* find(const std::string& channel) const;
};

// Returns how long a rank that has waited for `waited` pauses before it asks where the others wait.
std::chrono::steady_clock::duration pause_after(std::chrono::steady_clock::duration waited);

// Returns whether two ranks wait for each other: each is in an exchange that the other has not
// begun, and begins no other before its own ends. `mine` is this rank's copy of the channel that
// the other rank waits in; `theirs` is the other rank's copy of the channel that this one waits in.
bool wait_for_each_other(const Wait& my_wait, const Channel& mine, const Wait& their_wait,
                         const Channel& theirs);

}  // namespace distca::transport
