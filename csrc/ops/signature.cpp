#include "signature.h"

#include <c10/core/ScalarType.h>

#include <bit>
#include <map>
#include <sstream>

namespace distca::ops {
namespace {

std::string field_text(Signature::Field field, int64_t value) {
  std::ostringstream text;
  switch (field) {
    case Signature::kVersion:
      text << value / 10000 << "." << value / 100 % 100 << "." << value % 100;
      break;
    case Signature::kDtype:
      text << c10::toString(static_cast<c10::ScalarType>(value));
      break;
    case Signature::kSoftmaxScale:
    case Signature::kSoftcap:
      text << std::bit_cast<double>(value);
      break;
    case Signature::kPlanDigest:
      text << std::hex << static_cast<uint64_t>(value);
      break;
    default:
      text << value;
  }
  return text.str();
}

const char* field_name(Signature::Field field) {
  constexpr std::array<const char*, Signature::kNumFields> kNames{
      "refused arguments", "distca version", "step",  "plan digest",   "heads_q", "heads_kv",
      "head_dim",          "v's head_dim",   "dtype", "softmax_scale", "softcap", "forward calls",
      "recomputed calls",  "backward calls"};
  return kNames[field];
}

// "heads_q: 8 on ranks 0 2, 4 on rank 1"
std::string field_by_rank(Signature::Field field, const std::vector<Signature>& all) {
  std::map<int64_t, std::vector<int64_t>> ranks_by_value;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    ranks_by_value[all[rank].values[field]].push_back(static_cast<int64_t>(rank));
  }
  if (ranks_by_value.size() == 1) return "";
  std::ostringstream text;
  text << field_name(field) << ": ";
  bool first = true;
  for (const auto& [value, ranks] : ranks_by_value) {
    text << (first ? "" : ", ") << field_text(field, value)
         << (ranks.size() > 1 ? " on ranks" : " on rank");
    for (const int64_t rank : ranks) text << " " << rank;
    first = false;
  }
  return text.str();
}

}  // namespace

std::string differences(const std::vector<Signature>& all, int first, int last) {
  std::string text;
  for (int field = first; field < last; ++field) {
    const std::string line = field_by_rank(static_cast<Signature::Field>(field), all);
    if (!line.empty()) text += (text.empty() ? "" : "; ") + line;
  }
  return text;
}

std::string description_of(const Signature& signature, const Signature* announced) {
  std::string text;
  const int first = announced ? Signature::kVersion : Signature::kFirstOfCall;
  for (int i = first; i < Signature::kFirstOfHistory; ++i) {
    const auto field = static_cast<Signature::Field>(i);
    if (announced && announced->values[i] == signature.values[i]) continue;
    text += (text.empty() ? "" : ", ") + std::string(field_name(field)) + " " +
            field_text(field, signature.values[field]);
    if (announced) text += " instead of " + field_text(field, announced->values[field]);
  }
  return text;
}

}  // namespace distca::ops
