#include "layout_tensor.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "layout_words.h"

namespace distca::ops {
namespace {

// A part of a movement, and this rank's number among the ranks of the part.
struct PartOfNode {
  Part part;
  int64_t rank, num_ranks;
};

// Returns the parts inside the rank's node and between nodes.
std::array<PartOfNode, 2> parts_of(const LayoutHeader& layout, const Movement& movement) {
  const auto& [rank, num_ranks] = std::tie(layout.rank, layout.num_ranks);
  const distca::Range node = node_of(rank, num_ranks, layout.ranks_per_node);
  return {{{part_of(movement, node, Reach::kInside), rank - node.begin, num_rows(node)},
           {part_of(movement, node, Reach::kBetween), rank, num_ranks}}};
}

// The numbers of rows at the ends of a delivery.
struct Ends {
  int64_t home, visiting, result;
};

void check_places(const std::vector<RowPlace>& places, const Ends& ends) {
  for (const auto& [home_row, visiting_row, result_row, num_rows] : places) {
    TORCH_CHECK_VALUE(num_rows <= std::min({ends.home - home_row, ends.visiting - visiting_row,
                                            ends.result - result_row}),
                      "layout: ", num_rows, " rows from home row ", home_row, ", visiting row ",
                      visiting_row, " and result row ", result_row, " on are more than the ",
                      ends.home, ", ", ends.visiting, " and ", ends.result, " there are");
  }
}

int64_t num_visiting(const Movement& movement, int64_t rank,
                     std::vector<RowPlace> Delivery::*places, int64_t most) {
  int64_t num_rows = 0;
  for (const Delivery* delivery : visitors(movement, rank)) {
    for (const RowPlace& place : delivery->*places) num_rows += place.num_rows;
  }
  TORCH_CHECK_VALUE(num_rows <= most, "layout: ", num_rows,
                    " rows visit, more than the most of any server, ", most);
  return num_rows;
}

// Of other ranks' rows only the most of any rank are known.
void check_deliveries(const Layout& layout, const transport::Routes& routes, bool are_sent) {
  const Movement& movement = routes.movement;
  int64_t last_peer = 0;
  for (const Delivery& delivery : are_sent ? movement.sent : movement.received) {
    const bool is_own = delivery.peer == layout.rank, visits = is_own || !are_sent;
    TORCH_CHECK_VALUE(std::exchange(last_peer, delivery.peer) <= delivery.peer &&
                          delivery.peer < layout.num_ranks && (are_sent || !is_own),
                      "layout: a delivery between rank ", layout.rank, " and rank ", delivery.peer,
                      " of ", layout.num_ranks,
                      "; expected them by rank, and those to the rank itself among the sent ones");
    check_places(delivery.queries, {are_sent ? layout.num_home_queries() : kMaxRows,
                                    visits ? routes.queries.num_visiting : movement.max_visiting_q,
                                    is_own ? movement.max_visiting_q : movement.max_returned_q});
    check_places(delivery.keys, {are_sent ? layout.num_home_rows : kMaxRows,
                                 visits ? routes.keys.num_visiting : movement.max_visiting_k,
                                 is_own ? movement.max_visiting_k : movement.max_returned_k});
  }
}

void check_key_gradients(const std::vector<KeyGradients>& gradients) {
  for (const KeyGradients& rows : gradients) {
    const auto twice =
        std::adjacent_find(rows.sources.begin(), rows.sources.end(),
                           [](const auto& a, const auto& b) { return a.server == b.server; });
    TORCH_CHECK_VALUE(twice == rows.sources.end(), "layout: keys from home row ", rows.home_row,
                      " on are sent to rank ", twice->server, " twice; expected once");
  }
}

// The index lists of a movement, in order.
class Indices {
 public:
  Indices(Reader& reader, std::vector<IndexList> lists)
      : reader_(reader), lists_(std::move(lists)) {}
  at::Tensor next() { return reader_.indices(lists_[num_read_++]); }

 private:
  Reader& reader_;
  std::vector<IndexList> lists_;
  size_t num_read_ = 0;
};

// `all` holds the counts of all visiting rows.
void read_slots(const transport::Slots& slots, const transport::Routes& all, Indices& indices,
                transport::Route& queries, transport::Route& keys) {
  queries.counts = {slots.send_q_rows, slots.recv_q_rows};
  keys.counts = {slots.send_k_rows, slots.recv_k_rows};
  queries.num_visiting = all.queries.num_visiting;
  keys.num_visiting = all.keys.num_visiting;
  for (transport::Route* route : {&queries, &keys}) {
    route->home_row = indices.next();
    route->visiting_row = indices.next();
  }
}

transport::Routes read_part(const PartOfNode& of_node, const transport::Routes& all,
                            Reader& reader) {
  const auto& [part, rank, num_ranks] = of_node;
  transport::Routes routes{
      .movement = part.movement, .key_gradients = part.key_results, .sums_keys = false};
  const SlotsOfRound slots = slots_of_round(part.movement, rank, num_ranks);
  Indices indices(reader, index_lists(part, slots));
  read_slots(slots.all, all, indices, routes.queries, routes.keys);
  routes.key_sums.row = indices.next();
  if (!slots.again) return routes;
  transport::Keeping& again = routes.keeping.emplace();
  read_slots(*slots.again, all, indices, again.queries, again.keys);
  return routes;
}

transport::Routes read_routes(const Layout& layout, Reader& reader) {
  transport::Routes routes;
  auto& [movement, key_gradients, queries, keys, key_sums, keeping, sums_keys, by_node] = routes;
  describe(reader, movement);
  queries.num_visiting =
      num_visiting(movement, layout.rank, &Delivery::queries, movement.max_visiting_q);
  keys.num_visiting = num_visiting(movement, layout.rank, &Delivery::keys, movement.max_visiting_k);
  for (const bool are_sent : {true, false}) check_deliveries(layout, routes, are_sent);
  key_gradients = distca::key_gradients(movement);
  check_key_gradients(key_gradients);

  const SlotsOfRound slots = slots_of_round(movement, layout.rank, layout.num_ranks);
  Indices indices(reader, index_lists(movement, layout.rank, slots));
  read_slots(slots.all, routes, indices, queries, keys);
  for (at::Tensor* each : {&key_sums.row, &key_sums.begin, &key_sums.slot}) *each = indices.next();
  if (slots.again) {
    transport::Keeping& kept = keeping.emplace();
    read_slots(*slots.again, routes, indices, kept.queries, kept.keys);
    for (at::Tensor* each : {&kept.kept_q, &kept.kept_k}) *each = indices.next();
  }
  if (layout.ranks_per_node == 0) return routes;
  const auto [inside, between] = parts_of(layout, movement);
  // Braces: the parts are read in this order.
  by_node = std::make_shared<const transport::NodeRoutes>(
      transport::NodeRoutes{read_part(inside, routes, reader), read_part(between, routes, reader)});
  return routes;
}

attention::TaskList read_tasks(const Mask& mask, Reader& reader) {
  attention::TaskList list{.mask = mask};
  reader.list(list.tasks);
  reader.list(list.words);
  attention::check_words(list);
  for (const PlacedTask& task : list.tasks) {
    const distca::Range queries{task.q_offset, task.q_offset + task.num_q_rows};
    list.num_pairs += num_pairs(mask, queries, task.num_k_rows);
  }
  return list;
}

void read_rounds(Reader& reader, Layout& layout) {
  int64_t num_kept_q = 0, num_kept_k = 0;
  for (Round& round : layout.rounds) {
    round.routes = read_routes(layout, reader);
    if (!round.routes.keeping) continue;
    num_kept_q += round.routes.keeping->kept_q.size(0);
    num_kept_k += round.routes.keeping->kept_k.size(0);
  }
  TORCH_CHECK_VALUE(num_kept_q == layout.num_kept_queries && num_kept_k == layout.num_kept_keys,
                    "layout: ", layout.num_kept_queries, " queries and ", layout.num_kept_keys,
                    " keys are kept; its movements say ", num_kept_q, " and ", num_kept_k);
  TORCH_CHECK_VALUE(reader.next_row == layout.num_counted, "layout: ", layout.num_counted,
                    " words of rows are counted; its movements say ", reader.next_row);
  for (Round& round : layout.rounds) {
    for (auto* tasks : {&round.early, &round.late, &round.visiting}) {
      *tasks = read_tasks(layout.mask, reader);
    }
    const size_t num_early = round.early.tasks.size(), num_late = round.late.tasks.size();
    const bool is_first = &round == &layout.rounds.front();
    TORCH_CHECK_VALUE(
        (layout.moves_rows || num_late == 0) && (is_first || num_early + num_late == 0),
        "layout: ", num_early, " early and ", num_late,
        " late tasks; home tasks are early ones where no rank moves rows, and of the first round");
  }
  const int64_t num_host_left = static_cast<int64_t>(reader.host.size() - reader.next_host),
                num_rows_left = reader.rows.size(0) - reader.next_row;
  TORCH_CHECK_VALUE(num_host_left == 0 && (num_rows_left == 0 || reader.rows.size(0) == kMinLength),
                    "layout: ", num_host_left, " of its words and ", num_rows_left,
                    " of rows are left over");
}

LayoutHeader read_header(const at::Tensor& layout) {
  TORCH_CHECK_VALUE(layout.device().is_cpu() && layout.scalar_type() == at::kLong &&
                        layout.dim() == 1 && layout.is_contiguous(),
                    "layout: expected a contiguous one-dimensional int64 CPU tensor, got ",
                    layout.toString(), " with ", layout.dim(), " dimensions");
  LayoutHeader header;
  if (layout.size(0) >= kHeaderWords) {
    std::memcpy(static_cast<void*>(&header), layout.const_data_ptr<int64_t>(), sizeof(header));
  }
  TORCH_CHECK_VALUE(
      header.magic == kMagic && kHeaderWords <= header.length && header.length <= layout.size(0),
      "layout: not a layout of this version of distca; make it with distca.plan");
  return header;
}

void check_header(const LayoutHeader& header) {
  const auto check = [](const char* name, int64_t value, int64_t least, int64_t most) {
    TORCH_CHECK_VALUE(least <= value && value <= most, "layout: ", name, " is ", value,
                      "; expected ", least, " to ", most);
  };
  check("num_ranks", header.num_ranks, 1, kMaxRanks);
  check("rank", header.rank, 0, header.num_ranks - 1);
  check("num_rounds", header.num_rounds, 1, header.length);
  check("num_home_rows", header.num_home_rows, 0, kMaxRows);
  check("num_context_rows", header.num_context_rows, 0, header.num_home_rows);
  check("batch", header.batch, std::min<int64_t>(header.step, 0), header.step);
  check("ranks_per_node", header.ranks_per_node, 0, header.num_ranks);
  check("num_parts", header.num_parts, 1, kMaxParts);
}

// Returns a plan's digest, extended by the largest numbers of rows of any server and any home in a
// round.
uint64_t extended(uint64_t digest, const Movement& most) {
  for (const int64_t num_rows :
       {most.max_visiting_q, most.max_visiting_k, most.max_returned_q, most.max_returned_k}) {
    digest = (digest ^ static_cast<uint64_t>(num_rows)) * 0x9e3779b97f4a7c15u;
    digest ^= digest >> 32;
  }
  return digest;
}

void write_parts(const LayoutHeader& header, const Movement& movement, Writer& writer) {
  for (const PartOfNode& each : parts_of(header, movement)) {
    const SlotsOfRound slots = slots_of_round(each.part.movement, each.rank, each.num_ranks);
    for (const IndexList& list : index_lists(each.part, slots)) writer.indices(list);
  }
}

at::Tensor padded_tensor(std::vector<int64_t> values) {
  values.resize(std::max<int64_t>(static_cast<int64_t>(values.size()), kMinLength), 0);
  at::Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, at::kLong);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> encode_layout(const std::vector<planner::Layout>& rounds,
                                                 const planner::Plan& plan,
                                                 const LayoutOrigin& origin) {
  const planner::Layout& any = rounds.front();
  LayoutHeader header{.magic = kMagic,
                      .step = origin.step,
                      .plan_digest = plan.digest,
                      .num_ranks = any.num_ranks,
                      .num_home_rows = any.num_home_rows,
                      .moves_rows = origin.moves_rows,
                      .mask = plan.mask,
                      .num_rounds = static_cast<int64_t>(rounds.size()),
                      .deterministic = origin.deterministic,
                      .num_context_rows = any.num_context_rows,
                      .rank = any.rank,
                      .batch = origin.batch,
                      .ranks_per_node = origin.ranks_per_node,
                      .num_parts = origin.num_parts};
  Writer writer;
  writer.host.resize(kHeaderWords);
  for (const planner::Layout& round : rounds) {
    describe(writer, round.movement);
    const SlotsOfRound slots = slots_of_round(round.movement, any.rank, any.num_ranks);
    const std::vector<IndexList> lists = index_lists(round.movement, any.rank, slots);
    for (const IndexList& list : lists) writer.indices(list);
    if (slots.again) {
      header.num_kept_queries += lists[lists.size() - 2].size;
      header.num_kept_keys += lists.back().size;
    }
    if (header.ranks_per_node > 0) write_parts(header, round.movement, writer);
  }
  for (const planner::Layout& round : rounds) {
    for (const auto* tasks : {&round.early_tasks, &round.late_tasks, &round.visiting_tasks}) {
      writer.list(*tasks);
      writer.list(attention::plan_words(*tasks, plan.mask, origin.device_type));
    }
  }
  writer.pad_rows(kMinLength);
  header.length = static_cast<int64_t>(writer.host.size());
  header.num_counted = writer.num_counted;
  header.num_row_words = writer.num_row_words();
  std::memcpy(writer.host.data(), &header, sizeof(header));
  return {padded_tensor(std::move(writer.host)), writer.packed_rows()};
}

at::Tensor unpack_rows(const at::Tensor& layout, const at::Tensor& packed_rows) {
  const LayoutHeader header = read_header(layout);
  const int64_t num_counted = header.num_counted, num_words = header.num_row_words;
  TORCH_CHECK_VALUE(0 <= num_counted && num_counted <= num_words && num_words <= kMaxRows,
                    "layout: ", num_counted, " of ", num_words,
                    " words of rows are counted; expected 0 <= counted <= words <= ", kMaxRows);
  const c10::DeviceGuard guard(packed_rows.device());
  return unpack_words(packed_rows, num_counted, num_words);
}

std::vector<int64_t> kept_rows(const at::Tensor& layout) {
  const LayoutHeader header = read_header(layout);
  return {header.num_kept_queries, header.num_kept_keys};
}

PlanIdentity identity_of(const Layout& layout) {
  uint64_t digest = layout.plan_digest;
  for (const Round& round : layout.rounds) digest = extended(digest, round.routes.movement);
  return {layout.step, static_cast<int64_t>(digest), layout.mask};
}

PlanIdentity identity_of(const at::Tensor& layout) {
  const LayoutHeader header = read_header(layout);
  check_header(header);
  Reader reader{{layout.const_data_ptr<int64_t>(), static_cast<size_t>(header.length)}, {}};
  uint64_t digest = header.plan_digest;
  for (int64_t round = 0; round < header.num_rounds; ++round) {
    Movement movement;
    describe(reader, movement);
    digest = extended(digest, movement);
  }
  return {header.step, static_cast<int64_t>(digest), header.mask};
}

Layout decode_layout(const at::Tensor& layout, const at::Tensor& rows) {
  Layout decoded{read_header(layout)};
  check_header(decoded);
  TORCH_CHECK_VALUE(rows.scalar_type() == at::kInt && rows.dim() == 1 && rows.is_contiguous() &&
                        rows.size(0) == decoded.num_row_words,
                    "rows: expected a contiguous one-dimensional int32 tensor of ",
                    decoded.num_row_words, " words, got ", rows.toString(), " of ", rows.sizes());
  decoded.device = rows.device();
  decoded.rounds.resize(decoded.num_rounds);
  Reader reader{{layout.const_data_ptr<int64_t>(), static_cast<size_t>(decoded.length)}, rows};
  read_rounds(reader, decoded);
  return decoded;
}

}  // namespace distca::ops
