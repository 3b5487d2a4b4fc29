// A libFuzzer target for pieces and plans in the int64 words in which operators take them. Whatever
// the planner accepts has to be a plan whose layouts fit together on all ranks, and what it makes
// itself as well; the rest has to be refused with std::invalid_argument.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "layout_properties.h"
#include "planner/make_plan.h"
#include "planner_properties.h"
#include "random_steps.h"

namespace distca::planner {
namespace {

constexpr int64_t kMaxRanks = 65536;  // operators refuse more, and more rows on a rank
constexpr int64_t kMaxRanksDrawn = 6;
constexpr int64_t kMaxLayouts = 32;
constexpr int64_t kMaxTokens = 4096;  // of all documents
constexpr size_t kPieceWords = 5;     // rank, document, start, length, context
constexpr size_t kTaskWords = 5;      // document, q_begin, q_end, server, is_kept

using Words = std::vector<int64_t>;

struct Input {
  int64_t choices = 0;  // seed of the options; odd: the digest is put right
  std::vector<Piece> pieces;
  Plan plan;  // without loads
};

// Words of an input: choices, number of pieces, pieces, then the plan: its header and its tasks.
constexpr size_t kChoices = 0, kNumPieces = 1, kHeader = 2;
constexpr size_t kNumRanks = 0, kWindowLeft = 1, kWindowRight = 2, kDigest = 3, kNumTasks = 4;
constexpr size_t kPlanHeader = 5;

Words encode(const Input& input) {
  Words words = {input.choices, static_cast<int64_t>(input.pieces.size())};
  for (const Piece& piece : input.pieces) {
    words.insert(words.end(),
                 {piece.rank, piece.document, piece.start, piece.length, piece.num_context});
  }
  const Plan& plan = input.plan;
  words.insert(words.end(),
               {plan.num_ranks, plan.mask.window_left, plan.mask.window_right,
                static_cast<int64_t>(plan.digest), static_cast<int64_t>(plan.tasks.size())});
  for (const Task& task : plan.tasks) {
    words.insert(words.end(),
                 {task.document, task.q_begin, task.q_end, task.server, int64_t{task.is_kept}});
  }
  return words;
}

// Nothing where counts and the number of words disagree.
std::optional<Input> decode(const Words& words) {
  if (words.size() < kHeader + kPlanHeader) return std::nullopt;
  const size_t num_pieces = static_cast<size_t>(words[kNumPieces]);
  if (num_pieces > (words.size() - kHeader - kPlanHeader) / kPieceWords) return std::nullopt;
  Input input{words[kChoices], {}, {}};
  const int64_t* next = words.data() + kHeader;
  for (size_t i = 0; i < num_pieces; ++i, next += kPieceWords) {
    input.pieces.push_back({next[0], next[1], next[2], next[3], next[4]});
  }
  const size_t num_left = static_cast<size_t>(words.data() + words.size() - next) - kPlanHeader;
  const size_t num_tasks = static_cast<size_t>(next[kNumTasks]);
  if (num_left / kTaskWords != num_tasks) return std::nullopt;
  input.plan.num_ranks = next[kNumRanks];
  input.plan.mask = {next[kWindowLeft], next[kWindowRight]};
  input.plan.digest = static_cast<uint64_t>(next[kDigest]);
  next += kPlanHeader;
  for (size_t i = 0; i < num_tasks; ++i, next += kTaskWords) {
    input.plan.tasks.push_back({next[0], next[1], next[2], next[3], next[4] % 2 != 0});
  }
  return input;
}

[[noreturn]] void fail(const std::string& wrong) {
  std::fprintf(stderr, "planner_fuzz: %s\n", wrong.c_str());
  std::abort();
}

// The message with which `statement` refuses its input; empty where it does not.
template <typename Statement>
std::string refusal(Statement statement) {
  try {
    statement();
    return "";
  } catch (const std::invalid_argument& error) {
    if (*error.what() == '\0') fail("refused without a message");
    return error.what();
  }
}

bool operators_take(const Input& input) {
  if (input.plan.num_ranks < 1 || input.plan.num_ranks > kMaxRanks) return false;
  std::vector<int64_t> num_rows(input.plan.num_ranks, 0);
  for (const Piece& piece : input.pieces) {
    if (piece.rank < 0 || piece.rank >= input.plan.num_ranks) continue;  // the planner's to refuse
    if (piece.length > kMaxRows - num_rows[piece.rank]) return false;
    num_rows[piece.rank] += std::max<int64_t>(0, piece.length);
  }
  return true;
}

// Whether ranks and tokens are few enough to be told one by one.
bool is_small(const Pack& pack) {
  int64_t num_tokens = 0;
  for (const Document& document : pack.documents) num_tokens += document.length;
  return pack.num_ranks <= kMaxLayouts && num_tokens <= kMaxTokens;
}

void check_all(const Pack& pack, const Plan& plan, const std::string& whose) {
  std::string wrong = check_cover(pack, plan);
  if (wrong.empty()) wrong = check_kept_alike(pack, plan);
  if (wrong.empty()) wrong = check_layouts(pack, plan, make_layouts(pack, plan));
  if (!wrong.empty()) fail(whose + ": " + wrong);
}

// `plan` is accepted just where it computes every query once.
void check_accepted(const Pack& pack, Plan plan, bool repair) {
  plan.loads.resize(pack.num_ranks);
  if (repair) plan.digest = digest_of(pack, plan.mask, plan.tasks);
  const std::string refused = refusal([&] { validate(plan, pack); });
  if (!is_small(pack)) return;
  if (refused.empty()) {
    check_all(pack, plan, "accepted plan");
  } else if (refusal([&] { validate(plan.mask); }).empty() && check_cover(pack, plan).empty() &&
             check_kept_alike(pack, plan).empty()) {
    fail("refused a good plan: " + refused);
  }
}

void check_made(const Pack& pack, const Mask& mask, int64_t choices) {
  if (!is_small(pack)) return;
  Random random(static_cast<uint32_t>(choices));
  PlanOptions options = draw_options(random);
  if (draw(random, 0, 1) == 0) draw_cluster(random, pack.num_ranks, options);
  options.mask = mask;
  Plan plan;
  if (!refusal([&] { plan = make_plan(pack, options); }).empty()) return;
  validate(plan, pack);
  check_all(pack, plan, "made plan");
  for (const std::string& wrong : {check_loads(pack, options, plan), check_servers(options, plan),
                                   check_kept(pack, options, plan)}) {
    if (!wrong.empty()) fail("made plan: " + wrong);
  }
}

// A valid input: a random step with its plan.
Input draw_input(Random& random) {
  Input input;
  input.choices = static_cast<int64_t>(random());
  const int64_t num_ranks = draw(random, 1, kMaxRanksDrawn);
  input.pieces = draw_pieces(random, num_ranks, draw(random, 1, 80));
  input.plan = make_plan(make_pack(input.pieces, num_ranks), draw_options(random));
  return input;
}

// Gives a task, or its tail, to another server; every query stays computed once. The tail is empty
// now and then, which a plan's tasks must not be.
void rearrange(Random& random, Plan& plan) {
  if (plan.tasks.empty()) return;
  const size_t at = random() % plan.tasks.size();
  const Task task = plan.tasks[at];
  const int64_t server = draw(random, 0, kMaxRanksDrawn - 1);
  const bool in_order = 0 <= task.q_begin && task.q_begin < task.q_end && task.q_end <= kMaxTokens;
  int64_t cut = in_order ? draw(random, task.q_begin, task.q_end - 1) : task.q_begin;
  if (draw(random, 0, 15) == 0) cut = task.q_end;
  if (cut > task.q_begin) {
    plan.tasks[at].q_end = cut;
    plan.tasks.push_back({task.document, cut, task.q_end, server, task.is_kept});
  } else {
    plan.tasks[at].server = server;
  }
  std::sort(plan.tasks.begin(), plan.tasks.end(), [](const Task& a, const Task& b) {
    return std::tie(a.server, a.document, a.q_begin) < std::tie(b.server, b.document, b.q_begin);
  });
}

// Drops, repeats or exchanges whole records.
template <typename Record>
void shuffle_records(Random& random, std::vector<Record>& records) {
  if (records.empty()) return;
  const size_t at = random() % records.size(), other = random() % records.size();
  switch (draw(random, 0, 2)) {
    case 0:
      records.erase(records.begin() + static_cast<std::ptrdiff_t>(at));
      break;
    case 1:
      records.insert(records.begin() + static_cast<std::ptrdiff_t>(at), Record(records[other]));
      break;
    default:
      std::swap(records[at], records[other]);
  }
}

void change_word(Random& random, Words& words) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  constexpr int64_t kEdges[] = {
      -kMost - 1, -1,           0,         1,         2,         127,  128,
      kMaxRows,   kMaxRows + 1, 1LL << 40, 1LL << 48, 1LL << 62, kMost};
  int64_t& word = words[random() % words.size()];
  switch (draw(random, 0, 4)) {
    case 0:
      word = kEdges[random() % std::size(kEdges)];
      break;
    case 1:
      word = words[random() % words.size()];
      break;
    case 2:
      word = static_cast<int64_t>(static_cast<uint64_t>(word) ^ (1ull << (random() % 64)));
      break;
    default:
      word = static_cast<int64_t>(static_cast<uint64_t>(word) + (random() % 2 == 0 ? 1u : -1u));
  }
}

Words mutate(Random& random, const Words& words) {
  std::optional<Input> input = decode(words);
  if (!input || draw(random, 0, 15) == 0) return encode(draw_input(random));
  Words changed = words;
  switch (draw(random, 0, 5)) {
    case 0:
      shuffle_records(random, input->pieces);
      return encode(*input);
    case 1:
      shuffle_records(random, input->plan.tasks);
      return encode(*input);
    case 2:
    case 3:
      for (int64_t i = draw(random, 1, 4); i > 0; --i) rearrange(random, input->plan);
      return encode(*input);
    default:
      for (int64_t i = draw(random, 1, 3); i > 0; --i) change_word(random, changed);
      return changed;
  }
}

Words words_of(const uint8_t* data, size_t size) {
  Words words(size / sizeof(int64_t));
  if (!words.empty()) std::memcpy(words.data(), data, words.size() * sizeof(int64_t));
  return words;
}

}  // namespace
}  // namespace distca::planner

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace distca::planner;
  const std::optional<Input> input = decode(words_of(data, size));
  if (!input || !operators_take(*input)) return 0;
  Pack pack;
  if (!refusal([&] { pack = make_pack(input->pieces, input->plan.num_ranks); }).empty()) return 0;
  check_accepted(pack, input->plan, input->choices % 2 != 0);
  check_made(pack, input->plan.mask, input->choices);
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed) {
  using namespace distca::planner;
  Random random(seed);
  const Words words = mutate(random, words_of(data, size));
  const size_t length = std::min(words.size() * sizeof(int64_t), max_size);
  if (length > 0) std::memcpy(data, words.data(), length);
  return length;
}
