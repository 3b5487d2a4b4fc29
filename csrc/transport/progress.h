#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <iosfwd>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "where.h"

namespace distca::transport {

// Counts the exchanges that a rank has begun in one channel of a group. Ranks that run the same
// program begin the same exchanges in the same order.
class Channel {
 public:
  explicit Channel(std::string name) : name_(std::move(name)) {}
  Channel(const Channel& other);

  // Counts an exchange that begins. Returns its position in the channel, from 0.
  int64_t enter(const Where& where);

  // Notes that the oldest exchange under way has ended.
  void complete();
  int64_t num_completed() const;

  // Returns whether the exchange at this position has begun and is the one at `where`. Positions
  // too old to be remembered count as such.
  bool has_entered(int64_t position, const Where& where) const;

  const std::string& name() const { return name_; }

  friend std::ostream& operator<<(std::ostream& text, const Channel& channel);
  static Channel read(std::istream& text);

 private:
  static constexpr size_t kRemembered = 32;

  std::string name_;
  mutable std::mutex mutex_;
  int64_t num_entered_ = 0;
  int64_t num_completed_ = 0;
  std::deque<WhereWords> latest_;  // kRemembered at most
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

// What a waiting rank tells the other ranks of a group: the exchange in which it waits, in this
// group or another, and how far it is in each channel of this group.
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
