#include "where.h"

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <span>
#include <sstream>
#include <string_view>

namespace distca::transport {
namespace {

using Names = std::span<const char* const>;
constexpr std::array kPasses{"", "forward", "recomputed forward", "backward"};
constexpr std::array kPhases{"an exchange",
                             "plan",
                             "agreement",
                             kDispatch,
                             kCombine,
                             "growth of peer memory",
                             "opening of the group",
                             "opening of peer memory",
                             "join",
                             "attention",
                             "agreement on a plan",
                             kNotice};

int64_t index_of(Names names, std::string_view name) {
  const auto match = std::find(names.begin(), names.end(), name);
  return match == names.end() ? 0 : match - names.begin();
}

const char* name_at(Names names, int64_t index) {
  return names[0 <= index && index < std::ssize(names) ? index : 0];
}

// Fields of a tag, from its lowest bit.
struct Tag {
  static constexpr int kCallerBits = 12, kLayerBits = 10, kPassBits = 2, kStepBits = 8;
  uint32_t caller : kCallerBits, layer : kLayerBits, pass : kPassBits, step : kStepBits;
};

// Returns the value nearest to `near` among those with these low bits.
int64_t nearest(uint32_t bits, int num_bits, int64_t near) {
  const int64_t period = int64_t{1} << num_bits;
  const int64_t ahead = (bits - near) & (period - 1);
  return near + (ahead < period / 2 ? ahead : ahead - period);
}

struct Callers {
  std::mutex mutex;
  std::map<int64_t, std::string> names;
};

Callers& callers() {
  static Callers* instance = new Callers;  // threads may describe calls while the process ends
  return *instance;
}

// While only a stream waits, the host may still begin the plan that another rank waits for.
constexpr double kSecondsOfStreams = 3;

std::ostream& operator<<(std::ostream& text, const WhereWords& words) {
  for (const int64_t word : words) text << " " << word;
  return text;
}

std::istream& operator>>(std::istream& text, WhereWords& words) {
  for (int64_t& word : words) text >> word;
  return text;
}

}  // namespace

std::string describe(const Where& where) {
  std::ostringstream text;
  text << where.phase;
  if (where.pass[0] != '\0') {
    text << " of attention layer " << where.layer;
    std::lock_guard lock(callers().mutex);
    const auto caller = callers().names.find(where.caller);
    const bool has_name = caller != callers().names.end() && !caller->second.empty();
    if (has_name) text << " (" << caller->second << ")";
    if (!has_name && where.caller >= 0) text << " (module " << where.caller << ")";
    text << ", " << where.pass << " pass";
  }
  if (where.step >= 0) text << ", step " << where.step;
  return text.str();
}

WhereWords words_of(const Where& where) {
  return {index_of(kPhases, where.phase), index_of(kPasses, where.pass), where.layer, where.step,
          where.caller};
}

Where where_of(const WhereWords& words) {
  return {name_at(kPhases, words[0]), name_at(kPasses, words[1]), words[2], words[3], words[4]};
}

uint32_t tag_of(const Where& where) {
  Tag tag;
  tag.caller = where.caller + 1;
  tag.layer = where.layer;
  tag.pass = index_of(kPasses, where.pass);
  tag.step = where.step;
  return std::bit_cast<uint32_t>(tag);
}

Where where_of(uint32_t tag, const Where& near) {
  const auto [caller, layer, pass, step] = std::bit_cast<Tag>(tag);
  return {near.phase, name_at(kPasses, pass), nearest(layer, Tag::kLayerBits, near.layer),
          nearest(step, Tag::kStepBits, near.step), static_cast<int64_t>(caller) - 1};
}

void name_caller(int64_t caller, const std::string& name) {
  std::lock_guard lock(callers().mutex);
  callers().names[caller] = name;
}

int64_t Channel::enter(const Where& where) {
  if (latest.size() == kRemembered) latest.pop_front();
  latest.push_back(words_of(where));
  return num_entered++;
}

bool Channel::has_entered(int64_t position, const Where& where) const {
  if (position >= num_entered) return false;
  const auto ago = static_cast<size_t>(num_entered - position);
  return ago > latest.size() || latest[latest.size() - ago] == words_of(where);
}

std::string Progress::encode() const {
  std::ostringstream text;
  text << wait.group << " " << wait.channel << " " << wait.position << " " << wait.is_stream << " "
       << wait.seconds << words_of(wait.where) << " " << channels.size() << "\n"
       << wait.activity << "\n";
  for (const Channel& channel : channels) {
    text << channel.name << " " << channel.num_entered << " " << channel.num_completed << " "
         << channel.latest.size();
    for (const WhereWords& words : channel.latest) text << words;
    text << "\n";
  }
  return text.str();
}

Progress Progress::decode(const std::string& encoded) {
  std::istringstream text(encoded);
  Progress progress;
  Wait& wait = progress.wait;
  WhereWords where{};
  size_t num_channels = 0;
  text >> wait.group >> wait.channel >> wait.position >> wait.is_stream >> wait.seconds >> where >>
      num_channels >> std::ws;
  wait.where = where_of(where);
  std::getline(text, wait.activity);
  for (size_t i = 0; i < num_channels && text; ++i) {
    Channel& channel = progress.channels.emplace_back();
    size_t num_latest = 0;
    text >> channel.name >> channel.num_entered >> channel.num_completed >> num_latest;
    channel.latest.resize(std::min(num_latest, Channel::kRemembered));
    for (WhereWords& words : channel.latest) text >> words;
  }
  return progress;
}

const Channel* Progress::find(const std::string& channel) const {
  const auto match = std::ranges::find(channels, channel, &Channel::name);
  return match == channels.end() ? nullptr : &*match;
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
