#include "peer_routes.h"

#include <c10/util/Exception.h>

#include <limits>
#include <utility>

#include "planner/layout/shared_rows.h"

namespace distca::ops {
namespace {

constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();

// Key rows that were sent, by slot.
struct SentKeys {
  int64_t server;
  int64_t result_row;
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
  for (const auto& [home_row, visiting_row, result_row, num_rows] : places) {
    words.insert(words.end(), {home_row, visiting_row, result_row, num_rows});
  }
}

// Rows of queries, or of keys, that there are of each kind.
struct PlaceLimits {
  int64_t home;
  int64_t visiting;
  int64_t result;
};

std::vector<planner::RowPlace> read_places(std::span<const int64_t>& words,
                                           const PlaceLimits& limits) {
  std::vector<planner::RowPlace> places(next_count(words, 4, "places"));
  for (auto& [home_row, visiting_row, result_row, num_rows] : places) {
    home_row = next(words, limits.home, "home row");
    visiting_row = next(words, limits.visiting, "visiting row");
    result_row = next(words, limits.result, "result row");
    num_rows = next(words, kMaxRows, "rows");
    check_rows(home_row, num_rows, limits.home, "home rows");
    check_rows(visiting_row, num_rows, limits.visiting, "visiting rows");
    check_rows(result_row, num_rows, limits.result, "result rows");
  }
  return places;
}

}  // namespace

PeerRoutes peer_routes(planner::Deliveries deliveries) {
  std::vector<Run> runs;
  std::vector<SentKeys> sent;
  int64_t slot = 0;
  for (const planner::Delivery& delivery : deliveries.sent) {
    for (const planner::RowPlace& place : delivery.keys) {
      runs.push_back({place.home_row, place.num_rows});
      sent.push_back({delivery.server, place.result_row, slot});
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
      rows.sources.push_back({keys.server, keys.result_row + first - keys.first_slot});
    }
  }
  return routes;
}

void append_words(const PeerRoutes& routes, std::vector<int64_t>& words) {
  const planner::Deliveries& all = routes.deliveries;
  words.insert(words.end(), {all.max_visiting_q, all.max_visiting_k, all.max_returned_q,
                             all.max_returned_k, static_cast<int64_t>(all.sent.size())});
  for (const planner::Delivery& delivery : all.sent) {
    words.insert(words.end(), {delivery.server, delivery.is_kept});
    append_places(delivery.queries, words);
    append_places(delivery.keys, words);
  }
  words.push_back(static_cast<int64_t>(all.returned.size()));
  for (const planner::Return& returned : all.returned) {
    words.push_back(returned.home);
    append_places(returned.queries, words);
    append_places(returned.keys, words);
  }
  words.push_back(static_cast<int64_t>(routes.key_gradients.size()));
  for (const KeyGradients& rows : routes.key_gradients) {
    words.insert(words.end(),
                 {rows.home_row, rows.num_rows, static_cast<int64_t>(rows.sources.size())});
    for (const auto& [server, result_row] : rows.sources) {
      words.insert(words.end(), {server, result_row});
    }
  }
}

PeerRoutes read_peer_routes(std::span<const int64_t>& words, const RouteLimits& limits) {
  PeerRoutes routes;
  planner::Deliveries& all = routes.deliveries;
  all.max_visiting_q = next(words, kMaxRows, "visiting queries");
  all.max_visiting_k = next(words, kMaxRows, "visiting keys");
  all.max_returned_q = next(words, kMaxRows, "returned queries");
  all.max_returned_k = next(words, kMaxRows, "returned keys");
  const auto results_of = [&limits](int64_t server, int64_t visiting, int64_t returned) {
    return server == limits.rank ? visiting : returned;
  };
  all.sent.resize(next_count(words, 4, "deliveries"));
  int64_t last_server = 0, last_home = 0;
  for (planner::Delivery& delivery : all.sent) {
    delivery.server = next(words, limits.num_ranks, "server");
    TORCH_CHECK_VALUE(std::exchange(last_server, delivery.server) <= delivery.server,
                      "layout: deliveries to rank ", delivery.server,
                      " follow those to a later one");
    delivery.is_kept = next(words, 2, "whether it is kept") == 1;
    delivery.queries =
        read_places(words, {limits.num_home_queries, all.max_visiting_q,
                            results_of(delivery.server, all.max_visiting_q, all.max_returned_q)});
    delivery.keys =
        read_places(words, {limits.num_home_rows, all.max_visiting_k,
                            results_of(delivery.server, all.max_visiting_k, all.max_returned_k)});
  }
  all.returned.resize(next_count(words, 3, "returns"));
  for (planner::Return& returned : all.returned) {
    returned.home = next(words, limits.num_ranks, "home");
    TORCH_CHECK_VALUE(
        std::exchange(last_home, returned.home) <= returned.home && returned.home != limits.rank,
        "layout: rank ", limits.rank, " returns results to rank ", returned.home,
        "; expected other ranks in order");
    returned.queries = read_places(words, {kMaxRows, all.max_visiting_q, all.max_returned_q});
    returned.keys = read_places(words, {kMaxRows, all.max_visiting_k, all.max_returned_k});
  }
  TORCH_CHECK_VALUE(limits.num_ranks <= kMaxPeers, "layout: routes of ", limits.num_ranks,
                    " peers; expected at most ", kMaxPeers);
  routes.key_gradients.resize(next_count(words, 3, "key gradients"));
  for (KeyGradients& rows : routes.key_gradients) {
    rows.home_row = next(words, limits.num_home_rows, "home row");
    rows.num_rows = next(words, kMaxRows, "rows");
    check_rows(rows.home_row, rows.num_rows, limits.num_home_rows, "home rows");
    rows.sources.resize(next_count(words, 2, "sources"));
    int64_t next_server = 0;
    for (auto& [server, result_row] : rows.sources) {
      server = next(words, limits.num_ranks, "server");
      TORCH_CHECK_VALUE(server >= next_server, "layout: key gradients of rank ", server,
                        " follow those of a later one, or of the same; expected one of each rank");
      next_server = server + 1;
      const int64_t num_results = results_of(server, all.max_visiting_k, all.max_returned_k);
      result_row = next(words, num_results, "result row");
      check_rows(result_row, rows.num_rows, num_results, "result rows");
    }
  }
  return routes;
}

}  // namespace distca::ops
