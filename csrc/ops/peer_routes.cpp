#include "peer_routes.h"

#include <c10/util/Exception.h>

#include <limits>
#include <utility>

#include "planner/shared_rows.h"

namespace distca::ops {
namespace {

constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();

// A key row that was sent, by slot.
struct SentKeys {
  int64_t server;
  planner::RowPlace place;
  int64_t first_slot;
};

int64_t next(std::span<const int64_t>& words, int64_t limit, const char* name) {
  TORCH_CHECK_VALUE(!words.empty(), "layout: truncated before ", name);
  const int64_t value = words.front();
  words = words.subspan(1);
  TORCH_CHECK_VALUE(0 <= value && value < limit, "layout: ", name, " is ", value,
                    "; expected 0 <= ", name, " < ", limit);
  return value;
}

// How many items of at least `num_words` words follow.
int64_t next_count(std::span<const int64_t>& words, int64_t num_words, const char* name) {
  return next(words, static_cast<int64_t>(words.size()) / num_words + 1, name);
}

void check_rows(int64_t first, int64_t count, int64_t limit, const char* name) {
  TORCH_CHECK_VALUE(count <= limit - first, "layout: ", count, " ", name, " from ", first,
                    " on are more than the ", limit, " there are");
}

void append_places(const std::vector<planner::RowPlace>& places, std::vector<int64_t>& words) {
  words.push_back(static_cast<int64_t>(places.size()));
  for (const auto& [home_row, visiting_row, num_rows] : places) {
    words.insert(words.end(), {home_row, visiting_row, num_rows});
  }
}

std::vector<planner::RowPlace> read_places(std::span<const int64_t>& words, int64_t num_home_rows,
                                           int64_t max_visiting) {
  std::vector<planner::RowPlace> places(next_count(words, 3, "places"));
  for (auto& [home_row, visiting_row, num_rows] : places) {
    home_row = next(words, num_home_rows, "home row");
    visiting_row = next(words, max_visiting, "visiting row");
    num_rows = next(words, kMaxRows, "rows");
    check_rows(home_row, num_rows, num_home_rows, "home rows");
    check_rows(visiting_row, num_rows, max_visiting, "visiting rows");
  }
  return places;
}

}  // namespace

PeerRoutes peer_routes(planner::Deliveries deliveries) {
  std::vector<planner::Run> runs;
  std::vector<SentKeys> sent;
  int64_t slot = 0;
  for (const planner::Delivery& delivery : deliveries.sent) {
    for (const planner::RowPlace& place : delivery.keys) {
      runs.push_back({place.home_row, place.num_rows});
      sent.push_back({delivery.server, place, slot});
      slot += place.num_rows;
    }
  }
  PeerRoutes routes{std::move(deliveries), {}};
  for (const planner::SharedRows& shared : planner::shared_rows(runs)) {
    KeyGradients& rows = routes.key_gradients.emplace_back(shared.first, shared.length,
                                                           std::vector<KeyGradients::Source>{});
    for (const int64_t first : shared.slots) {
      const auto after = std::partition_point(
          sent.begin(), sent.end(), [first](const SentKeys& s) { return s.first_slot <= first; });
      const SentKeys& keys = *(after - 1);
      rows.sources.push_back({keys.server, keys.place.visiting_row + first - keys.first_slot});
    }
  }
  return routes;
}

void append_words(const PeerRoutes& routes, std::vector<int64_t>& words) {
  const auto& [sent, max_visiting_q, max_visiting_k, max_flags] = routes.deliveries;
  words.insert(words.end(),
               {max_visiting_q, max_visiting_k, max_flags, static_cast<int64_t>(sent.size())});
  for (const planner::Delivery& delivery : sent) {
    words.insert(words.end(), {delivery.server, delivery.flag, delivery.is_kept});
    append_places(delivery.queries, words);
    append_places(delivery.keys, words);
  }
  words.push_back(static_cast<int64_t>(routes.key_gradients.size()));
  for (const KeyGradients& rows : routes.key_gradients) {
    words.insert(words.end(),
                 {rows.home_row, rows.num_rows, static_cast<int64_t>(rows.sources.size())});
    for (const auto& [server, visiting_row] : rows.sources) {
      words.insert(words.end(), {server, visiting_row});
    }
  }
}

PeerRoutes read_peer_routes(std::span<const int64_t>& words, int64_t num_ranks,
                            int64_t num_home_rows, int64_t num_home_queries) {
  PeerRoutes routes;
  auto& [sent, max_visiting_q, max_visiting_k, max_flags] = routes.deliveries;
  max_visiting_q = next(words, kMaxRows, "visiting queries");
  max_visiting_k = next(words, kMaxRows, "visiting keys");
  max_flags = next(words, kMaxFlags + 1, "arrival flags");
  sent.resize(next_count(words, 5, "deliveries"));
  for (planner::Delivery& delivery : sent) {
    delivery.server = next(words, num_ranks, "server");
    delivery.flag = next(words, max_flags, "flag");
    delivery.is_kept = next(words, 2, "whether it is kept") == 1;
    delivery.queries = read_places(words, num_home_queries, max_visiting_q);
    delivery.keys = read_places(words, num_home_rows, max_visiting_k);
  }
  routes.key_gradients.resize(next_count(words, 3, "key gradients"));
  for (KeyGradients& rows : routes.key_gradients) {
    rows.home_row = next(words, num_home_rows, "home row");
    rows.num_rows = next(words, kMaxRows, "rows");
    check_rows(rows.home_row, rows.num_rows, num_home_rows, "home rows");
    rows.sources.resize(next_count(words, 2, "sources"));
    for (auto& [server, visiting_row] : rows.sources) {
      server = next(words, num_ranks, "server");
      visiting_row = next(words, max_visiting_k, "visiting row");
      check_rows(visiting_row, rows.num_rows, max_visiting_k, "visiting rows");
    }
  }
  return routes;
}

}  // namespace distca::ops
