#include "routes.h"

namespace distca::transport {

void keep(const Routes& routes, const Inputs& visiting, const Inputs& kept) {
  if (!routes.keeping || !kept.q.defined()) return;
  gather_rows(visiting.q, routes.keeping->kept_q, kept.q);
  gather_rows(visiting.k, routes.keeping->kept_k, kept.k);
  gather_rows(visiting.v, routes.keeping->kept_k, kept.v);
}

void restore(const Routes& routes, const Inputs& kept, const Inputs& visiting) {
  if (!routes.keeping) return;
  scatter_rows(kept.q, routes.keeping->kept_q, visiting.q);
  scatter_rows(kept.k, routes.keeping->kept_k, visiting.k);
  scatter_rows(kept.v, routes.keeping->kept_k, visiting.v);
}

}  // namespace distca::transport
