#include "backend.h"

namespace distca::attention {

// Each is defined in its own folder.
namespace sm90 {
Backend backend();
}
namespace aten {
Backend backend();
}
namespace cpu {
Backend backend();
}

namespace {

std::vector<Backend>& table() {
  static std::vector<Backend> rows = {
#ifdef DISTCA_WITH_SM90
      sm90::backend(),
#endif
#ifdef DISTCA_WITH_CUDA
      aten::backend(),
#endif
      cpu::backend(),
  };
  return rows;
}

}  // namespace

const std::vector<Backend>& backends() {
  return table();
}

void register_backend(const Backend& backend) {
  table().insert(table().begin(), backend);
}

}  // namespace distca::attention
