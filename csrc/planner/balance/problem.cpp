#include "problem.h"

#include <cmath>

namespace distca::planner {

Problem::Problem(const Pack& pack, const PlanOptions& options, const HomeCut& home,
                 const Heuristics& heuristics)
    : pack(pack), options(options), home(home), heuristics(heuristics) {
  double pairs = 0;
  for (const Document& document : pack.documents) {
    const Range all{document.first_query, document.length};
    pairs += static_cast<double>(num_pairs(options.mask, all, document.length));
  }
  for (int64_t rank = 0; rank < pack.num_ranks; ++rank) {
    total_seconds += home.seconds[rank];
    total_speed += options.speed(rank);
  }
  // A slice of n query rows and m keys has at most n * m pairs. It needs the fewest bytes for them
  // if queries and keys take equal bytes.
  const double bytes =
      static_cast<double>(options.row_bytes.query) * static_cast<double>(options.row_bytes.key);
  bytes_per_root_second = total_seconds > 0 ? 2 * std::sqrt(bytes * pairs / total_seconds) : 0;
  min_relief = heuristics.min_relief * total_seconds / total_speed;
}

}  // namespace distca::planner
