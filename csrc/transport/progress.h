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

// The exchanges that a rank has begun in one channel of a group: as many, in the same order, on
// every rank whose program is the same.
class Channel {
 public:
  explicit Channel(std::string name) : name_(std::move(name)) {}
  Channel(const Channel& other);

  // Counts an exchange that begins; returns its position in the channel, from 0.
  int64_t enter(const Where& where);

  // The exchange that began first of those under way has ended.
  void complete();
  int64_t num_completed() const;

  // Whether the exchange at this position has begun, and is that one. Taken for granted where it is
  // too long ago to be remembered.
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

// An exchange that a rank has waited in for long.
struct Wait {
  std::string group;  // name of the process group
  std::string channel;
  int64_t position = 0;
  Where where{"", "", -1, -1};
  std::string activity;    // what all ranks do at this point, in words
  bool is_stream = false;  // a device waits, and the host may go on
  double seconds = 0;

  bool operator==(const Wait& other) const {
    return group == other.group && channel == other.channel && position == other.position &&
           words_of(where) == words_of(other.where);
  }
};

// What a rank that waits tells the others of a group: in what, in this group or another, and how
// far it is in each channel of this one.
struct Progress {
  Wait wait;
  std::vector<Channel> channels;

  std::string encode() const;
  static Progress decode(const std::string& text);
  const Channel* find(const std::string& channel) const;
};

// How long a rank that has waited for so long goes on before it asks again what the others wait in.
std::chrono::steady_clock::duration pause_after(std::chrono::steady_clock::duration waited);

// Whether two ranks wait for each other. Each is in an exchange that the other has not begun, and
// neither begins another before its own ends. `mine` and `theirs` are how far the two are in the
// channel that the other waits in.
bool wait_for_each_other(const Wait& my_wait, const Channel& mine, const Wait& their_wait,
                         const Channel& theirs);

}  // namespace distca::transport
