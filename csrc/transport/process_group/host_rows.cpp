#include "host_rows.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>

namespace distca::transport {
namespace {

using Future = c10::ivalue::Future;

// Describes how `places`, [num_ranks, kWhereWords], differ; empty if all are equal.
std::string difference_of(const at::Tensor& places) {
  std::map<WhereWords, std::vector<int64_t>> ranks_by_place;
  const auto* next = places.const_data_ptr<int64_t>();
  for (int64_t rank = 0; rank < places.size(0); ++rank, next += kWhereWords) {
    WhereWords words;
    std::copy_n(next, kWhereWords, words.begin());
    ranks_by_place[words].push_back(rank);
  }
  if (ranks_by_place.size() == 1) return "";
  std::vector<std::pair<WhereWords, std::vector<int64_t>>> rare_first(ranks_by_place.begin(),
                                                                      ranks_by_place.end());
  std::sort(rare_first.begin(), rare_first.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second.size(), -a.second[0]) < std::pair(b.second.size(), -b.second[0]);
  });
  std::string text;
  for (const auto& [words, ranks] : rare_first) {
    text += text.empty() ? "" : ", while ";
    text += ranks.size() > 1 ? "ranks" : "rank";
    for (const int64_t rank : ranks) text += " " + std::to_string(rank);
    text += (ranks.size() > 1 ? " are in " : " is in ") + describe(where_of(words));
  }
  return text + ", and rows of one call would have served another" + kSameCalls;
}

// Runs both parts of an exchange as one work. Keeps tensors alive as long as gloo works on them.
class HostRows : public c10d::Work {
 public:
  HostRows(c10d::Backend& backend, std::vector<RowBatch> batches, std::vector<at::Tensor> received)
      : backend_(backend), batches_(std::move(batches)), received_(std::move(received)) {}

  void start(const Where& where) {
    const WhereWords words = words_of(where);
    own_ = at::empty({1, kWhereWords}, at::kLong);
    std::copy(words.begin(), words.end(), own_.mutable_data_ptr<int64_t>());
    places_ = at::empty({backend_.getSize(), kWhereWords}, at::kLong);
    then(backend_._allgather_base(places_, own_), [](HostRows& self) { self.send(); });
  }

 private:
  // Runs on a thread of gloo, once all ranks have announced their calls.
  void send() {
    const std::string difference = difference_of(places_);
    if (!difference.empty()) throw CallMismatch(difference);
    num_left_ = batches_.size();
    for (size_t i = 0; i < batches_.size(); ++i) {
      std::vector<int64_t> sent = batches_[i].counts.send, taken = batches_[i].counts.recv;
      then(backend_.alltoall_base(received_[i], batches_[i].rows, taken, sent),
           [](HostRows& self) { self.end_batch(); });
    }
  }

  void end_batch() {
    if (--num_left_ == 0) finish();
  }

  // Runs `next` when `work` has ended well; the first exception ends this work.
  template <typename F>
  void then(const c10::intrusive_ptr<c10d::Work>& work, F next) {
    auto self = c10::intrusive_ptr<HostRows>::reclaim_copy(this);
    work->getFuture()->addCallback([self, next](Future& ended) {
      try {
        if (ended.hasError()) std::rethrow_exception(ended.exception_ptr());
        next(*self);
      } catch (const std::exception&) {
        self->fail(std::current_exception());
      }
    });
  }

  void fail(std::exception_ptr error) {
    if (!has_failed_.exchange(true)) finish(std::move(error));
  }

  // Not owned: gloo's destructor joins the threads that run this work's parts, so that none of them
  // may hold the last reference.
  c10d::Backend& backend_;
  std::vector<RowBatch> batches_;
  std::vector<at::Tensor> received_;
  at::Tensor own_, places_;
  std::atomic<size_t> num_left_ = 0;
  std::atomic<bool> has_failed_ = false;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> exchange_on_host(c10d::ProcessGroup& group,
                                                std::vector<RowBatch> batches,
                                                std::vector<at::Tensor> received,
                                                const Where& where) {
  auto rows = c10::make_intrusive<HostRows>(*group.getBackend(at::kCPU), std::move(batches),
                                            std::move(received));
  rows->start(where);
  return rows;
}

}  // namespace distca::transport
