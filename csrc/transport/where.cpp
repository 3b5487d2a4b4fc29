#include "where.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>

namespace distca::transport {
namespace {

constexpr std::array<const char*, 4> kPasses{"", "forward", "recomputed forward", "backward"};
constexpr std::array<const char*, 10> kPhases{"an exchange",
                                              "plan",
                                              "agreement",
                                              kDispatch,
                                              kCombine,
                                              "growth of peer memory",
                                              "opening of the group",
                                              "opening of peer memory",
                                              "join",
                                              "attention"};

// Fields of a tag, from its lowest bit.
constexpr int kCallerBits = 12;
constexpr int kLayerBits = 10;
constexpr int kPassBits = 2;
constexpr int kStepBits = 8;
static_assert(kCallerBits + kLayerBits + kPassBits + kStepBits == 32);

template <size_t kNum>
int64_t index_of(const std::array<const char*, kNum>& names, const char* name) {
  const auto found = std::find_if(names.begin(), names.end(), [name](const char* other) {
    return std::strcmp(other, name) == 0;
  });
  return found == names.end() ? 0 : found - names.begin();
}

template <size_t kNum>
const char* name_at(const std::array<const char*, kNum>& names, int64_t index) {
  return names[0 <= index && index < static_cast<int64_t>(kNum) ? index : 0];
}

uint32_t low_bits(int64_t value, int num_bits) {
  return static_cast<uint32_t>(value) & ((uint32_t{1} << num_bits) - 1);
}

uint32_t take_bits(uint32_t& tag, int num_bits) {
  const uint32_t bits = low_bits(tag, num_bits);
  tag >>= num_bits;
  return bits;
}

// Returns the value nearest to `near` among those with these low bits.
int64_t nearest(uint32_t bits, int num_bits, int64_t near) {
  const int64_t period = int64_t{1} << num_bits;
  const int64_t ahead = low_bits(bits - low_bits(near, num_bits), num_bits);
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

std::string name_of_caller(int64_t caller) {
  std::lock_guard lock(callers().mutex);
  const auto found = callers().names.find(caller);
  return found == callers().names.end() ? "" : found->second;
}

}  // namespace

std::string describe(const Where& where) {
  std::ostringstream text;
  text << where.phase;
  if (where.pass[0] != '\0') {
    text << " of attention layer " << where.layer;
    const std::string caller = name_of_caller(where.caller);
    if (!caller.empty()) text << " (" << caller << ")";
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
  uint32_t tag = low_bits(where.step, kStepBits);
  tag = tag << kPassBits | low_bits(index_of(kPasses, where.pass), kPassBits);
  tag = tag << kLayerBits | low_bits(where.layer, kLayerBits);
  return tag << kCallerBits | low_bits(where.caller + 1, kCallerBits);
}

Where where_of(uint32_t tag, const Where& near) {
  const uint32_t caller = take_bits(tag, kCallerBits), layer = take_bits(tag, kLayerBits),
                 pass = take_bits(tag, kPassBits), step = take_bits(tag, kStepBits);
  return {near.phase, name_at(kPasses, pass), nearest(layer, kLayerBits, near.layer),
          nearest(step, kStepBits, near.step), static_cast<int64_t>(caller) - 1};
}

void name_caller(int64_t caller, const std::string& name) {
  std::lock_guard lock(callers().mutex);
  callers().names[caller] = name;
}

}  // namespace distca::transport
