#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <span>
#include <tuple>
#include <utility>

#include "layout_tensor.h"
#include "layout_words.h"
#include "row_words.h"
#include "transport/process_group/slots.h"

namespace distca::ops {
namespace {

// The number of rows of each kind, for queries or for keys.
struct PlaceLimits {
  int64_t home;
  int64_t visiting;
  int64_t result;
};

struct Reader {
  const int64_t* host;
  int64_t num_host;
  at::Tensor rows;
  Mask mask;
  int64_t next_host = 0;
  int64_t next_row = 0;

  int64_t word() {
    TORCH_CHECK_VALUE(next_host < num_host, "layout: truncated at word ", next_host, " of ",
                      num_host);
    return host[next_host++];
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
  at::Tensor slot_indices(int64_t num_visiting) {
    const bool is_identity = next_host < num_host && host[next_host] == 0;
    return indices(is_identity ? 0 : num_visiting, num_visiting);
  }
  int64_t below(int64_t limit, const char* name);
  std::vector<RowPlace> places(const PlaceLimits& limits);
  std::vector<Delivery> deliveries(const Layout& layout, const Movement& most, bool are_sent);
  Movement movement(const Layout& layout);
  void slots(const Layout& layout, const Movement& movement, transport::Moving moving,
             transport::Route& queries, transport::Route& keys);
  transport::Keeping keeping(const Layout& layout, const transport::Routes& routes);
  transport::Routes routes(const Layout& layout);
  attention::TaskList tasks();
  attention::TaskWords backend_words();
  void check_consumed() const;
  transport::Reduction reduction(int64_t num_rows, int64_t num_slots);
};

attention::TaskList Reader::tasks() {
  attention::TaskList list;
  list.mask = mask;
  const int64_t num_tasks = small_word("tasks");
  const std::vector<int64_t> words = counts(kTaskWords * num_tasks);
  list.tasks.reserve(num_tasks);
  for (int64_t i = 0; i < num_tasks; ++i) {
    const int64_t* t = words.data() + kTaskWords * i;
    list.tasks.push_back({t[0], t[1], t[2], t[3], t[4]});
    TORCH_CHECK_VALUE(
        std::all_of(t, t + kTaskWords, [](int64_t word) { return 0 <= word && word <= kMaxRows; }),
        "layout: task ", i, " is ", at::IntArrayRef(t, kTaskWords), "; expected 0 to ", kMaxRows);
  }
  const int64_t num_backends = small_word("back ends");
  for (int64_t i = 0; i < num_backends; ++i) list.words.push_back(backend_words());
  attention::check_words(list);
  return list;
}

attention::TaskWords Reader::backend_words() {
  attention::TaskWords words{.backend = word()};
  words.host = counts(word());
  next_row = round_up(next_row, kVectorWords);
  words.device = device_section();
  const auto address = reinterpret_cast<uintptr_t>(words.device.const_data_ptr<int32_t>());
  constexpr int64_t kAlignment = kVectorWords * sizeof(int32_t);
  TORCH_CHECK_VALUE(words.device.numel() == 0 || address % kAlignment == 0, "rows: not aligned to ",
                    kAlignment,
                    " bytes, as the kernels read it; pass a tensor of its own, call rows.clone()");
  return words;
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

int64_t Reader::below(int64_t limit, const char* name) {
  const int64_t value = word();
  TORCH_CHECK_VALUE(0 <= value && value < limit, "layout: ", name, " is ", value,
                    "; expected 0 <= ", name, " < ", limit);
  return value;
}

std::vector<RowPlace> Reader::places(const PlaceLimits& limits) {
  std::vector<RowPlace> places(small_word("places"));
  for (auto& [home_row, visiting_row, result_row, num_rows] : places) {
    home_row = below(limits.home, "home row");
    visiting_row = below(limits.visiting, "visiting row");
    result_row = below(limits.result, "result row");
    num_rows = below(kMaxRows, "rows");
    const int64_t fit = std::min(
        {limits.home - home_row, limits.visiting - visiting_row, limits.result - result_row});
    TORCH_CHECK_VALUE(num_rows <= fit, "layout: ", num_rows, " rows from home row ", home_row,
                      ", visiting row ", visiting_row, " and result row ", result_row,
                      " on are more than the ", limits.home, ", ", limits.visiting, " and ",
                      limits.result, " there are");
  }
  return places;
}

// `most` has the largest numbers of rows. The number of home rows is known for this rank only.
std::vector<Delivery> Reader::deliveries(const Layout& layout, const Movement& most,
                                         bool are_sent) {
  std::vector<Delivery> deliveries(small_word("deliveries"));
  int64_t last_peer = 0;
  for (Delivery& delivery : deliveries) {
    delivery.peer = below(layout.num_ranks, "peer");
    const bool is_own = delivery.peer == layout.rank;
    TORCH_CHECK_VALUE(
        std::exchange(last_peer, delivery.peer) <= delivery.peer && (are_sent || !is_own),
        "layout: a delivery between ranks ", layout.rank, " and ", delivery.peer,
        "; expected them by rank, and those to the rank itself among the sent ones");
    delivery.is_kept = below(2, "whether it is kept") == 1;
    const int64_t home_q = are_sent ? layout.num_home_queries() : kMaxRows;
    const int64_t home_k = are_sent ? layout.num_home_rows : kMaxRows;
    delivery.queries =
        places({home_q, most.max_visiting_q, is_own ? most.max_visiting_q : most.max_returned_q});
    delivery.keys =
        places({home_k, most.max_visiting_k, is_own ? most.max_visiting_k : most.max_returned_k});
  }
  return deliveries;
}

Movement Reader::movement(const Layout& layout) {
  Movement movement;
  movement.max_visiting_q = below(kMaxRows, "visiting queries");
  movement.max_visiting_k = below(kMaxRows, "visiting keys");
  movement.max_returned_q = below(kMaxRows, "returned queries");
  movement.max_returned_k = below(kMaxRows, "returned keys");
  movement.sent = deliveries(layout, movement, true);
  movement.received = deliveries(layout, movement, false);
  return movement;
}

void Reader::slots(const Layout& layout, const Movement& movement, transport::Moving moving,
                   transport::Route& queries, transport::Route& keys) {
  const transport::Slots slots =
      transport::slots_of(movement, layout.rank, layout.num_ranks, moving);
  queries.counts = {slots.send_q_rows, slots.recv_q_rows};
  keys.counts = {slots.send_k_rows, slots.recv_k_rows};
  for (transport::Route* route : {&queries, &keys}) {
    const bool are_queries = route == &queries;
    route->num_visiting = sum(route->counts.recv);
    const int64_t most = are_queries ? movement.max_visiting_q : movement.max_visiting_k;
    TORCH_CHECK_VALUE(route->num_visiting <= most, "layout: ", route->num_visiting,
                      are_queries ? " queries" : " keys",
                      " visit, more than the most of any server, ", most);
    route->home_row = indices(sum(route->counts.send),
                              are_queries ? layout.num_home_queries() : layout.num_home_rows);
    route->slot = slot_indices(route->num_visiting);
  }
}

transport::Keeping Reader::keeping(const Layout& layout, const transport::Routes& routes) {
  transport::Keeping keeping;
  slots(layout, routes.movement, transport::Moving::kNotKept, keeping.queries, keeping.keys);
  const int64_t num_q = routes.queries.num_visiting, num_k = routes.keys.num_visiting;
  const int64_t moved_q = keeping.queries.num_visiting, moved_k = keeping.keys.num_visiting;
  keeping.moved_q = indices(moved_q, num_q);
  keeping.moved_k = indices(moved_k, num_k);
  keeping.kept_q = indices(num_q - moved_q, num_q);
  keeping.kept_k = indices(num_k - moved_k, num_k);
  return keeping;
}

transport::Routes Reader::routes(const Layout& layout) {
  transport::Routes routes;
  routes.movement = movement(layout);
  routes.key_gradients = key_gradients(routes.movement);
  for (const KeyGradients& rows : routes.key_gradients) {
    const auto twice =
        std::adjacent_find(rows.sources.begin(), rows.sources.end(),
                           [](const auto& a, const auto& b) { return a.server == b.server; });
    TORCH_CHECK_VALUE(twice == rows.sources.end(), "layout: keys from home row ", rows.home_row,
                      " on are sent to rank ", twice->server, " twice; expected once");
  }
  slots(layout, routes.movement, transport::Moving::kAll, routes.queries, routes.keys);
  routes.key_sums = reduction(layout.num_home_rows, sum(routes.keys.counts.send));
  if (keeps_any(routes.movement)) routes.keeping = keeping(layout, routes);
  return routes;
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

at::Tensor unpack_rows(const at::Tensor& layout, const at::Tensor& packed_rows) {
  const std::span<const int64_t> words = checked_words(layout);
  const int64_t num_counted = words[kNumCounted], num_words = words[kNumRowWords];
  TORCH_CHECK_VALUE(0 <= num_counted && num_counted <= num_words && num_words <= kMaxRows,
                    "layout: ", num_counted, " of ", num_words,
                    " words of rows are counted; expected 0 <= counted <= words <= ", kMaxRows);
  const c10::DeviceGuard guard(packed_rows.device());
  return unpack_words(packed_rows, num_counted, num_words);
}

std::vector<int64_t> kept_rows(const at::Tensor& layout) {
  const std::span<const int64_t> words = checked_words(layout);
  return {words[kNumKeptQueries], words[kNumKeptKeys]};
}

Layout decode_layout(const at::Tensor& layout, const at::Tensor& rows) {
  const std::span<const int64_t> words = checked_words(layout);
  TORCH_CHECK_VALUE(rows.scalar_type() == at::kInt && rows.dim() == 1 && rows.is_contiguous(),
                    "rows: expected a contiguous one-dimensional int32 tensor, got ",
                    rows.toString());
  TORCH_CHECK_VALUE(0 < words[kNumRanks] && words[kNumRanks] <= words[kLength],
                    "layout: ", words[kNumRanks], " ranks do not fit in ", words[kLength],
                    " words");
  TORCH_CHECK_VALUE(0 <= words[kRank] && words[kRank] < words[kNumRanks], "layout: rank ",
                    words[kRank], " of ", words[kNumRanks]);
  Reader reader{
      words.data(), words[kLength], rows, {words[kWindowLeft], words[kWindowRight]}, kHeaderLength};
  TORCH_CHECK_VALUE(0 <= words[kNumHomeRows] && words[kNumHomeRows] <= kMaxRows,
                    "layout: ", words[kNumHomeRows], " rows; expected 0 to ", kMaxRows);
  TORCH_CHECK_VALUE(0 < words[kNumRounds] && words[kNumRounds] <= words[kLength],
                    "layout: ", words[kNumRounds], " rounds; expected 1 to ", words[kLength]);
  TORCH_CHECK_VALUE(0 <= words[kNumContextRows] && words[kNumContextRows] <= words[kNumHomeRows],
                    "layout: ", words[kNumContextRows], " context rows; expected 0 to ",
                    words[kNumHomeRows]);
  TORCH_CHECK_VALUE(
      words[kBatch] == words[kStep] || (0 <= words[kBatch] && words[kBatch] < words[kStep]),
      "layout: batch ", words[kBatch], " of step ", words[kStep],
      "; expected this step or an earlier one");
  Layout decoded;
  decoded.step = words[kStep];
  decoded.batch = words[kBatch];
  decoded.plan_digest = static_cast<uint64_t>(words[kPlanDigest]);
  decoded.num_ranks = words[kNumRanks];
  decoded.rank = words[kRank];
  decoded.num_home_rows = words[kNumHomeRows];
  decoded.num_context_rows = words[kNumContextRows];
  decoded.moves_rows = words[kMovesRows] != 0;
  decoded.mask = reader.mask;
  decoded.deterministic = words[kDeterministic] != 0;
  decoded.device = rows.device();
  decoded.rounds.resize(words[kNumRounds]);
  int64_t num_kept_q = 0, num_kept_k = 0;
  for (Round& round : decoded.rounds) {
    round.routes = reader.routes(decoded);
    if (!round.routes.keeping) continue;
    num_kept_q += round.routes.keeping->kept_q.size(0);
    num_kept_k += round.routes.keeping->kept_k.size(0);
  }
  TORCH_CHECK_VALUE(num_kept_q == words[kNumKeptQueries] && num_kept_k == words[kNumKeptKeys],
                    "layout: ", words[kNumKeptQueries], " queries and ", words[kNumKeptKeys],
                    " keys are kept; its sections say ", num_kept_q, " and ", num_kept_k);
  TORCH_CHECK_VALUE(reader.next_row == words[kNumCounted] && rows.size(0) == words[kNumRowWords],
                    "layout: ", words[kNumCounted], " of ", words[kNumRowWords],
                    " words of rows are counted; its sections say ", reader.next_row, " of ",
                    rows.size(0));
  for (Round& round : decoded.rounds) {
    for (auto* tasks : {&round.early, &round.late, &round.visiting}) *tasks = reader.tasks();
    const bool is_first = &round == &decoded.rounds.front();
    TORCH_CHECK_VALUE((decoded.moves_rows || round.late.tasks.empty()) &&
                          (is_first || round.early.tasks.size() + round.late.tasks.size() == 0),
                      "layout: ", round.early.tasks.size(), " early and ", round.late.tasks.size(),
                      " late tasks; home tasks are early ones where no rank moves rows, and of the "
                      "first round");
  }
  reader.check_consumed();
  return decoded;
}

}  // namespace distca::ops
