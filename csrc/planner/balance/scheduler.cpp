#include "scheduler.h"

#include <algorithm>

#include "memory_relief.h"
#include "node_balancer.h"
#include "rank_balancer.h"
#include "recut.h"

namespace distca::planner {

void schedule(Assignment& assignment, const Pairing& pairing) {
  const Links& links = assignment.problem().options.links;
  const int64_t num_ranks = assignment.problem().pack.num_ranks;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    if (assignment.is_over_cap(rank)) relieve_memory(assignment, rank);
  }
  if (links.are_slow_between_nodes(num_ranks)) {
    NodeBalancer(assignment, pairing).run();
    for (int64_t first = 0; first < num_ranks; first += links.ranks_per_node) {
      RankBalancer(assignment, pairing, {first, std::min(num_ranks, first + links.ranks_per_node)})
          .run();
    }
  }
  RankBalancer balancer(assignment, pairing, {0, num_ranks});
  balancer.run();
  recut(assignment, balancer.most_bytes());
}

}  // namespace distca::planner
