#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "layout_tensor.h"
#include "planner/layout/layout.h"
#include "planner/make_plan.h"
#include "planner/model/loads.h"
#include "planner/model/options.h"
#include "planner/model/pack.h"
#include "planner/model/plan.h"
#include "planner/model/ranges.h"
#include "session.h"

namespace distca::ops {
namespace {

constexpr int64_t kMaxPosition = int64_t{1} << 48;
constexpr int64_t kPieceWords = 4;   // rank, document, start, length; then context or nothing
constexpr int64_t kTaskWords = 5;    // document, q_begin, q_end, server, is_kept
constexpr int64_t kLoadColumns = 9;  // see schemas.cpp
enum PlanHeader : int64_t { kNumRanks, kWindowLeft, kWindowRight, kDigest, kNumTasks, kPlanHeader };

// Returns the elements of a contiguous CPU tensor of dtype T. Throws ValueError for any other.
template <typename T>
std::span<const T> words_of(const at::Tensor& tensor, const char* name) {
  constexpr at::ScalarType dtype = c10::CppTypeToScalarType<T>::value;
  constexpr const char* dtype_name = dtype == at::kDouble ? "float64" : "int64";
  TORCH_CHECK_VALUE(
      tensor.device().is_cpu() && tensor.scalar_type() == dtype && tensor.is_contiguous(), name,
      ": expected a contiguous ", dtype_name, " CPU tensor, got ", tensor.toString());
  return {tensor.const_data_ptr<T>(), static_cast<size_t>(tensor.numel())};
}

// The planner throws std::invalid_argument; Python users see ValueError.
template <typename F>
auto as_value_error(F&& f) {
  try {
    return f();
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

planner::Pack decode_pack(const at::Tensor& pieces, int64_t num_ranks) {
  const int64_t num_words = pieces.dim() == 2 ? pieces.size(1) : 0;
  TORCH_CHECK_VALUE(num_words == kPieceWords || num_words == kPieceWords + 1,
                    "pieces: expected [num_pieces, 4] (rank, document, start, length), or 5 with "
                    "context rows, got ",
                    pieces.sizes());
  const auto words = words_of<int64_t>(pieces, "pieces");
  std::vector<planner::Piece> decoded;
  TORCH_CHECK_VALUE(0 < num_ranks && num_ranks <= kMaxRanks, "num_ranks is ", num_ranks,
                    "; expected 1 to ", kMaxRanks);
  std::vector<int64_t> num_rows(num_ranks, 0);
  decoded.reserve(pieces.size(0));
  for (int64_t i = 0; i < pieces.size(0); ++i) {
    const int64_t* w = words.data() + num_words * i;
    TORCH_CHECK_VALUE(0 <= w[0] && w[0] < num_ranks, "pieces: piece ", i, " is on rank ", w[0],
                      "; expected 0 to ", num_ranks - 1);
    TORCH_CHECK_VALUE(0 <= w[3] && w[3] <= kMaxRows - num_rows[w[0]], "pieces: piece ", i, " has ",
                      w[3], " tokens; a rank holds at most ", kMaxRows);
    TORCH_CHECK_VALUE(0 <= w[2] && w[2] <= kMaxPosition, "pieces: piece ", i, " starts at ", w[2],
                      "; expected 0 to ", kMaxPosition);
    num_rows[w[0]] += w[3];
    decoded.push_back({w[0], w[1], w[2], w[3], num_words > kPieceWords ? w[kPieceWords] : 0});
  }
  return as_value_error([&] { return planner::make_pack(decoded, num_ranks); });
}

// float64 [tile_q, tile_k, seconds_per_tile, seconds_per_task, num_rows, num_keys, rows...,
// keys..., seconds...]
planner::CostModel decode_cost(const at::Tensor& cost) {
  const auto values = words_of<double>(cost, "cost");
  TORCH_CHECK_VALUE(values.size() >= 6, "cost: ", values.size(), " values; expected at least 6");
  const auto whole = [&](int64_t word, int64_t limit) {
    TORCH_CHECK_VALUE(0 <= values[word] && values[word] <= static_cast<double>(limit),
                      "cost: value ", word, " is ", values[word], "; expected 0 to ", limit);
    return static_cast<int64_t>(values[word]);
  };
  const int64_t num_rows = whole(4, cost.numel()), num_keys = whole(5, cost.numel());
  TORCH_CHECK_VALUE(cost.numel() == 6 + num_rows + num_keys + num_rows * num_keys,
                    "cost: a table of ", num_rows, " x ", num_keys, " does not match ",
                    cost.numel(), " values");
  planner::CostModel model;
  model.tile_q = whole(0, kMaxRows);
  model.tile_k = whole(1, kMaxRows);
  model.seconds_per_tile = values[2];
  model.seconds_per_task = values[3];
  for (int64_t i = 6; i < 6 + num_rows + num_keys; ++i) whole(i, kMaxRows);
  const double* next = values.data() + 6;
  model.table_rows.assign(next, next + num_rows);
  model.table_keys.assign(next + num_rows, next + num_rows + num_keys);
  next += num_rows + num_keys;
  model.table_seconds.assign(next, next + num_rows * num_keys);
  as_value_error([&] { planner::validate(model); });
  return model;
}

std::vector<planner::Server> decode_servers(const at::Tensor& servers, int64_t num_ranks) {
  const auto values = words_of<double>(servers, "servers");
  if (values.empty()) return {};
  TORCH_CHECK_VALUE(servers.dim() == 2 && servers.size(0) == num_ranks && servers.size(1) == 3,
                    "servers: expected [", num_ranks,
                    ", 3] (speed, memory cap in bytes, lag in seconds) or nothing, got ",
                    servers.sizes());
  std::vector<planner::Server> decoded;
  decoded.reserve(num_ranks);
  for (size_t i = 0; i < values.size(); i += 3) {
    decoded.push_back({values[i], values[i + 1], values[i + 2]});
  }
  return decoded;
}

planner::Links decode_links(const at::Tensor& links) {
  const auto values = words_of<double>(links, "links");
  TORCH_CHECK_VALUE(values.size() == 12 && 1 <= values[0] && values[0] <= kMaxRanks,
                    "links: expected (ranks of a node, 1 to ", kMaxRanks,
                    ", bytes per second within it, between nodes, hidden part, exposed part, "
                    "seconds of waits forward, backward, hidden seconds, room forward, backward, "
                    "moving part, other seconds), got ",
                    links.sizes());
  const int64_t ranks_per_node = static_cast<int64_t>(values[0]);
  return {ranks_per_node, values[1], values[2], values[3], values[4],  values[5],
          values[6],      values[7], values[8], values[9], values[10], values[11]};
}

planner::RowBytes decode_row_bytes(at::IntArrayRef bytes, const char* name) {
  TORCH_CHECK_VALUE(bytes.size() == 2, name, ": expected (query, key), got ", bytes);
  return {bytes[0], bytes[1]};
}

at::Tensor encode_plan(const planner::Plan& plan) {
  const auto num_tasks = static_cast<int64_t>(plan.tasks.size());
  at::Tensor encoded = at::empty({kPlanHeader + kTaskWords * num_tasks}, at::kLong);
  int64_t* words = encoded.mutable_data_ptr<int64_t>();
  words[kNumRanks] = plan.num_ranks;
  words[kWindowLeft] = plan.mask.window_left;
  words[kWindowRight] = plan.mask.window_right;
  words[kDigest] = static_cast<int64_t>(plan.digest);
  words[kNumTasks] = num_tasks;
  int64_t* next = words + kPlanHeader;
  for (const planner::Task& task : plan.tasks) {
    for (const int64_t word :
         {task.document, task.q_begin, task.q_end, task.server, int64_t{task.is_kept}}) {
      *next++ = word;
    }
  }
  return encoded;
}

// Decodes tasks of `task_words` words each. Without the fifth word, nothing is kept.
std::vector<planner::Task> decode_tasks(std::span<const int64_t> words, int64_t task_words) {
  std::vector<planner::Task> tasks;
  tasks.reserve(words.size() / task_words);
  for (size_t i = 0; i < words.size(); i += task_words) {
    const int64_t is_kept = task_words == kTaskWords ? words[i + 4] : 0;
    TORCH_CHECK_VALUE(is_kept == 0 || is_kept == 1, "task ", i / task_words, ": is_kept is ",
                      is_kept, "; expected 0 or 1");
    tasks.push_back({words[i], words[i + 1], words[i + 2], words[i + 3], is_kept == 1});
  }
  return tasks;
}

planner::Plan decode_plan(const at::Tensor& encoded, const planner::Pack& pack) {
  const auto words = words_of<int64_t>(encoded, "plan");
  TORCH_CHECK_VALUE(
      words.size() >= kPlanHeader && words[kNumTasks] >= 0 &&
          (words.size() - kPlanHeader) / kTaskWords == static_cast<size_t>(words[kNumTasks]),
      "plan: ", words.size(), " words are not a plan; make it with distca.plan");
  planner::Plan plan;
  plan.num_ranks = words[kNumRanks];
  plan.mask = {words[kWindowLeft], words[kWindowRight]};
  plan.digest = static_cast<uint64_t>(words[kDigest]);
  plan.loads.resize(pack.num_ranks);  // figures that a layout does not need
  plan.tasks = decode_tasks(words.subspan(kPlanHeader, kTaskWords * words[kNumTasks]), kTaskWords);
  as_value_error([&] { planner::validate(plan, pack); });
  return plan;
}

at::Tensor encode_loads(const std::vector<planner::Load>& loads) {
  at::Tensor encoded = at::empty({static_cast<int64_t>(loads.size()), kLoadColumns}, at::kDouble);
  double* next = encoded.mutable_data_ptr<double>();
  for (const planner::Load& load : loads) {
    *next++ = load.seconds_home;
    *next++ = load.seconds;
    for (const int64_t bytes : {load.bytes_out, load.bytes_in, load.node_bytes_out,
                                load.node_bytes_in, load.held_bytes}) {
      *next++ = static_cast<double>(bytes);
    }
    *next++ = load.seconds_visiting;
    *next++ = static_cast<double>(load.kept_bytes);
  }
  return encoded;
}

// Whether any task needs a row that its server is not home to; its keys include its own positions.
bool moves_rows(const planner::Pack& pack, const planner::Plan& plan) {
  const auto is_home = [&](const planner::Task& task) {
    return planner::is_home(pack, plan.mask, task);
  };
  return !std::all_of(plan.tasks.begin(), plan.tasks.end(), is_home);
}

// Numbers of rows that a rank sends, also to itself, and of rows that visit it.
struct MovedRows {
  int64_t sent;
  int64_t visiting;
};

std::vector<MovedRows> moved_rows(const planner::Pack& pack, const Mask& mask,
                                  const std::vector<planner::Task>& visiting,
                                  const planner::RowBytes& counted) {
  planner::PlanOptions options;
  options.mask = mask;
  options.row_bytes = options.held_bytes = counted;
  std::vector<MovedRows> rows;
  for (const planner::Load& load : planner::loads_of(pack, options, visiting)) {
    rows.push_back({load.bytes_out + load.held_bytes - load.bytes_in, load.held_bytes});
  }
  return rows;
}

// Returns how many row indices encode_layout may write for a rank: those of its sent and visiting
// rows, and of the returned rows that add up to each of its keys; again if inputs are kept, and of
// both parts if routes are split by node.
int64_t most_row_words(const MovedRows& q, const MovedRows& k, int64_t num_home_rows,
                       bool keeps_inputs) {
  const int64_t once = q.sent + q.visiting + k.sent + k.visiting;
  const int64_t sums = k.sent + 2 * std::min(k.sent, num_home_rows) + 1;
  const int64_t again = keeps_inputs ? once : 0, kept = keeps_inputs ? q.visiting + k.visiting : 0;
  return 2 * (once + again) + sums + kept + k.sent;
}

// Row indices are int32. Every rank checks the rows of all ranks, so that none waits for a rank
// that cannot encode its layout.
void check_row_indices(const planner::Pack& pack, const planner::Plan& plan) {
  std::vector<planner::Task> visiting;
  std::copy_if(plan.tasks.begin(), plan.tasks.end(), std::back_inserter(visiting),
               [&](const planner::Task& task) { return !planner::is_home(pack, plan.mask, task); });
  const std::vector<MovedRows> q = moved_rows(pack, plan.mask, visiting, {1, 0}),
                               k = moved_rows(pack, plan.mask, visiting, {0, 1});
  const bool keeps_inputs = std::any_of(plan.tasks.begin(), plan.tasks.end(),
                                        [](const planner::Task& task) { return task.is_kept; });
  for (int64_t rank = 0; rank < pack.num_ranks; ++rank) {
    const int64_t num_words = most_row_words(q[rank], k[rank], pack.num_rows[rank], keeps_inputs);
    TORCH_CHECK_VALUE(num_words <= kMaxRows, "plan: rank ", rank, " holds ", pack.num_rows[rank],
                      " tokens, would send ", q[rank].sent, " query rows and ", k[rank].sent,
                      " key rows and be sent ", q[rank].visiting, " and ", k[rank].visiting,
                      ", which takes ", num_words, " row indices; expected at most ", kMaxRows,
                      ". Plan fewer tokens in one step, or shorter documents over fewer ranks");
  }
}

std::vector<at::Tensor> gather(const at::Tensor& words, c10::string_view group_name, int64_t step) {
  const std::span<const int64_t> own = words_of<int64_t>(words, "words");
  const std::string_view bytes(reinterpret_cast<const char*>(own.data()), own.size_bytes());
  const auto session = find_session(std::string(group_name));
  std::vector<at::Tensor> gathered;
  for (const std::string& text :
       session->planning().gather(bytes, {"plan", "", -1, step}, "the plan of a step")) {
    at::Tensor& theirs = gathered.emplace_back(
        at::empty({static_cast<int64_t>(text.size() / sizeof(int64_t))}, at::kLong));
    std::memcpy(theirs.mutable_data_ptr<int64_t>(), text.data(), theirs.nbytes());
  }
  return gathered;
}

std::tuple<at::Tensor, at::Tensor> plan(const at::Tensor& pieces, int64_t num_ranks,
                                        int64_t window_left, int64_t window_right,
                                        const at::Tensor& cost, at::IntArrayRef row_bytes,
                                        const at::Tensor& servers, const at::Tensor& links,
                                        double tolerance, int64_t rounds, double kept_cap_bytes,
                                        at::OptionalIntArrayRef held_bytes,
                                        at::OptionalIntArrayRef kept_bytes, double kept_gain) {
  TORCH_CHECK_VALUE(kept_cap_bytes == 0 || kept_bytes, "kept_cap_bytes is ", kept_cap_bytes,
                    ", but kept_bytes does not say what a kept row takes");
  TORCH_CHECK_VALUE(window_left >= -1 && window_right >= -1, "window is (", window_left, ", ",
                    window_right, "); expected -1 (no limit) or more");
  const planner::Pack pack = decode_pack(pieces, num_ranks);
  planner::PlanOptions options;
  options.mask = {window_left, window_right};
  options.cost = decode_cost(cost);
  options.row_bytes = decode_row_bytes(row_bytes, "row_bytes");
  options.held_bytes = decode_row_bytes(held_bytes.value_or(row_bytes), "held_bytes");
  if (kept_bytes) options.kept_bytes = decode_row_bytes(*kept_bytes, "kept_bytes");
  options.kept_cap_bytes = kept_cap_bytes;
  options.kept_gain = kept_gain;
  options.servers = decode_servers(servers, num_ranks);
  options.links = decode_links(links);
  options.tolerance = tolerance;
  TORCH_CHECK_VALUE(rounds >= 1, "rounds is ", rounds, "; expected at least 1");
  const planner::Plan plan =
      as_value_error([&] { return planner::plan_for_rounds(pack, options, rounds); });
  check_row_indices(pack, plan);
  return {encode_plan(plan), encode_loads(plan.loads)};
}

double layer_seconds(const at::Tensor& loads, const at::Tensor& servers, const at::Tensor& links) {
  const auto values = words_of<double>(loads, "loads");
  TORCH_CHECK_VALUE(loads.dim() == 2 && loads.size(1) == kLoadColumns, "loads has shape ",
                    loads.sizes(), "; expected [num_ranks, ", kLoadColumns,
                    "], as plan returns it");
  planner::PlanOptions options;
  options.servers = decode_servers(servers, loads.size(0));
  options.links = decode_links(links);
  std::vector<planner::Load> decoded;
  double seconds = 0, speed = 0;  // at speed 1, and of all servers
  for (int64_t rank = 0; rank < loads.size(0); ++rank) {
    const double* row = values.data() + rank * kLoadColumns;
    const auto bytes = [row](int64_t column) { return static_cast<int64_t>(row[column]); };
    decoded.push_back({.seconds = row[1],
                       .seconds_visiting = row[7],
                       .seconds_lag = options.lag_seconds(rank),
                       .bytes_out = bytes(2),
                       .bytes_in = bytes(3),
                       .node_bytes_out = bytes(4),
                       .node_bytes_in = bytes(5)});
    seconds += row[1] * options.speed(rank);
    speed += options.speed(rank);
  }
  const double hidden_seconds = options.links.hidden(seconds / speed);
  return planner::makespan(decoded, options.links, hidden_seconds) +
         planner::friction(decoded, options.links);
}

at::Tensor plan_of_tasks(const at::Tensor& pieces, const at::Tensor& tasks, int64_t num_ranks,
                         int64_t window_left, int64_t window_right) {
  const auto words = words_of<int64_t>(tasks, "tasks");
  TORCH_CHECK_VALUE(
      tasks.dim() == 2 && (tasks.size(1) == kTaskWords || tasks.size(1) == kTaskWords - 1),
      "tasks has shape ", tasks.sizes(), "; expected [num_tasks, ", kTaskWords - 1,
      "]: document, q_begin, q_end, server; or a column more: whether inputs are kept");
  const planner::Pack pack = decode_pack(pieces, num_ranks);
  std::vector<planner::Task> decoded = decode_tasks(words, tasks.size(1));
  return as_value_error([&] {
    const Mask mask{window_left, window_right};
    return encode_plan(planner::plan_of_tasks(pack, mask, std::move(decoded)));
  });
}

std::tuple<at::Tensor, at::Tensor> layout(const at::Tensor& pieces, const at::Tensor& plan,
                                          int64_t rank, int64_t step, c10::string_view device_type,
                                          bool deterministic, at::IntArrayRef held_bytes,
                                          std::optional<double> round_bytes, bool by_peer_memory,
                                          std::optional<int64_t> batch, int64_t ranks_per_node,
                                          int64_t num_parts, double early_part) {
  const auto words = words_of<int64_t>(plan, "plan");
  TORCH_CHECK_VALUE(!words.empty(), "plan: empty; make it with distca.plan");
  const planner::Pack pack = decode_pack(pieces, words[kNumRanks]);
  const planner::Plan decoded = decode_plan(plan, pack);
  TORCH_CHECK_VALUE(0 <= ranks_per_node && ranks_per_node <= pack.num_ranks, "ranks_per_node is ",
                    ranks_per_node, "; expected 0 to the plan's ", pack.num_ranks, " ranks");
  TORCH_CHECK_VALUE(1 <= num_parts && num_parts <= kMaxParts, "num_parts is ", num_parts,
                    "; expected 1 to ", kMaxParts);
  TORCH_CHECK_VALUE(0 <= early_part && early_part <= 1, "early_part is ", early_part,
                    "; expected 0 to 1");
  const auto results = by_peer_memory ? planner::Results::kWritten : planner::Results::kTaken;
  std::vector<planner::Layout> rounds;
  const auto add_round = [&](const planner::Plan& round) {
    rounds.push_back(as_value_error(
        [&] { return planner::make_layout(pack, round, rank, results, early_part); }));
  };
  if (round_bytes) {
    const planner::RowBytes held = decode_row_bytes(held_bytes, "held_bytes");
    for (const planner::Plan& round :
         as_value_error([&] { return planner::rounds_of(pack, decoded, held, *round_bytes); })) {
      add_round(round);
    }
  } else {
    add_round(decoded);
  }
  return encode_layout(rounds, decoded,
                       {step, batch.value_or(step), moves_rows(pack, decoded), deterministic,
                        std::string(device_type), ranks_per_node, num_parts});
}

}  // namespace
}  // namespace distca::ops

TORCH_LIBRARY_IMPL(distca, CPU, m) {
  m.impl("gather", distca::ops::gather);
  m.impl("plan", distca::ops::plan);
  m.impl("layer_seconds", distca::ops::layer_seconds);
  m.impl("plan_of_tasks", distca::ops::plan_of_tasks);
  m.impl("layout", distca::ops::layout);
}
