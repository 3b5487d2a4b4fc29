#include "progress.h"

#include <algorithm>
#include <sstream>

namespace distca::transport {
namespace {

// While only a stream waits, the host may still begin the plan that another rank waits for.
constexpr double kSecondsOfStreams = 3;
constexpr const char* kPlans = "plans";

void write(std::ostream& text, const WhereWords& words) {
  for (const int64_t word : words) text << " " << word;
}

WhereWords read_words(std::istream& text) {
  WhereWords words{};
  for (int64_t& word : words) text >> word;
  return words;
}

}  // namespace

Channel::Channel(const Channel& other) : name_(other.name_) {
  std::lock_guard lock(other.mutex_);
  num_entered_ = other.num_entered_;
  latest_ = other.latest_;
}

int64_t Channel::enter(const Where& where) {
  std::lock_guard lock(mutex_);
  if (latest_.size() == kRemembered) latest_.pop_front();
  latest_.push_back(words_of(where));
  return num_entered_++;
}

void Channel::complete() {
  std::lock_guard lock(mutex_);
  ++num_completed_;
}

int64_t Channel::num_completed() const {
  std::lock_guard lock(mutex_);
  return num_completed_;
}

bool Channel::has_entered(int64_t position, const Where& where) const {
  std::lock_guard lock(mutex_);
  if (position >= num_entered_) return false;
  const auto ago = static_cast<size_t>(num_entered_ - position);
  return ago > latest_.size() || latest_[latest_.size() - ago] == words_of(where);
}

std::ostream& operator<<(std::ostream& text, const Channel& channel) {
  std::lock_guard lock(channel.mutex_);
  text << channel.name_ << " " << channel.num_entered_ << " " << channel.latest_.size();
  for (const WhereWords& words : channel.latest_) write(text, words);
  return text << "\n";
}

Channel Channel::read(std::istream& text) {
  std::string name;
  size_t num_latest = 0;
  text >> name;
  Channel channel(name);
  text >> channel.num_entered_ >> num_latest;
  for (size_t i = 0; i < std::min(num_latest, kRemembered); ++i) {
    channel.latest_.push_back(read_words(text));
  }
  return channel;
}

std::string Progress::encode() const {
  std::ostringstream text;
  text << wait.group << " " << wait.channel << " " << wait.position << " " << wait.is_stream << " "
       << wait.seconds;
  write(text, words_of(wait.where));
  text << " " << channels.size() << "\n" << wait.activity << "\n";
  for (const Channel& channel : channels) text << channel;
  return text.str();
}

Progress Progress::decode(const std::string& encoded) {
  std::istringstream text(encoded);
  Progress progress;
  Wait& wait = progress.wait;
  size_t num_channels = 0;
  text >> wait.group >> wait.channel >> wait.position >> wait.is_stream >> wait.seconds;
  wait.where = where_of(read_words(text));
  text >> num_channels >> std::ws;
  std::getline(text, wait.activity);
  for (size_t i = 0; i < num_channels && text; ++i)
    progress.channels.push_back(Channel::read(text));
  return progress;
}

const Channel* Progress::find(const std::string& channel) const {
  const auto found =
      std::find_if(channels.begin(), channels.end(),
                   [&channel](const Channel& each) { return each.name() == channel; });
  return found == channels.end() ? nullptr : &*found;
}

std::chrono::steady_clock::duration pause_after(std::chrono::steady_clock::duration waited) {
  using Duration = std::chrono::steady_clock::duration;
  return std::clamp<Duration>(waited / 4, std::chrono::seconds(1), std::chrono::seconds(8));
}

bool wait_for_each_other(const Wait& my_wait, const Channel& mine, const Wait& their_wait,
                         const Channel& theirs) {
  if (mine.has_entered(their_wait.position, their_wait.where) ||
      theirs.has_entered(my_wait.position, my_wait.where)) {
    return false;
  }
  const bool may_come = (my_wait.is_stream && their_wait.channel == kPlans) ||
                        (their_wait.is_stream && my_wait.channel == kPlans);
  return !may_come || std::min(my_wait.seconds, their_wait.seconds) > kSecondsOfStreams;
}

}  // namespace distca::transport
