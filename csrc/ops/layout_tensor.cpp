#include "layout_tensor.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <numeric>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/sm90/tiles.h"
#include "planner/shared_rows.h"
#include "row_words.h"
#ifdef DISTCA_WITH_CUDA
#include "attention/aten/waves.h"
#endif

namespace distca::ops {
namespace {

constexpr int64_t kMagic = 0x6469737463610008;  // "distca", format 8
constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();
constexpr int64_t kMinLength = 16;   // torch.compile specialises tensors of length 0 and 1
constexpr int64_t kVectorWords = 4;  // device sections read by 16-byte loads start at multiples
constexpr int64_t kItemWords = 8;    // of a QueryTile, of a KeyBlock
static_assert(sizeof(attention::sm90::QueryTile) == kItemWords * sizeof(int32_t));
static_assert(sizeof(attention::sm90::KeyBlock) == kItemWords * sizeof(int32_t));
static_assert(sizeof(attention::sm90::FlagRange) == 2 * sizeof(int32_t));
constexpr int64_t kTaskWords = 7;

int64_t aligned(int64_t word) {
  return (word + kVectorWords - 1) / kVectorWords * kVectorWords;
}

// Header of the host tensor; counts per peer, tasks, waves and tile tables follow in the order of
// encode_layout.
enum Header : int64_t {
  kMagicWord,
  kLength,
  kStep,
  kPlanDigest,
  kNumRanks,
  kNumHomeRows,
  kMovesRows,
  kWindowLeft,
  kWindowRight,
  kNumVisitingQ,
  kNumVisitingK,
  kDeterministic,
  kNumCounted,
  kNumRowWords,
  kNumContextRows,
  kHeaderLength
};

at::Tensor padded_tensor(const std::vector<int64_t>& values) {
  const int64_t length = std::max<int64_t>(static_cast<int64_t>(values.size()), kMinLength);
  at::Tensor tensor = at::empty({length}, at::kLong);
  int64_t* data = tensor.mutable_data_ptr<int64_t>();
  std::copy(values.begin(), values.end(), data);
  std::fill(data + values.size(), data + length, int64_t{0});
  return tensor;
}

int64_t length_of(const std::vector<planner::Run>& runs) {
  return std::accumulate(runs.begin(), runs.end(), int64_t{0},
                         [](int64_t sum, planner::Run run) { return sum + run.length; });
}

// Tiles, key blocks, and the arrival flags of each run.
std::vector<int32_t> words_of(const attention::sm90::TileLists& lists) {
  std::vector<int32_t> words;
  const auto append = [&words](const auto& item) {
    const auto item_words = std::bit_cast<std::array<int32_t, kItemWords>>(item);
    words.insert(words.end(), item_words.begin(), item_words.end());
  };
  for (const attention::sm90::QueryTile& tile : lists.tiles) append(tile);
  for (const attention::sm90::KeyBlock& block : lists.blocks) append(block);
  for (const attention::sm90::FlagRange& flags : lists.flags) {
    words.insert(words.end(), {flags.begin, flags.end});
  }
  return words;
}

// Appends sections, each preceded by its length on the host side.
struct Writer {
  std::vector<int64_t> host;
  RowWords device;

  void counts(const std::vector<int64_t>& values) {
    host.insert(host.end(), values.begin(), values.end());
  }
  void section(const std::vector<int32_t>& words) {
    host.push_back(static_cast<int64_t>(words.size()));
    device.append(words);
  }
  void section(const std::vector<planner::Run>& runs) {
    host.push_back(length_of(runs));
    for (const planner::Run& run : runs) device.append_counted(run.first, run.length);
  }
  void tasks(const std::vector<attention::Task>& tasks, const attention::Mask& mask,
             const std::string& device_type);
#ifdef DISTCA_WITH_CUDA
  void tiles(const attention::sm90::TileLists& lists);
#endif
};

std::vector<attention::Task> tasks_of(const std::vector<planner::PlacedTask>& placed) {
  std::vector<attention::Task> tasks;
  for (const planner::PlacedTask& t : placed) {
    tasks.push_back(
        {t.q_row, t.num_q_rows, t.k_row, t.num_k_rows, t.q_offset, t.first_flag, t.last_flag});
  }
  return tasks;
}

void Writer::tasks(const std::vector<attention::Task>& tasks, const attention::Mask& mask,
                   const std::string& device_type) {
  host.push_back(static_cast<int64_t>(tasks.size()));
  for (const attention::Task& t : tasks) {
    counts({t.q_row, t.num_q_rows, t.k_row, t.num_k_rows, t.q_offset, t.first_flag, t.last_flag});
  }
#ifdef DISTCA_WITH_CUDA
  if (device_type == "cuda") {
    const attention::aten::Waves waves = attention::aten::make_waves(tasks);
    host.push_back(static_cast<int64_t>(waves.waves.size()));
    for (const attention::VarlenWave& w : waves.waves) {
      counts({w.num_sequences, w.max_q, w.max_k, w.first_task, w.last_task});
    }
    host.push_back(static_cast<int64_t>(waves.order.size()));
    counts(waves.order);
    section(waves.cu_seqlens);
    host.push_back(static_cast<int64_t>(std::size(attention::sm90::kTileRows)));
    for (const int32_t tile_rows : attention::sm90::kTileRows) {
      tiles(attention::sm90::make_tile_lists(tasks, mask, tile_rows));
    }
    return;
  }
#endif
  host.insert(host.end(), {0, 0});  // no waves, no order
  section(std::vector<int32_t>{});
  host.push_back(0);  // no tile tables
}

#ifdef DISTCA_WITH_CUDA
void Writer::tiles(const attention::sm90::TileLists& lists) {
  counts({lists.tile_rows, static_cast<int64_t>(lists.tiles.size()),
          static_cast<int64_t>(lists.blocks.size()), lists.num_runs, lists.num_key_rows});
  device.append(std::vector<int32_t>(aligned(device.size()) - device.size(), 0));
  section(words_of(lists));
}
#endif

struct Reader {
  const int64_t* host;
  int64_t num_host;
  at::Tensor rows;
  attention::Mask mask;
  int64_t next_host = 0;
  int64_t next_row = 0;

  int64_t word() {
    TORCH_CHECK_VALUE(next_host < num_host, "layout: truncated at word ", next_host, " of ",
                      num_host);
    return host[next_host++];
  }
  std::vector<int64_t> row_counts(int64_t num_ranks) {
    std::vector<int64_t> values = counts(num_ranks);
    for (const int64_t value : values) {
      TORCH_CHECK_VALUE(0 <= value && value <= kMaxRows, "layout: ", value,
                        " rows for one peer; expected 0 to ", kMaxRows);
    }
    return values;
  }
  // Values below `limit`. Checked on the CPU; on a device they are as the host wrote them.
  at::Tensor indices(int64_t num_expected, int64_t limit) {
    at::Tensor section = device_section();
    TORCH_CHECK_VALUE(section.size(0) == num_expected, "layout: a section of ", section.size(0),
                      " rows does not match the counts, which say ", num_expected);
    if (!section.is_cpu()) return section;
    const auto* values = section.const_data_ptr<int32_t>();
    const bool inside = std::all_of(values, values + section.size(0),
                                    [limit](int32_t value) { return 0 <= value && value < limit; });
    TORCH_CHECK_VALUE(inside, "rows: an index is outside [0, ", limit, ")");
    return section;
  }
  std::vector<int64_t> counts(int64_t num) {
    TORCH_CHECK_VALUE(num >= 0 && num <= num_host - next_host, "layout: section of ", num,
                      " words does not fit in the ", num_host - next_host, " that are left");
    std::vector<int64_t> values(host + next_host, host + next_host + num);
    next_host += num;
    return values;
  }
  int64_t small_word(const char* name) {
    const int64_t value = word();
    TORCH_CHECK_VALUE(0 <= value && value <= num_host, "layout: ", value, " ", name,
                      " do not fit in ", num_host, " words");
    return value;
  }
  at::Tensor device_section() {
    const int64_t length = word();
    TORCH_CHECK_VALUE(length >= 0 && length <= rows.size(0) - next_row, "rows: section of ", length,
                      " does not fit in the ", rows.size(0) - next_row, " that are left");
    at::Tensor section = rows.narrow(0, next_row, length);
    next_row += length;
    return section;
  }
  // A slot table may be left out: identity.
  at::Tensor slots(int64_t num_visiting) {
    const bool is_identity = next_host < num_host && host[next_host] == 0;
    return indices(is_identity ? 0 : num_visiting, num_visiting);
  }
  attention::TaskList tasks();
  attention::TileTable tiles(const std::vector<attention::Task>& tasks,
                             const attention::sm90::KeyCounts& keys, int32_t tile_rows);
  void check_consumed() const;
  transport::Reduction reduction(int64_t num_rows, int64_t num_slots);
  std::optional<PeerRoutes> peer_routes(const Layout& layout);
};

attention::TaskList Reader::tasks() {
  attention::TaskList list;
  const int64_t num_tasks = small_word("tasks");
  const std::vector<int64_t> words = counts(kTaskWords * num_tasks);
  list.tasks.reserve(num_tasks);
  for (int64_t i = 0; i < num_tasks; ++i) {
    const int64_t* t = words.data() + kTaskWords * i;
    list.tasks.push_back({t[0], t[1], t[2], t[3], t[4], t[5], t[6]});
    TORCH_CHECK_VALUE(
        std::all_of(t, t + kTaskWords, [](int64_t word) { return 0 <= word && word <= kMaxRows; }),
        "layout: task ", i, " is ", at::IntArrayRef(t, kTaskWords), "; expected 0 to ", kMaxRows);
    TORCH_CHECK_VALUE(t[5] <= t[6], "layout: task ", i, " waits for flags [", t[5], ", ", t[6],
                      ")");
  }
  const int64_t num_waves = small_word("waves");
  int64_t num_cu_seqlens = 0;
  for (int64_t i = 0; i < num_waves; ++i) {
    const std::vector<int64_t> w = counts(5);
    TORCH_CHECK_VALUE(0 <= w[0] && w[0] <= kMaxRows, "layout: ", w[0], " sequences in a wave");
    num_cu_seqlens += 2 * (w[0] + 1);
    list.waves.push_back({w[0], w[1], w[2], w[3], w[4]});
  }
  list.wave_order = counts(word());
  list.cu_seqlens = device_section();
  TORCH_CHECK_VALUE(list.cu_seqlens.size(0) == num_cu_seqlens, "layout: ", list.cu_seqlens.size(0),
                    " cu_seqlens do not match the waves, which have ", num_cu_seqlens);
  const int64_t num_tables = word();
  if (num_tables == 0) return list;
  const std::span heights = attention::sm90::kTileRows;
  TORCH_CHECK_VALUE(num_tables == static_cast<int64_t>(heights.size()), "layout: ", num_tables,
                    " tile tables; expected 0 or ", heights.size());
  const attention::sm90::KeyCounts keys = attention::sm90::count_keys(list.tasks);
  for (const int32_t tile_rows : heights) list.tiles.push_back(tiles(list.tasks, keys, tile_rows));
  return list;
}

// Words are checked on the CPU; on a device they are as the host wrote them.
attention::TileTable Reader::tiles(const std::vector<attention::Task>& tasks,
                                   const attention::sm90::KeyCounts& keys, int32_t tile_rows) {
  const std::vector<int64_t> w = counts(5);
  attention::TileTable table{w[0], w[1], w[2], w[3], w[4], {}};
  TORCH_CHECK_VALUE(table.tile_rows == tile_rows, "layout: tiles of ", table.tile_rows,
                    " rows; expected ", tile_rows);
  const int64_t num_tiles = attention::sm90::count_tiles(tasks, tile_rows);
  const attention::sm90::KeyCounts found{table.num_blocks, table.num_runs, table.num_key_rows};
  TORCH_CHECK_VALUE(table.num_tiles == num_tiles && found == keys, "layout: a tile table of ",
                    table.num_tiles, " tiles, ", table.num_blocks, " key blocks, ", table.num_runs,
                    " runs and ", table.num_key_rows,
                    " key rows does not match its tasks, which have ", num_tiles, ", ", keys.blocks,
                    ", ", keys.runs, " and ", keys.key_rows);
  next_row = aligned(next_row);
  table.words = device_section();
  const int64_t num_words = kItemWords * (table.num_tiles + table.num_blocks) + 2 * table.num_runs;
  TORCH_CHECK_VALUE(table.words.size(0) == num_words, "layout: a tile table of ",
                    table.words.size(0), " words does not match its counts, which say ", num_words);
  const auto address = reinterpret_cast<uintptr_t>(table.words.const_data_ptr<int32_t>());
  TORCH_CHECK_VALUE(num_words == 0 || address % (kVectorWords * sizeof(int32_t)) == 0,
                    "rows: not aligned to ", kVectorWords * sizeof(int32_t),
                    " bytes, as the kernels read it; pass a tensor of its own, call rows.clone()");
  if (!table.words.is_cpu()) return table;
  const auto made = words_of(attention::sm90::make_tile_lists(tasks, mask, tile_rows));
  TORCH_CHECK_VALUE(std::equal(made.begin(), made.end(), table.words.const_data_ptr<int32_t>()),
                    "rows: the tiles of ", tile_rows,
                    " rows are not those of the layout's tasks; make both with distca.plan");
  return table;
}

std::optional<PeerRoutes> Reader::peer_routes(const Layout& layout) {
  if (word() == 0) return std::nullopt;
  std::span<const int64_t> left(host + next_host, num_host - next_host);
  PeerRoutes routes =
      read_peer_routes(left, layout.num_ranks, layout.num_home_rows, layout.num_home_queries());
  next_host = num_host - static_cast<int64_t>(left.size());
  const auto& [sent, max_visiting_q, max_visiting_k, max_flags] = routes.deliveries;
  for (const attention::Task& task : layout.visiting.tasks) {
    TORCH_CHECK_VALUE(task.last_flag <= max_flags, "layout: a task waits for flag ", task.last_flag,
                      " of ", max_flags);
  }
  TORCH_CHECK_VALUE(
      layout.queries.num_visiting <= max_visiting_q && layout.keys.num_visiting <= max_visiting_k,
      "layout: ", layout.queries.num_visiting, " queries and ", layout.keys.num_visiting,
      " keys visit, more than the most of any server, ", max_visiting_q, " and ", max_visiting_k);
  return routes;
}

void Reader::check_consumed() const {
  TORCH_CHECK_VALUE(next_host == num_host && std::max(next_row, kMinLength) == rows.size(0),
                    "layout: ", num_host - next_host, " of its words and ", rows.size(0) - next_row,
                    " of rows are left over");
}

transport::Reduction Reader::reduction(int64_t num_rows, int64_t num_slots) {
  const int64_t num_reduced = next_host < num_host ? host[next_host] : -1;
  transport::Reduction result;
  result.row = indices(num_reduced, num_rows);
  result.begin = indices(num_reduced + 1, num_slots + 1);
  result.slot = indices(num_slots, num_slots);
  return result;
}

// Home rows whose sent keys come back as gradients, each with its slots in order: rows, where the
// slots of each begin, slots.
void write_reduction(const std::vector<planner::Run>& runs, Writer& writer) {
  const std::vector<planner::SharedRows> shared = planner::shared_rows(runs);
  int64_t num_rows = 0, num_slots = 0;
  for (const planner::SharedRows& rows : shared) {
    num_rows += rows.length;
    num_slots += rows.length * static_cast<int64_t>(rows.slots.size());
  }
  RowWords& device = writer.device;
  writer.host.push_back(num_rows);
  for (const planner::SharedRows& rows : shared) device.append_counted(rows.first, rows.length);

  writer.host.push_back(num_rows + 1);
  auto at = static_cast<int32_t>(device.reserve(num_rows + 1));
  device.add({at++, 1, 0, 0, 1});
  int32_t num_before = 0;
  for (const planner::SharedRows& rows : shared) {
    const auto length = static_cast<int32_t>(rows.length);
    const auto of_row = static_cast<int32_t>(rows.slots.size());
    device.add({at, 1, num_before + of_row, of_row, length});
    at += length;
    num_before += length * of_row;
  }

  writer.host.push_back(num_slots);
  at = static_cast<int32_t>(device.reserve(num_slots));
  for (const planner::SharedRows& rows : shared) {
    const auto length = static_cast<int32_t>(rows.length);
    const auto of_row = static_cast<int32_t>(rows.slots.size());
    for (int32_t j = 0; j < of_row; ++j) device.add({at + j, of_row, rows.slots[j], 1, length});
    at += length * of_row;
  }
}

int64_t sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

std::span<const int64_t> checked_words(const at::Tensor& layout) {
  TORCH_CHECK_VALUE(layout.device().is_cpu() && layout.scalar_type() == at::kLong &&
                        layout.dim() == 1 && layout.is_contiguous(),
                    "layout: expected a contiguous one-dimensional int64 CPU tensor, got ",
                    layout.toString(), " with ", layout.dim(), " dimensions");
  const int64_t* words = layout.const_data_ptr<int64_t>();
  TORCH_CHECK_VALUE(layout.size(0) >= kHeaderLength && words[kMagicWord] == kMagic &&
                        kHeaderLength <= words[kLength] && words[kLength] <= layout.size(0),
                    "layout: not a layout of this version of distca; make it with distca.plan");
  return {words, static_cast<size_t>(layout.size(0))};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> encode_layout(const planner::Layout& layout,
                                                 const planner::Plan& plan,
                                                 const LayoutOrigin& origin,
                                                 const std::optional<PeerRoutes>& routes) {
  Writer writer;
  writer.host = {kMagic,
                 0,
                 origin.step,
                 static_cast<int64_t>(plan.digest),
                 layout.num_ranks,
                 layout.num_home_rows,
                 origin.moves_rows,
                 plan.mask.window_left,
                 plan.mask.window_right,
                 sum(layout.recv_q_rows),
                 sum(layout.recv_k_rows),
                 origin.deterministic,
                 0,
                 0,
                 layout.num_context_rows};
  for (const auto* counts :
       {&layout.send_q_rows, &layout.recv_q_rows, &layout.send_k_rows, &layout.recv_k_rows}) {
    writer.counts(*counts);
  }
  for (const auto* runs :
       {&layout.send_q_runs, &layout.q_slot_runs, &layout.send_k_runs, &layout.k_slot_runs}) {
    writer.section(*runs);
  }
  write_reduction(layout.send_k_runs, writer);
  const attention::Mask mask{plan.mask.window_left, plan.mask.window_right};
  for (const auto* tasks : {&layout.early_tasks, &layout.late_tasks, &layout.visiting_tasks}) {
    writer.tasks(tasks_of(*tasks), mask, origin.device_type);
  }
  writer.host.push_back(routes.has_value());
  if (routes) append_words(*routes, writer.host);
  const int64_t padding = std::max<int64_t>(0, kMinLength - writer.device.size());
  writer.device.append(std::vector<int32_t>(padding, 0));
  writer.host[kLength] = static_cast<int64_t>(writer.host.size());
  writer.host[kNumCounted] = writer.device.num_counted();
  writer.host[kNumRowWords] = writer.device.size();
  return {padded_tensor(writer.host), writer.device.packed()};
}

at::Tensor unpack_rows(const at::Tensor& layout, const at::Tensor& packed_rows) {
  const std::span<const int64_t> words = checked_words(layout);
  const int64_t num_counted = words[kNumCounted], num_words = words[kNumRowWords];
  TORCH_CHECK_VALUE(0 <= num_counted && num_counted <= num_words && num_words <= kMaxRows,
                    "layout: ", num_counted, " of ", num_words,
                    " words of rows are counted; expected 0 <= counted <= words <= ", kMaxRows);
  const c10::DeviceGuard guard(packed_rows.device());
  return unpack_words(packed_rows, num_counted, num_words);
}

Layout decode_layout(const at::Tensor& layout, const at::Tensor& rows) {
  const std::span<const int64_t> words = checked_words(layout);
  TORCH_CHECK_VALUE(rows.scalar_type() == at::kInt && rows.dim() == 1 && rows.is_contiguous(),
                    "rows: expected a contiguous one-dimensional int32 tensor, got ",
                    rows.toString());
  TORCH_CHECK_VALUE(0 < words[kNumRanks] && words[kNumRanks] <= words[kLength],
                    "layout: ", words[kNumRanks], " ranks do not fit in ", words[kLength],
                    " words");
  Reader reader{
      words.data(), words[kLength], rows, {words[kWindowLeft], words[kWindowRight]}, kHeaderLength};
  for (const Header field : {kNumHomeRows, kNumVisitingQ, kNumVisitingK}) {
    TORCH_CHECK_VALUE(0 <= words[field] && words[field] <= kMaxRows, "layout: ", words[field],
                      " rows; expected 0 to ", kMaxRows);
  }
  TORCH_CHECK_VALUE(0 <= words[kNumContextRows] && words[kNumContextRows] <= words[kNumHomeRows],
                    "layout: ", words[kNumContextRows], " context rows; expected 0 to ",
                    words[kNumHomeRows]);
  Layout decoded;
  decoded.step = words[kStep];
  decoded.plan_digest = static_cast<uint64_t>(words[kPlanDigest]);
  decoded.num_ranks = words[kNumRanks];
  decoded.num_home_rows = words[kNumHomeRows];
  decoded.num_context_rows = words[kNumContextRows];
  decoded.moves_rows = words[kMovesRows] != 0;
  decoded.mask = reader.mask;
  decoded.deterministic = words[kDeterministic] != 0;
  decoded.queries.num_visiting = words[kNumVisitingQ];
  decoded.keys.num_visiting = words[kNumVisitingK];
  for (Route* route : {&decoded.queries, &decoded.keys}) {
    route->counts.send = reader.row_counts(words[kNumRanks]);
    route->counts.recv = reader.row_counts(words[kNumRanks]);
    TORCH_CHECK_VALUE(sum(route->counts.recv) == route->num_visiting,
                      "layout: ", sum(route->counts.recv), " rows arrive, but ",
                      route->num_visiting, " are visiting");
  }
  for (Route* route : {&decoded.queries, &decoded.keys}) {
    const bool is_queries = route == &decoded.queries;
    route->home_row = reader.indices(
        sum(route->counts.send), is_queries ? decoded.num_home_queries() : decoded.num_home_rows);
    route->slot = reader.slots(route->num_visiting);
  }
  decoded.key_gradients = reader.reduction(decoded.num_home_rows, sum(decoded.keys.counts.send));
  TORCH_CHECK_VALUE(reader.next_row == words[kNumCounted] && rows.size(0) == words[kNumRowWords],
                    "layout: ", words[kNumCounted], " of ", words[kNumRowWords],
                    " words of rows are counted; its sections say ", reader.next_row, " of ",
                    rows.size(0));
  for (auto* tasks : {&decoded.early, &decoded.late, &decoded.visiting}) *tasks = reader.tasks();
  TORCH_CHECK_VALUE(decoded.moves_rows || decoded.late.tasks.empty(),
                    "layout: ", decoded.late.tasks.size(), " late tasks where no rank moves rows");
  decoded.peers = reader.peer_routes(decoded);
  reader.check_consumed();
  return decoded;
}

}  // namespace distca::ops
