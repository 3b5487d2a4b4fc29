#include "loads.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "ranges.h"

namespace distca::planner {
namespace {

struct Holder {
  int64_t server;
  RangeSet keys;  // that its tasks of one document read
};

// Indices of tasks by document; within one, in plan order, so servers ascend.
std::vector<size_t> by_document(const Pack& pack, std::span<const Task> tasks,
                                std::vector<size_t>& first) {
  first.assign(pack.documents.size() + 1, 0);
  for (const Task& task : tasks) ++first[task.document + 1];
  std::partial_sum(first.begin(), first.end(), first.begin());
  std::vector<size_t> order(tasks.size());
  std::vector<size_t> next(first.begin(), first.end() - 1);
  for (size_t i = 0; i < tasks.size(); ++i) order[next[tasks[i].document]++] = i;
  return order;
}

// Rows of all holders' keys that each segment supplies, its own rank's included: one sweep over
// the sorted ends of the key ranges, however many holders there are.
std::vector<int64_t> rows_read(const Document& document, const std::vector<Holder>& holders) {
  std::vector<std::pair<int64_t, int64_t>> ends;  // position, change in the number of readers
  for (const Holder& holder : holders) {
    for (Range keys : holder.keys.ranges()) {
      ends.emplace_back(keys.begin, 1);
      ends.emplace_back(keys.end, -1);
    }
  }
  std::sort(ends.begin(), ends.end());
  std::vector<int64_t> rows;
  rows.reserve(document.segments.size());
  int64_t num_readers = 0;
  auto end = ends.begin();
  for (const Segment& segment : document.segments) {
    int64_t position = segment.start;
    int64_t count = 0;
    for (; end != ends.end() && end->first < segment.start + segment.length; ++end) {
      count += num_readers * (end->first - position);
      position = end->first;
      num_readers += end->second;
    }
    rows.push_back(count + num_readers * (segment.start + segment.length - position));
  }
  return rows;
}

void add_keys(const Document& document, const std::vector<Holder>& holders, int64_t key_bytes,
              std::vector<Load>& loads) {
  const std::vector<int64_t> rows = rows_read(document, holders);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Segment& segment = document.segments[i];
    const auto own =
        std::lower_bound(holders.begin(), holders.end(), segment.rank,
                         [](const Holder& holder, int64_t rank) { return holder.server < rank; });
    const bool reads = own != holders.end() && own->server == segment.rank;
    const int64_t own_rows = reads ? own->keys.num_shared(positions(segment)) : 0;
    loads[segment.rank].bytes_out += (rows[i] - own_rows) * key_bytes;
    loads[segment.rank].bytes_in -= own_rows * key_bytes;
  }
  for (const Holder& holder : holders) {
    for (Range keys : holder.keys.ranges()) {
      loads[holder.server].bytes_in += num_rows(keys) * key_bytes;
    }
  }
}

}  // namespace

std::vector<Load> loads_of(const Pack& pack, const PlanOptions& options,
                           std::span<const Task> tasks) {
  std::vector<Load> loads(pack.num_ranks);
  std::vector<size_t> first;
  const std::vector<size_t> order = by_document(pack, tasks, first);
  std::vector<Holder> holders;
  for (size_t i = 0; i < pack.documents.size(); ++i) {
    const Document& document = pack.documents[i];
    holders.clear();
    for (size_t at = first[i]; at < first[i + 1]; ++at) {
      const Task& task = tasks[order[at]];
      const Range q = queries(task);
      loads[task.server].seconds += options.cost.seconds(options.mask, q, document.length);
      for_each_segment(document, q, [&](const Segment& segment, Range rows) {
        if (segment.rank == task.server) return;
        loads[segment.rank].bytes_out += num_rows(rows) * options.row_bytes.query;
        loads[task.server].bytes_in += num_rows(rows) * options.row_bytes.query;
      });
      if (holders.empty() || holders.back().server != task.server) {
        holders.push_back({task.server, {}});
      }
      holders.back().keys.insert(keys_of(options.mask, q, document.length));
    }
    add_keys(document, holders, options.row_bytes.key, loads);
  }
  return loads;
}

}  // namespace distca::planner
