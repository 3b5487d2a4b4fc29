#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <ostream>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "attention/sm90/kernels.h"

// Home and visiting tasks in one launch whose visiting rows come while it runs, on a Hopper GPU.
// What each part gives has to be, bit by bit, what it gives alone with all its rows in place; only
// dQ is added up in no fixed order.
namespace distca::attention::sm90 {
namespace {

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// Device memory with a copy on the host, which copy engines read and write while kernels run.
template <typename T>
class Buffer {
 public:
  explicit Buffer(size_t count) : count_(count) {
    check(cudaMalloc(&device_, bytes(count + 1)));
    check(cudaMallocHost(&host_, bytes(count + 1)));
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) {
    std::copy(values.begin(), values.end(), host_);
    upload(nullptr);
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() {
    cudaFree(device_);
    cudaFreeHost(host_);
  }
  T* device() const { return device_; }
  T* host() const { return host_; }
  size_t size() const { return count_; }
  void fill(int byte) { check(cudaMemset(device_, byte, bytes(count_))); }
  void upload(cudaStream_t stream) { upload(0, count_, stream); }
  void upload(size_t first, size_t count, cudaStream_t stream) {
    check(cudaMemcpyAsync(device_ + first, host_ + first, bytes(count), cudaMemcpyHostToDevice,
                          stream));
  }
  std::vector<T> download(cudaStream_t stream) {
    check(cudaMemcpyAsync(host_, device_, bytes(count_), cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));
    return {host_, host_ + count_};
  }

 private:
  static size_t bytes(size_t count) { return count * sizeof(T); }
  size_t count_;
  T* device_ = nullptr;
  T* host_ = nullptr;
};

using Half = uint16_t;         // bits of a bfloat16
constexpr int kPoison = 0xff;  // NaN in every type here

float as_float(Half bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

struct Shape {
  int64_t heads_q, heads_kv, head_dim;
};

// Whole documents, one after the other; document i waits for flag i.
std::vector<Task> documents(const std::vector<int64_t>& lengths) {
  std::vector<Task> tasks;
  int64_t row = 0;
  for (const int64_t length : lengths) {
    const auto flag = static_cast<int64_t>(tasks.size());
    tasks.push_back({row, length, row, length, 0, flag, flag + 1});
    row += length;
  }
  return tasks;
}

// Tile lists on the device.
struct Lists {
  Lists(const std::vector<Task>& tasks, int32_t tile_rows)
      : Lists(make_tile_lists(tasks, {-1, 0}, tile_rows)) {}
  explicit Lists(const TileLists& lists)
      : tiles(lists.tiles),
        blocks(lists.blocks),
        flags(lists.flags),
        view{tiles.device(), blocks.device(), static_cast<int32_t>(lists.tiles.size()),
             static_cast<int32_t>(lists.blocks.size()), lists.num_runs} {}
  Buffer<QueryTile> tiles;
  Buffer<KeyBlock> blocks;
  Buffer<FlagRange> flags;
  DeviceTiles view;
};

struct Results {
  std::vector<Half> out, dq, dk, dv;
  std::vector<float> lse;
};

// Documents with their inputs, results, and what the backward pass is given.
struct Side {
  Side(const std::vector<int64_t>& lengths, const Shape& s, unsigned seed)
      : shape(s),
        tasks(documents(lengths)),
        num_rows(tasks.empty() ? 0 : tasks.back().q_row + tasks.back().num_q_rows),
        forward_lists(tasks, forward_tile_rows(s.head_dim)),
        backward_lists(tasks, backward_tile_rows(s.head_dim)) {
    std::mt19937 random(seed);
    for (Buffer<Half>* buffer : {&q, &k, &v, &grad_out}) {
      std::generate_n(buffer->host(), buffer->size(), [&] {
        return static_cast<Half>((random() & 0x8000) | 0x3f00 | (random() & 0xff));  // 0.5 to 2
      });
      buffer->upload(nullptr);
    }
    std::generate_n(delta.host(), delta.size(), [&] { return 1e-3f * (random() % 1000); });
    delta.upload(nullptr);
  }

  size_t query_size() const {
    return static_cast<size_t>(num_rows * shape.heads_q * shape.head_dim);
  }
  size_t key_size() const {
    return static_cast<size_t>(num_rows * shape.heads_kv * shape.head_dim);
  }

  RowTensor tensor(const Buffer<Half>& buffer, int64_t heads) const {
    return {buffer.device(), Element::kBfloat16,         heads,
            shape.head_dim,  heads * shape.head_dim * 2, shape.head_dim * 2};
  }
  RowTensor queries(const Buffer<Half>& buffer) const { return tensor(buffer, shape.heads_q); }
  RowTensor keys(const Buffer<Half>& buffer) const { return tensor(buffer, shape.heads_kv); }

  ForwardPart forward_part() const {
    return {queries(q), keys(k), keys(v), queries(out), lse.device(), forward_lists.view, {}};
  }
  BackwardPart backward_part() const {
    BackwardPart part{};
    part.q = queries(q);
    part.k = keys(k);
    part.v = keys(v);
    part.grad_out = queries(grad_out);
    part.lse = lse.device();
    part.delta = delta.device();
    part.dq = queries(dq);
    part.dk = keys(dk);
    part.dv = keys(dv);
    part.tiles = backward_lists.view;
    return part;
  }

  void poison_results() {
    for (Buffer<Half>* buffer : {&out, &dq, &dk, &dv}) buffer->fill(kPoison);
  }
  Results results(cudaStream_t stream) {
    return {out.download(stream), dq.download(stream), dk.download(stream), dv.download(stream),
            lse.download(stream)};
  }

  Shape shape;
  std::vector<Task> tasks;
  int64_t num_rows;
  Lists forward_lists, backward_lists;
  Buffer<Half> q{query_size()}, k{key_size()}, v{key_size()}, grad_out{query_size()};
  Buffer<Half> out{query_size()}, dq{query_size()}, dk{key_size()}, dv{key_size()};
  Buffer<float> lse{static_cast<size_t>(num_rows * shape.heads_q)};
  Buffer<float> delta{static_cast<size_t>(num_rows * shape.heads_q)};
};

enum class Pass { kForward, kBackward };

class Step {
 public:
  explicit Step(const Shape& shape) : shape_(shape) {
    for (cudaStream_t* stream : {&compute, &copies}) {
      check(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
    }
  }
  ~Step() {
    for (cudaStream_t stream : {compute, copies}) cudaStreamDestroy(stream);
  }

  // Only enqueues. `arrivals` of visiting rows; none: they are in place.
  void launch(Pass pass, const Side& home, const Side* visiting, bool in_place, uint32_t epoch) {
    check(cudaMemsetAsync(tickets_.device(), 0, kNumTickets * sizeof(int32_t), compute));
    const float scale = 0.05f;
    const auto arrivals = [&](const Lists& lists) {
      return in_place ? Arrivals{} : Arrivals{flags.device(), lists.flags.device(), epoch};
    };
    if (pass == Pass::kForward) {
      ForwardCall call{home.forward_part(), {}, tickets_.device(), nullptr, {-1, 0}, scale};
      if (visiting) {
        call.visiting = visiting->forward_part();
        call.visiting.arrivals = arrivals(visiting->forward_lists);
      }
      forward(call, compute);
      return;
    }
    BackwardCall call{};
    call.home = home.backward_part();
    if (visiting) {
      call.visiting = visiting->backward_part();
      call.visiting.arrivals = arrivals(visiting->backward_lists);
    }
    const BackwardSizes sizes = backward_sizes(call);
    sums_ = std::make_unique<Buffer<uint8_t>>(sizes.dq_sums);
    stats_ = std::make_unique<Buffer<uint8_t>>(sizes.row_stats);
    call.tickets = tickets_.device();
    call.dq_sums = sums_->device();
    call.row_stats = reinterpret_cast<float*>(stats_->device());
    call.window = {-1, 0};
    call.softmax_scale = scale;
    backward(call, compute);
  }

  // Document `i` of `from` as if a peer wrote it: its rows, then its flag.
  void deliver(Pass pass, Side& from, size_t i, uint32_t epoch) {
    const Task& task = from.tasks[i];
    const auto send = [&](auto& buffer, int64_t row_size) {
      buffer.upload(task.q_row * row_size, task.num_q_rows * row_size, copies);
    };
    const int64_t query = shape_.heads_q * shape_.head_dim, key = shape_.heads_kv * shape_.head_dim;
    send(from.q, query);
    send(from.k, key);
    send(from.v, key);
    if (pass == Pass::kBackward) {
      send(from.grad_out, query);
      send(from.lse, shape_.heads_q);
      send(from.delta, shape_.heads_q);
    }
    flags.host()[i] = epoch;
    flags.upload(i, 1, copies);
  }

  // What the kernel is to wait for: its rows are NaN, its flags of the epoch before.
  void withhold(Pass pass, Side& side, uint32_t epoch) {
    for (Buffer<Half>* buffer : {&side.q, &side.k, &side.v}) buffer->fill(kPoison);
    if (pass == Pass::kBackward) {
      side.grad_out.fill(kPoison);
      side.lse.fill(kPoison);
      side.delta.fill(kPoison);
    }
    std::fill_n(flags.host(), flags.size(), epoch - 1);
    flags.upload(nullptr);
    check(cudaDeviceSynchronize());
  }

  cudaStream_t compute, copies;
  Buffer<uint32_t> flags{16};

 private:
  Shape shape_;
  Buffer<int32_t> tickets_{kNumTickets};
  std::unique_ptr<Buffer<uint8_t>> sums_, stats_;
};

void wait_some_ms(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

std::string difference(const Results& found, const Results& expected, Pass pass) {
  if (pass == Pass::kForward) {
    if (found.out != expected.out) return "out";
    return found.lse == expected.lse ? "" : "lse";
  }
  if (found.dk != expected.dk) return "dk";
  if (found.dv != expected.dv) return "dv";
  float largest = 0;
  for (const Half x : expected.dq) largest = std::max(largest, std::abs(as_float(x)));
  for (size_t i = 0; i < expected.dq.size(); ++i) {
    const float distance = std::abs(as_float(found.dq[i]) - as_float(expected.dq[i]));
    if (!(distance <= 0.01f * largest)) return "dq";
  }
  return "";
}

bool has_hopper() {
  int device = 0, major = 0, minor = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
         major == 9 && minor == 0;
}

struct Case {
  Shape shape;
  std::vector<int64_t> home;
  std::vector<size_t> order;  // in which visiting documents come
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.shape.heads_q << ":" << c.shape.heads_kv << " heads of " << c.shape.head_dim;
}

class ArrivalsTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (!has_hopper()) GTEST_SKIP() << "needs a GPU of compute capability 9.0";
    step = std::make_unique<Step>(GetParam().shape);
    home = std::make_unique<Side>(GetParam().home, GetParam().shape, 1);
    visiting = std::make_unique<Side>(kVisiting, GetParam().shape, 2);
    for (Side* side : {home.get(), visiting.get()}) {
      side->poison_results();
      for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
        step->launch(pass, *side, nullptr, true, 0);
        check(cudaDeviceSynchronize());
      }
      expected.push_back(side->results(step->copies));
    }
  }

  // Both parts in one launch; `early` of the visiting documents are there before it.
  void run(Pass pass, size_t early, uint32_t epoch) {
    const std::vector<size_t>& order = GetParam().order;
    home->poison_results();
    visiting->poison_results();
    step->withhold(pass, *visiting, epoch);
    for (size_t i = 0; i < early; ++i) step->deliver(pass, *visiting, order[i], epoch);
    check(cudaStreamSynchronize(step->copies));
    step->launch(pass, *home, visiting.get(), false, epoch);
    if (early < order.size()) expect_home_alone(pass);
    for (size_t i = early; i < order.size(); ++i) {
      step->deliver(pass, *visiting, order[i], epoch);
      wait_some_ms(1);
    }
    check(cudaDeviceSynchronize());
    EXPECT_EQ(difference(home->results(step->copies), expected[0], pass), "") << "at home";
    EXPECT_EQ(difference(visiting->results(step->copies), expected[1], pass), "") << "visiting";
  }

  // Home tasks end while the launch as a whole waits for what has not come.
  void expect_home_alone(Pass pass) {
    wait_some_ms(100);
    EXPECT_EQ(cudaStreamQuery(step->compute), cudaErrorNotReady) << "nothing was waited for";
    if (pass == Pass::kForward) {
      EXPECT_EQ(home->out.download(step->copies), expected[0].out) << "home tasks waited";
    } else {
      EXPECT_EQ(home->dv.download(step->copies), expected[0].dv) << "home tasks waited";
    }
  }

  static inline const std::vector<int64_t> kVisiting{700, 64, 2500, 1, 300};
  std::unique_ptr<Step> step;
  std::unique_ptr<Side> home, visiting;
  std::vector<Results> expected;
};

TEST_P(ArrivalsTest, RowsThatAreThere) {
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) run(pass, kVisiting.size(), 1);
}

TEST_P(ArrivalsTest, RowsThatComeLate) {
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) run(pass, 0, 2);
}

TEST_P(ArrivalsTest, SomeRowsComeLate) {
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) run(pass, 2, 3);
}

TEST_P(ArrivalsTest, EpochsWrapAround) {
  for (const uint32_t epoch : {0x80000000u, 0xffffffffu, 0u}) run(Pass::kForward, 1, epoch);
}

INSTANTIATE_TEST_SUITE_P(Shapes, ArrivalsTest,
                         testing::Values(Case{{8, 2, 128}, {1000, 3, 5000}, {0, 1, 2, 3, 4}},
                                         Case{{32, 8, 128}, {1000, 3, 5000}, {4, 2, 3, 0, 1}},
                                         Case{{4, 4, 64}, {1000, 3, 5000}, {4, 2, 3, 0, 1}},
                                         Case{{8, 2, 128}, {}, {2, 1, 0, 3, 4}},
                                         Case{{4, 4, 64}, {}, {0, 1, 2, 3, 4}}),
                         [](const auto& test) {
                           return "Case" + std::to_string(test.index) + "Dim" +
                                  std::to_string(test.param.shape.head_dim) +
                                  (test.param.home.empty() ? "VisitingOnly" : "");
                         });

TEST(Arrivals, WhatMustBeThereIsNotWaitedFor) {
  BackwardCall call{};
  const uint32_t* flag = reinterpret_cast<const uint32_t*>(16);  // never read
  call.visiting.arrivals.flags = flag;
  EXPECT_THROW(backward(call, nullptr), std::invalid_argument) << "without delta";
  call.visiting.delta = reinterpret_cast<const float*>(16);
  call.deterministic = true;
  EXPECT_THROW(backward(call, nullptr), std::invalid_argument) << "deterministic";
}

}  // namespace
}  // namespace distca::attention::sm90
