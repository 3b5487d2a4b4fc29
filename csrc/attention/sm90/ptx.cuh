#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

// The PTX instructions of Hopper that the kernels of this folder are made of: mbarrier, bulk tensor
// copies, warpgroup matrix products, register reallocation. Shared memory is addressed by 32-bit
// shared-space addresses.
namespace distca::attention::sm90 {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(num_arrivals));
}

// Makes initialised barriers visible to the copy engine and to other blocks of the cluster;
// __syncthreads or cluster_sync must follow.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// True in one thread of a warp whose threads are all here.
__device__ __forceinline__ bool elect_thread() {
  uint32_t is_elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;\n"
      "}"
      : "=r"(is_elected));
  return is_elected != 0;
}

// Returns x of the warp's first thread. ptxas then knows that the value is the same in all threads,
// and can keep it in a uniform register.
__device__ __forceinline__ uint32_t uniform(uint32_t x) {
  return __shfl_sync(0xffffffffu, x, 0);
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expecting(uint32_t barrier, uint32_t num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(num_bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

// For long waits whose end is not urgent: polling would take slots of the load/store pipe.
__device__ __forceinline__ void barrier_wait_idle(uint32_t barrier, uint32_t phase) {
  uint32_t done = 0;
  while (true) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(phase)
        : "memory");
    if (done) return;
    __nanosleep(200);
  }
}

// Hardware barrier `id` (1 to 15) among `num_threads` threads of the block.
__device__ __forceinline__ void named_sync(uint32_t id, uint32_t num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
__device__ __forceinline__ void named_arrive(uint32_t id, uint32_t num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Where rows of a ragged tensor map lie (see tensor_map.h): row r of the box is row `row` + r of
// the tensor if r < num_rows, else it reads as zero and is not written.
struct RaggedBox {
  int32_t column;
  int32_t head;
  int32_t row;
  int32_t num_rows;
};

constexpr int32_t kRaggedOrigin = 1 << 30;

__device__ __forceinline__ void copy_to_shared(uint32_t destination, const CUtensorMap* map,
                                               const RaggedBox& box, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(box.column), "r"(box.head), "r"(kRaggedOrigin - box.num_rows),
      "r"(box.row + box.num_rows), "r"(kRaggedOrigin)
      : "memory");
}

__device__ __forceinline__ void copy_to_global(const CUtensorMap* map, const RaggedBox& box,
                                               uint32_t source) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%1, {%2, %3, %4, %5, %6}], [%0];" ::
          "r"(source),
      "l"(map), "r"(box.column), "r"(box.head), "r"(kRaggedOrigin - box.num_rows),
      "r"(box.row + box.num_rows), "r"(kRaggedOrigin)
      : "memory");
}

// Copies a box of a plain tensor map. All rows of the box must be rows of the tensor.
__device__ __forceinline__ void copy_whole_to_shared(uint32_t destination, const CUtensorMap* map,
                                                     int32_t column, int32_t head, int32_t row,
                                                     uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(row)
      : "memory");
}

// Copies contiguous bytes; addresses and num_bytes are multiples of 16.
__device__ __forceinline__ void copy_bytes_to_shared(uint32_t destination, const void* source,
                                                     uint32_t num_bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(destination),
      "l"(source), "r"(num_bytes), "r"(barrier)
      : "memory");
}

// Blocks of a cluster can access each other's shared memory. Release and acquire at cluster scope
// wait for this thread's additions in global memory (MEMBAR.ALL.GPU) and invalidate the L1 cache.
// So of the functions below, only cluster_sync orders memory at that scope. The others need not:
// the barrier that a receiver waits for counts the bytes of copies and words, and a warp arrives
// only when its reads are complete.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Returns the address in the shared memory of the cluster's block `rank` that corresponds to
// `address` in this block's.
__device__ __forceinline__ uint32_t address_in(uint32_t rank, uint32_t address) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// Arrives at a barrier of another block.
__device__ __forceinline__ void barrier_arrive_there(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Copies to another block, whose `barrier` counts the bytes; addresses and num_bytes are multiples
// of 16.
__device__ __forceinline__ void copy_there(uint32_t destination, uint32_t source,
                                           uint32_t num_bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(destination),
      "r"(source), "r"(num_bytes), "r"(barrier)
      : "memory");
}

// Stores a word of 4 bytes in another block, whose `barrier` counts them.
__device__ __forceinline__ void send_there(uint32_t destination, int32_t word, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                   destination),
               "r"(word), "r"(barrier)
               : "memory");
}

// Waits for every thread of the cluster. What each has written before is visible after. All threads
// of a warp call it together.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// This thread's copies to global memory: closes a group, then waits until its sources may be
// overwritten.
__device__ __forceinline__ void copies_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void copies_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ uint64_t load_relaxed(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Ordinary writes to shared memory before this become visible to copies and matrix products.
__device__ __forceinline__ void fence_shared_writes() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Loads a 16 by 16 operand into the registers that a product expects. Thread `lane` passes the
// address of 8 elements: those of row lane % 16, from column 8 * (lane / 16) on.
__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t* to) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Transposes four words in each of four threads: afterwards word i of thread j is what word j of
// thread i was. Threads are counted from a lane that is a multiple of 4.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const bool is_upper = (threadIdx.x & distance) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      const uint32_t sent = is_upper ? words[i] : words[i + distance];
      const uint32_t received = __shfl_xor_sync(0xffffffffu, sent, distance);
      (is_upper ? words[i] : words[i + distance]) = received;
    }
  }
}

// Adds in global memory if `is_there`, without returning the old value. For four values, `to` is
// aligned to 16 bytes.
__device__ __forceinline__ void add_to_global(bool is_there, float* to, float a, float b, float c,
                                              float d) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "@p red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
      "f"(a), "f"(b), "f"(c), "f"(d), "r"(static_cast<int>(is_there))
      : "memory");
}
__device__ __forceinline__ void add_to_global(bool is_there, uint64_t* to, uint64_t a) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n"
      "@p red.relaxed.gpu.global.add.u64 [%0], %1;\n}" ::"l"(to),
      "l"(a), "r"(static_cast<int>(is_there))
      : "memory");
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// A product's operand in shared memory: panels of 64 columns, one after the other, with rows of 128
// bytes in the 128-byte swizzle. Holds the lower half of the instruction's matrix descriptor; the
// upper half is the same for all.
struct Operand {
  uint32_t low;
};

// `panel_bytes` is the stride between panels; it matters where rows run along the product's inner
// dimension (a transposed operand) and the other dimension spans several panels.
__device__ __forceinline__ Operand operand_at(uint32_t address, uint32_t panel_bytes) {
  return {((address & 0x3ffff) >> 4) | ((panel_bytes >> 4) << 16)};
}

// Descriptor of what begins num_bytes further.
__device__ __forceinline__ uint64_t descriptor(Operand operand, uint32_t num_bytes) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  constexpr uint64_t kEightRows = static_cast<uint64_t>(1024 >> 4) << 32;
  return kSwizzle128 | kEightRows | (operand.low + (num_bytes >> 4));
}

// Descriptor of a K-major operand without swizzle, in which both halves of the inner dimension are
// the same 8 columns. Eight rows of 16 bytes are contiguous, and `stride` leads to the next eight.
__device__ __forceinline__ uint64_t repeating_descriptor(uint32_t address, uint32_t stride) {
  return ((address & 0x3ffff) >> 4) | static_cast<uint64_t>(stride >> 4) << 32;
}

// Byte offset of the 16-byte chunk `chunk` of row `row` inside such a panel.
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kInFlight>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kInFlight) : "memory");
}

// Keeps the compiler from moving uses of registers that products write across this point.
template <int kSize>
__device__ __forceinline__ void pin(float (&registers)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kSize>
__device__ __forceinline__ void pin(uint32_t (&registers)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// Returns `value` in a register of its own, so that the compiler does not compute it again at each
// use.
__device__ __forceinline__ int in_register(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The accumulators of a thread: operands %0 to %(N / 2 - 1) of a product with N columns.
#define DISTCA_ACCUMULATORS_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define DISTCA_ACCUMULATORS_64 \
  DISTCA_ACCUMULATORS_32 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define DISTCA_ACCUMULATORS_80 DISTCA_ACCUMULATORS_64 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define DISTCA_ACCUMULATORS_112 \
  DISTCA_ACCUMULATORS_80 ",%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55"
#define DISTCA_ACCUMULATORS_128 DISTCA_ACCUMULATORS_112 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define DISTCA_ACCUMULATORS_192                                                      \
  DISTCA_ACCUMULATORS_128                                                            \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83" \
  ",%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define DISTCA_ACCUMULATORS_256                                                  \
  DISTCA_ACCUMULATORS_192                                                        \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define DISTCA_8_FROM(d, i)                                                                   \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define DISTCA_32_FROM(d, i) \
  DISTCA_8_FROM(d, i), DISTCA_8_FROM(d, i + 8), DISTCA_8_FROM(d, i + 16), DISTCA_8_FROM(d, i + 24)
#define DISTCA_OPERANDS_32(d) DISTCA_8_FROM(d, 0), DISTCA_8_FROM(d, 8)
#define DISTCA_OPERANDS_64(d) DISTCA_32_FROM(d, 0)
#define DISTCA_OPERANDS_80(d) DISTCA_OPERANDS_64(d), DISTCA_8_FROM(d, 32)
#define DISTCA_OPERANDS_112(d) DISTCA_OPERANDS_80(d), DISTCA_8_FROM(d, 40), DISTCA_8_FROM(d, 48)
#define DISTCA_OPERANDS_128(d) DISTCA_OPERANDS_112(d), DISTCA_8_FROM(d, 56)
#define DISTCA_OPERANDS_192(d) DISTCA_OPERANDS_128(d), DISTCA_32_FROM(d, 64)
#define DISTCA_OPERANDS_256(d) DISTCA_OPERANDS_192(d), DISTCA_32_FROM(d, 96)

// The operands after the accumulators are numbered from N / 2.
#define DISTCA_PRODUCT_SHARED(N, type, a, b, scale, ta, tb)                                        \
  asm volatile(                                                                                    \
      "{\n"                                                                                        \
      ".reg .pred accumulate;\n"                                                                   \
      "setp.ne.b32 accumulate, %" scale                                                            \
      ", 0;\n"                                                                                     \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" DISTCA_ACCUMULATORS_##N \
      "}, %" a ", %" b ", accumulate, 1, 1, %" ta ", %" tb                                         \
      ";\n"                                                                                        \
      "}\n"                                                                                        \
      : DISTCA_OPERANDS_##N(d)                                                                     \
      : "l"(a_matrix), "l"(b_matrix), "r"(accumulate), "n"(kTransposedA), "n"(kTransposedB))

#define DISTCA_PRODUCT_REGISTERS(N, type, a0, a1, a2, a3, b, scale, tb)                            \
  asm volatile(                                                                                    \
      "{\n"                                                                                        \
      ".reg .pred accumulate;\n"                                                                   \
      "setp.ne.b32 accumulate, %" scale                                                            \
      ", 0;\n"                                                                                     \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" DISTCA_ACCUMULATORS_##N \
      "}, {%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" b ", accumulate, 1, 1, %" tb                    \
      ";\n"                                                                                        \
      "}\n"                                                                                        \
      : DISTCA_OPERANDS_##N(d)                                                                     \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_matrix), "r"(accumulate),                \
        "n"(kTransposedB))

#define DISTCA_PRODUCT_OF(kind, N, ...)               \
  if constexpr (kSize == N / 2) {                     \
    if constexpr (std::is_same_v<T, __nv_bfloat16>) { \
      DISTCA_PRODUCT_##kind(N, "bf16", __VA_ARGS__);  \
    } else {                                          \
      DISTCA_PRODUCT_##kind(N, "f16", __VA_ARGS__);   \
    }                                                 \
  }

// d[64 x N] (+)= A[64 x 16] B[16 x N], asynchronous. A and B are given by descriptors; an operand
// is transposed when its rows in shared memory run along the inner dimension.
template <typename T, bool kTransposedA, bool kTransposedB, int kSize>
__device__ __forceinline__ void product(float (&d)[kSize], uint64_t a_matrix, uint64_t b_matrix,
                                        int accumulate) {
  static_assert(kSize == 16 || kSize == 32 || kSize == 40 || kSize == 56 || kSize == 64);
  DISTCA_PRODUCT_OF(SHARED, 32, "16", "17", "18", "19", "20")
  DISTCA_PRODUCT_OF(SHARED, 64, "32", "33", "34", "35", "36")
  DISTCA_PRODUCT_OF(SHARED, 80, "40", "41", "42", "43", "44")
  DISTCA_PRODUCT_OF(SHARED, 112, "56", "57", "58", "59", "60")
  DISTCA_PRODUCT_OF(SHARED, 128, "64", "65", "66", "67", "68")
}

// The same with A in registers: a[0..1] hold columns 2 (lane % 4) + {0, 1} of rows lane / 4 and
// lane / 4 + 8, a[2..3] the columns 8 further.
template <typename T, bool kTransposedB, int kSize>
__device__ __forceinline__ void product(float (&d)[kSize], const uint32_t* a, uint64_t b_matrix,
                                        int accumulate) {
  static_assert(kSize == 32 || kSize == 64 || kSize == 96 || kSize == 128);
  DISTCA_PRODUCT_OF(REGISTERS, 64, "32", "33", "34", "35", "36", "37", "38")
  DISTCA_PRODUCT_OF(REGISTERS, 128, "64", "65", "66", "67", "68", "69", "70")
  DISTCA_PRODUCT_OF(REGISTERS, 192, "96", "97", "98", "99", "100", "101", "102")
  DISTCA_PRODUCT_OF(REGISTERS, 256, "128", "129", "130", "131", "132", "133", "134")
}

#undef DISTCA_PRODUCT_OF
#undef DISTCA_PRODUCT_SHARED
#undef DISTCA_PRODUCT_REGISTERS

}  // namespace distca::attention::sm90
