#include "failures.h"

#include <c10/util/Synchronized.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

namespace distca::transport {
namespace {

// How long diagnose() waits for ranks that are silent or busy, even if it already knows the rank at
// fault, and again for those that have yet to find the cause. The calling rank may host the store,
// and others can read nothing once that rank has ended.
constexpr std::chrono::milliseconds kPatience{3000};
constexpr std::chrono::milliseconds kPoll{20};
constexpr std::chrono::milliseconds kOthersCome{1000};  // until all have published their waits
constexpr const char* kUnknown = "unknown";
constexpr const char* kAlarm = "distca/alarm";
constexpr const char* kLeft = "distca/left";
constexpr const char* kMismatch = "distca/mismatch";
constexpr const char* kRestart = ". Restart the job from its last checkpoint";
constexpr int64_t kSilent = INT64_MAX;  // order of ranks that did not report an error themselves

// Equal for processes that can see each other in /proc: one boot of one machine, one PID namespace
// (containers may share a host's name). No spaces.
std::string process_space() {
  std::string boot = kUnknown;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, 64> pids{};
  const ssize_t length = readlink("/proc/self/ns/pid", pids.data(), pids.size() - 1);
  return boot + "/" + (length > 0 ? pids.data() : kUnknown);
}

// State letter of a process of this host (proc(5)): 'Z' dead but not reaped, 'T' stopped; 0 if
// gone.
char process_state(int64_t pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(stat, text)) return 0;
  const size_t name_end = text.rfind(')');
  return name_end != std::string::npos && name_end + 2 < text.size() ? text[name_end + 2] : 0;
}

bool is_dead(char state) {
  return state == 0 || state == 'Z' || state == 'X';
}

std::string key_of(const char* kind, int64_t rank) {
  return "distca/" + std::string(kind) + "/" + std::to_string(rank);
}

c10::intrusive_ptr<c10d::Store> own_client(const c10::intrusive_ptr<c10d::Store>& store) {
  try {
    return store->clone();
  } catch (const std::exception&) {
    return store;  // a store written in Python
  }
}

// The boards of all groups of this process.
using Boards = c10::Synchronized<std::map<std::string, std::weak_ptr<FailureBoard>>>;

Boards& boards() {
  static Boards* instance = new Boards;  // watchdogs may look while the process ends
  return *instance;
}

}  // namespace

std::string describe_places(RanksByPlace places, const char* one, const char* many) {
  for (auto& [place, ranks] : places) std::ranges::sort(ranks);
  std::ranges::sort(places, {}, [](const auto& place) {
    return std::pair(place.second.size(), -place.second[0]);
  });
  std::string text;
  for (const auto& [place, ranks] : places) {
    if (!text.empty()) text += ", while ";
    text += ranks.size() > 1 ? "ranks" : "rank";
    for (const int64_t rank : ranks) text += " " + std::to_string(rank);
    text += " " + std::string(ranks.size() > 1 ? many : one) + " " + place;
  }
  return text;
}

std::string message_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  if (torch_error != nullptr) return torch_error->what_without_backtrace();
  const std::string text = error.what();
  return text.substr(0, text.find("\n\nAt:\n"));  // Python's
}

FailureBoard::FailureBoard(const c10::intrusive_ptr<c10d::Store>& store, std::string group,
                           int64_t rank, int64_t num_ranks)
    : store_(own_client(store)), group_(std::move(group)), rank_(rank), num_ranks_(num_ranks) {}

std::string FailureBoard::introduction(const std::string& configuration) const {
  return process_space() + " " + std::to_string(getpid()) + " " + configuration;
}

void FailureBoard::introduce(const std::vector<std::string>& introductions) {
  boards().withLock([&](auto& by_group) { by_group[group_] = weak_from_this(); });
  const std::string own_space = process_space();
  const bool can_see = own_space.find(kUnknown) == std::string::npos;
  std::map<std::string, std::string> ranks_by_configuration;
  for (int64_t rank = 0; rank < num_ranks_; ++rank) {
    std::istringstream text(introductions.at(rank));
    std::string space, theirs;
    int64_t pid = 0;
    std::getline(text >> space >> pid >> std::ws, theirs);
    if (can_see && space == own_space && rank != rank_) pids_[rank] = pid;
    ranks_by_configuration[theirs] += " " + std::to_string(rank);
  }
  if (ranks_by_configuration.size() == 1) return;
  std::string text;
  for (const auto& [theirs, ranks] : ranks_by_configuration) {
    text += (text.empty() ? "rank(s)" : "; rank(s)") + ranks + ": " + theirs;
  }
  TORCH_CHECK_VALUE(false, "distca: ranks disagree on the options: ", text,
                    ". All ranks of a group need the same version and options.");
}

template <typename F>
void FailureBoard::with_store(F&& use) noexcept {
  try {
    if (!store_is_lost_) use();
  } catch (const std::exception&) {
    // The store is gone with its host, and further calls would wait for it. Processes stay visible.
    store_is_lost_ = true;
  }
}

void FailureBoard::publish(const char* kind, const std::string& text, const char* flag) noexcept {
  with_store([&] {
    store_->set(key_of(kind, rank_), text);
    if (flag != nullptr) store_->set(flag, "1");
  });
}

std::optional<std::string> FailureBoard::published(const std::string& key) noexcept {
  std::optional<std::string> text;
  with_store([&] {
    if (store_->check({key})) text = store_->get_to_str(key);
  });
  return text;
}

void FailureBoard::announce(const std::string& message) noexcept {
  if (reported_.exchange(true)) return;
  int64_t order = 0;
  with_store([&] { order = store_->add("distca/num_errors", 1); });
  publish("error", std::to_string(order) + " " + message, kAlarm);
}

bool FailureBoard::alarmed() noexcept {
  return published(kAlarm) || store_is_lost_;
}

void FailureBoard::announce_mismatch(const std::string& sentence) noexcept {
  reported_ = true;
  with_store([&] {
    store_->compareSet(kMismatch, "", sentence);
    store_->set(kAlarm, "1");
  });
}

// Call it under the lock.
Channel& FailureBoard::channel(const std::string& name) {
  return *std::ranges::find(channels_, name, &Channel::name);
}

Wait FailureBoard::begin(const std::string& channel, const Where& where,
                         const std::string& activity) {
  std::lock_guard lock(mutex_);
  return {group_, channel, this->channel(channel).enter(where), where, activity};
}

void FailureBoard::complete(const std::string& channel) {
  std::lock_guard lock(mutex_);
  ++this->channel(channel).num_completed;
}

// Returns a copy of the channels, for a wait in any group.
Progress FailureBoard::progress(const Wait& wait) const {
  std::lock_guard lock(mutex_);
  return {wait, channels_};
}

std::string FailureBoard::find_deadlock(const Wait& wait) noexcept {
  std::vector<std::shared_ptr<FailureBoard>> groups;
  boards().withLock([&](const auto& by_group) {
    for (const auto& [name, board] : by_group) {
      if (auto alive = board.lock()) groups.push_back(std::move(alive));
    }
  });
  for (const auto& board : groups) board->publish("waiting", board->progress(wait).encode());
  bool is_stuck = false;
  using Place = std::pair<Wait, std::vector<int64_t>>;
  const auto look = [&] {
    std::map<std::string, Progress> own;  // by group
    for (const auto& board : groups) own[board->group_] = board->progress(wait);
    std::vector<Place> places{{wait, {rank_}}};
    for (int64_t rank = 0; rank < num_ranks_; ++rank) {
      const auto text = rank == rank_ ? std::nullopt : published(key_of("waiting", rank));
      if (!text) continue;
      const Progress progress = Progress::decode(*text);
      const Wait& other = progress.wait;
      const Channel *theirs = progress.find(wait.channel),
                    *mine = own[other.group].find(other.channel);
      const bool waits = mine && theirs && wait_for_each_other(wait, *mine, other, *theirs);
      is_stuck = is_stuck || waits;
      const auto place = std::ranges::find(places, other, &Place::first);
      if (place != places.end()) {
        place->second.push_back(rank);
      } else if (waits) {
        places.push_back({other, {rank}});
      }
    }
    return places;
  };
  look();
  if (!is_stuck) return "";
  std::this_thread::sleep_for(kOthersCome);
  RanksByPlace places;
  for (const auto& [place, ranks] : look()) {
    const bool is_other = place.group != group_;
    const std::string group = is_other ? " (of process group " + place.group + ")" : "";
    places.push_back({place.activity + group, ranks});
  }
  return describe_places(std::move(places), "waits in", "wait in") + kSameCalls;
}

void FailureBoard::leave(const std::string& how) noexcept {
  publish("left", progress({group_, "none", 0, {"", "", -1, -1}, how}).encode(), kLeft);
}

std::string FailureBoard::find_departed(const std::string& channel,
                                        std::optional<int64_t> position) noexcept {
  if (!published(kLeft)) return "";
  if (!position) {
    std::lock_guard lock(mutex_);
    position = this->channel(channel).num_completed;
  }
  std::string names;
  for (int64_t rank = 0; rank < num_ranks_; ++rank) {
    const auto text = rank == rank_ ? std::nullopt : published(key_of("left", rank));
    if (!text || published(key_of("error", rank)) || published(key_of("lost", rank))) continue;
    const Progress left = Progress::decode(*text);
    const Channel* theirs = left.find(channel);
    if (theirs != nullptr && theirs->num_completed > *position) continue;
    names +=
        (names.empty() ? "rank " : "; rank ") + std::to_string(rank) + " " + left.wait.activity;
  }
  if (names.empty()) return "";
  return names +
         ", and takes part in nothing more. Ranks of a group must make the same number of " +
         "steps: distca.join gives empty batches to those that have run out of data";
}

bool FailureBoard::has_dead_peer() const noexcept {
  return std::ranges::any_of(pids_,
                             [](const auto& peer) { return is_dead(process_state(peer.second)); });
}

FailureBoard::Finding FailureBoard::examine(int64_t rank) noexcept {
  const std::string name = "rank " + std::to_string(rank);
  if (const auto error = published(key_of("error", rank))) {
    const size_t space = error->find(' ');
    return {Blame::kCertain, true, std::stoll(error->substr(0, space)),
            name + " failed: " + error->substr(space + 1)};
  }
  if (const auto where = published(key_of("lost", rank))) {
    return {Blame::kNone, true, 0, name + " gave up in " + *where};
  }
  if (const auto left = published(key_of("left", rank))) {
    return {Blame::kPossible, true, kSilent, name + " " + Progress::decode(*left).wait.activity};
  }
  if (const auto peer = pids_.find(rank); peer != pids_.end()) {
    const std::string pid = std::to_string(peer->second);
    const char state = process_state(peer->second);
    if (is_dead(state)) {
      return {Blame::kCertain, true, kSilent,
              name + " is dead (process " + pid + " exited or was killed)"};
    }
    if (state == 'T' || state == 't') {
      return {Blame::kCertain, true, kSilent,
              name + " is stopped (process " + pid + ", SIGSTOP or a debugger)"};
    }
  }
  return {
      Blame::kPossible, false, kSilent,
      name + " has not answered: it is late, stuck or gone; timeout_s sets how long ranks wait"};
}

// Returns whether a rank has noticed a failure, and does not know its cause yet.
bool FailureBoard::still_reads(int64_t rank) noexcept {
  if (!published(key_of("lost", rank)) || published(key_of("informed", rank))) return false;
  const auto peer = pids_.find(rank);
  return peer == pids_.end() || !is_dead(process_state(peer->second));
}

std::string FailureBoard::diagnose(const std::string& own_error,
                                   const std::string& where) noexcept {
  reported_ = true;
  publish("lost", where, kAlarm);
  const std::string cause = find_cause(own_error);
  publish("informed", "1");
  const auto end = std::chrono::steady_clock::now() + kPatience;
  for (int64_t rank = 0; rank < num_ranks_; ++rank) {
    while (rank != rank_ && still_reads(rank) && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(kPoll);
    }
  }
  return cause;
}

std::string FailureBoard::diagnose(const std::string& channel, const std::string& own_error,
                                   const std::string& where) noexcept {
  const std::string departed = find_departed(channel);
  const std::string cause = diagnose(own_error, where);  // even so: it waits for other ranks
  return departed.empty() ? cause : departed;
}

std::string FailureBoard::find_cause(const std::string& own_error) noexcept {
  const auto start = std::chrono::steady_clock::now();
  std::vector<Finding> findings;
  Blame most;  // a rank that left may have done its part: it is named if none is at fault for sure
  bool have_answered;
  do {
    if (const auto mismatch = published(kMismatch)) return *mismatch + kRestart;
    std::this_thread::sleep_for(kPoll);
    findings.clear();
    most = Blame::kNone;
    have_answered = true;
    for (int64_t rank = 0; rank < num_ranks_; ++rank) {
      if (rank == rank_) continue;
      const Finding& finding = findings.emplace_back(examine(rank));
      most = std::max(most, finding.blame);
      have_answered = have_answered && finding.has_answered;
    }
  } while (!have_answered && std::chrono::steady_clock::now() < start + kPatience);

  std::ranges::stable_sort(findings, {}, &Finding::order);
  std::string text;
  for (const Finding& finding : findings) {
    if (finding.blame == most) text += (text.empty() ? "" : "; ") + finding.text;
  }
  return text + kRestart + ". The transport said: " + own_error;
}

}  // namespace distca::transport
