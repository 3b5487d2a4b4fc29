#include "failures.h"

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

constexpr std::chrono::milliseconds kPatience{3000};  // how long diagnose() waits for silent ranks
constexpr std::chrono::milliseconds kGrace{500};      // ... after one at fault is known
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

// Returns the sentence in the text that leave() publishes.
std::string how_of(const std::string& left) {
  return left.substr(std::min(left.size(), left.find(';') + 1));
}

c10::intrusive_ptr<c10d::Store> own_client(const c10::intrusive_ptr<c10d::Store>& store) {
  try {
    return store->clone();
  } catch (const std::exception&) {
    return store;  // a store written in Python
  }
}

// The boards of all groups of this process.
struct Boards {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<FailureBoard>> by_group;

  std::vector<std::shared_ptr<FailureBoard>> all() {
    std::lock_guard lock(mutex);
    std::vector<std::shared_ptr<FailureBoard>> alive;
    for (const auto& [group, board] : by_group) {
      if (auto found = board.lock()) alive.push_back(std::move(found));
    }
    return alive;
  }
};

Boards& boards() {
  static Boards* instance = new Boards;  // watchdogs may look while the process ends
  return *instance;
}

}  // namespace

std::string describe_mismatch(int64_t server, const Where& theirs, int64_t home,
                              const Where& mine) {
  return "rank " + std::to_string(server) + " was in " + describe(theirs) + ", while rank " +
         std::to_string(home) + " was in " + describe(mine) + ", and got its results" + kSameCalls;
}

std::string message_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  if (torch_error != nullptr) return torch_error->what_without_backtrace();
  const std::string text = error.what();
  return text.substr(0, text.find("\n\nAt:\n"));  // Python's
}

FailureBoard::FailureBoard(const c10::intrusive_ptr<c10d::Store>& store, std::string group,
                           int64_t rank, int64_t num_ranks)
    : store_(own_client(store)),
      group_(std::move(group)),
      rank_(rank),
      num_ranks_(num_ranks),
      self_{process_space(), getpid()} {}

std::string FailureBoard::key(const std::string& kind, int64_t rank) const {
  return "distca/" + kind + "/" + std::to_string(rank);
}

std::string FailureBoard::introduction(const std::string& configuration) const {
  return self_.space + " " + std::to_string(self_.pid) + " " + configuration;
}

void FailureBoard::introduce(const std::vector<std::string>& introductions) {
  {
    std::lock_guard lock(boards().mutex);
    boards().by_group[group_] = weak_from_this();
  }
  processes_.resize(num_ranks_);
  std::map<std::string, std::string> ranks_by_configuration;
  for (int64_t rank = 0; rank < num_ranks_; ++rank) {
    std::istringstream text(introductions.at(rank));
    text >> processes_[rank].space >> processes_[rank].pid;
    std::string theirs;
    std::getline(text >> std::ws, theirs);
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
bool FailureBoard::with_store(F&& use) noexcept {
  if (store_is_lost_) return false;
  try {
    use();
    return true;
  } catch (const std::exception&) {
    // The store is gone with its host, and further calls would wait for it. Processes stay visible.
    store_is_lost_ = true;
    return false;
  }
}

void FailureBoard::announce(const std::string& message) noexcept {
  if (reported_.exchange(true)) return;
  with_store([&] {
    const int64_t order = store_->add("distca/num_errors", 1);
    store_->set(key("error", rank_), std::to_string(order) + " " + message);
    store_->set(kAlarm, "1");
  });
}

bool FailureBoard::alarmed() noexcept {
  bool is_set = false;
  return !with_store([&] { is_set = store_->check({kAlarm}); }) || is_set;
}

void FailureBoard::announce_mismatch(const std::string& sentence) noexcept {
  reported_ = true;
  with_store([&] {
    store_->compareSet(kMismatch, "", sentence);
    store_->set(kAlarm, "1");
  });
}

std::shared_ptr<Channel> FailureBoard::open_channel(const std::string& name) {
  std::lock_guard lock(mutex_);
  return channels_.emplace_back(std::make_shared<Channel>(name));
}

std::shared_ptr<Channel> FailureBoard::find_channel(const std::string& name) const {
  std::lock_guard lock(mutex_);
  const auto found = std::find_if(channels_.begin(), channels_.end(),
                                  [&](const auto& channel) { return channel->name() == name; });
  return found == channels_.end() ? nullptr : *found;
}

void FailureBoard::post(const Wait& wait) noexcept {
  Progress progress{wait, {}};
  {
    std::lock_guard lock(mutex_);
    for (const auto& channel : channels_) progress.channels.push_back(*channel);
  }
  with_store([&] { store_->set(key("waiting", rank_), progress.encode()); });
}

std::optional<Progress> FailureBoard::read_progress(int64_t rank) noexcept {
  std::string text;
  if (!posted(key("waiting", rank), text)) return std::nullopt;
  return Progress::decode(text);
}

std::string FailureBoard::find_deadlock(const Wait& wait) noexcept {
  const auto groups = boards().all();
  for (const auto& board : groups) board->post(wait);
  const auto waits_for_us = [&](const Progress& theirs) {
    const auto board = std::find_if(groups.begin(), groups.end(), [&](const auto& each) {
      return each->group() == theirs.wait.group;
    });
    if (board == groups.end()) return false;
    const auto mine = (*board)->find_channel(theirs.wait.channel);
    const Channel* their_channel = theirs.find(wait.channel);
    return mine && their_channel != nullptr &&
           wait_for_each_other(wait, *mine, theirs.wait, *their_channel);
  };
  bool is_found = false;
  const auto look = [&] {
    std::vector<std::pair<int64_t, Wait>> waits{{rank_, wait}};
    for (int64_t rank = 0; rank < num_ranks_; ++rank) {
      if (rank == rank_) continue;
      const std::optional<Progress> theirs = read_progress(rank);
      if (!theirs) continue;
      const bool is_stuck = waits_for_us(*theirs);
      is_found = is_found || is_stuck;
      if (is_stuck || theirs->wait == wait) waits.emplace_back(rank, theirs->wait);
    }
    return waits;
  };
  look();
  if (!is_found) return "";
  std::this_thread::sleep_for(kOthersCome);
  return describe_deadlock(look());
}

// Names exchanges in which few ranks wait first.
std::string FailureBoard::describe_deadlock(
    const std::vector<std::pair<int64_t, Wait>>& waits) const {
  struct Place {
    Wait wait;
    std::vector<int64_t> ranks;
  };
  std::vector<Place> places;
  for (const auto& [rank, wait] : waits) {
    auto place = std::find_if(places.begin(), places.end(),
                              [&](const Place& each) { return each.wait == wait; });
    if (place == places.end()) place = places.insert(places.end(), {wait, {}});
    place->ranks.push_back(rank);
  }
  for (Place& place : places) std::sort(place.ranks.begin(), place.ranks.end());
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    return std::pair(a.ranks.size(), -a.ranks[0]) < std::pair(b.ranks.size(), -b.ranks[0]);
  });
  std::string text;
  for (const Place& place : places) {
    if (!text.empty()) text += ", while ";
    text += place.ranks.size() > 1 ? "ranks" : "rank";
    for (const int64_t rank : place.ranks) text += " " + std::to_string(rank);
    text += (place.ranks.size() > 1 ? " wait in " : " waits in ") + place.wait.activity;
    if (place.wait.group != group_) text += " (of process group " + place.wait.group + ")";
  }
  return text + kSameCalls;
}

void FailureBoard::leave(const std::string& how) noexcept {
  std::string text;
  {
    std::lock_guard lock(mutex_);
    for (const auto& channel : channels_) {
      text += channel->name() + " " + std::to_string(channel->num_completed()) + " ";
    }
  }
  with_store([&] {
    store_->set(key("left", rank_), text + "; " + how);
    store_->set(kLeft, "1");
  });
}

std::string FailureBoard::find_departed(const std::string& channel, int64_t position) noexcept {
  bool has_any = false;
  with_store([&] { has_any = store_->check({kLeft}); });
  std::string names;
  for (int64_t rank = 0; has_any && rank < num_ranks_; ++rank) {
    std::string left, reason;
    if (rank == rank_ || !posted(key("left", rank), left)) continue;
    if (posted(key("error", rank), reason) || posted(key("lost", rank), reason)) continue;
    std::istringstream text(left);
    std::string other;
    int64_t num = 0, num_completed = 0;
    while (text >> other >> num) {
      if (other == channel) num_completed = num;
    }
    if (num_completed > position) continue;
    names += (names.empty() ? "rank " : "; rank ") + std::to_string(rank) + how_of(left);
  }
  if (names.empty()) return "";
  return names +
         ", and takes part in nothing more. Ranks of a group must make the same number of " +
         "steps: distca.join gives empty batches to those that have run out of data";
}

bool FailureBoard::posted(const std::string& key, std::string& value) noexcept {
  bool is_there = false;
  with_store([&] {
    is_there = store_->check({key});
    if (is_there) value = store_->get_to_str(key);
  });
  return is_there;
}

bool FailureBoard::sees(const Process& process) const {
  return process.space == self_.space && self_.space.find(kUnknown) == std::string::npos;
}

bool FailureBoard::has_dead_peer() const noexcept {
  return std::any_of(processes_.begin(), processes_.end(), [this](const Process& process) {
    return sees(process) && is_dead(process_state(process.pid));
  });
}

FailureBoard::Finding FailureBoard::examine(int64_t rank) noexcept {
  const std::string name = "rank " + std::to_string(rank);
  std::string value;
  if (posted(key("error", rank), value)) {
    const size_t space = value.find(' ');
    return {Verdict::kAtFault, std::stoll(value.substr(0, space)),
            name + " failed: " + value.substr(space + 1)};
  }
  if (posted(key("lost", rank), value)) {
    return {Verdict::kInnocent, 0, name + " gave up in " + value};
  }
  if (posted(key("left", rank), value)) return {Verdict::kLeft, kSilent, name + how_of(value)};
  const Finding unknown{
      Verdict::kUnknown, kSilent,
      name + " has not answered for " + std::to_string(kPatience.count()) + " ms"};
  if (static_cast<int64_t>(processes_.size()) != num_ranks_) return unknown;
  const Process& process = processes_[rank];
  if (!sees(process)) return unknown;
  const char state = process_state(process.pid);
  if (is_dead(state)) {
    return {Verdict::kAtFault, kSilent,
            name + " is dead (process " + std::to_string(process.pid) + " exited or was killed)"};
  }
  if (state == 'T' || state == 't') {
    return {
        Verdict::kAtFault, kSilent,
        name + " is stopped (process " + std::to_string(process.pid) + ", SIGSTOP or a debugger)"};
  }
  return unknown;
}

std::vector<FailureBoard::Finding> FailureBoard::examine_all() noexcept {
  std::vector<Finding> findings;
  for (int64_t rank = 0; rank < num_ranks_; ++rank) {
    if (rank != rank_) findings.push_back(examine(rank));
  }
  return findings;
}

std::string FailureBoard::diagnose(const std::string& own_error,
                                   const std::string& where) noexcept {
  reported_ = true;
  with_store([&] {
    store_->set(key("lost", rank_), where);
    store_->set(kAlarm, "1");
  });
  const auto has = [](const std::vector<Finding>& findings, Verdict verdict) {
    return std::any_of(findings.begin(), findings.end(),
                       [verdict](const Finding& finding) { return finding.verdict == verdict; });
  };
  const auto start = std::chrono::steady_clock::now();
  std::vector<Finding> findings;
  std::string mismatch;
  auto patience = kPatience;
  do {
    if (posted(kMismatch, mismatch)) return mismatch + kRestart;
    std::this_thread::sleep_for(kPoll);
    findings = examine_all();
    // Others may be busy for long; once somebody is known to be at fault, they matter little.
    if (has(findings, Verdict::kAtFault)) patience = std::min(patience, kGrace);
  } while (has(findings, Verdict::kUnknown) && std::chrono::steady_clock::now() < start + patience);

  // A rank that left may have done its part, so it is named only if no other is known to be at
  // fault.
  const auto is_blamed = [&](Verdict verdict) {
    if (has(findings, Verdict::kAtFault)) return verdict == Verdict::kAtFault;
    const bool is_open = has(findings, Verdict::kUnknown) || has(findings, Verdict::kLeft);
    return is_open ? verdict == Verdict::kUnknown || verdict == Verdict::kLeft : true;
  };
  std::stable_sort(findings.begin(), findings.end(),
                   [](const Finding& a, const Finding& b) { return a.order < b.order; });
  std::string text;
  for (const Finding& finding : findings) {
    if (is_blamed(finding.verdict)) text += (text.empty() ? "" : "; ") + finding.text;
  }
  return text + kRestart + ". The transport said: " + own_error;
}

}  // namespace distca::transport
