#pragma once
// Inline PTX behind names.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace megasoftmax {

// Whether code has what came with compute capability 8.0: asynchronous copies, integer reductions
// of a warp, products of 16 x 16 matrices, and arithmetic of bfloat16.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
inline constexpr bool kIsAmpere = false;
#else
inline constexpr bool kIsAmpere = true;
#endif

// Blocks of a multiprocessor that a kernel leaves registers for, of as many as tables say, which is
// for later GPUs. A multiprocessor of compute capability 7.5 has 1024 threads and 16 blocks at
// most. Half of them are as many as its part of the memory's bandwidth needs, and a thread then has
// registers for what other GPUs have instructions for.
constexpr int blocks_with_registers(int blocks, int threads) {
  if (kIsAmpere) return blocks;
  const int most = 512 / threads;
  return blocks < most ? blocks : most;
}

// 2^x to 2 ulp, subnormal results flushed to 0: the special-function unit's own instruction.
__device__ inline float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger one, or NaN if one of them is. From compute capability 8.0 on.
__device__ inline float max_or_nan(float x, float y) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
}

// 1 / x to 1 ulp.
__device__ inline float reciprocal_approximate(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh(x) with a relative error of at most 2^-11, in one instruction of the special-function unit.
__device__ inline float tanh_approximate(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 0xffff for each half whose sign bit is set, 0 for the others.
__device__ inline uint32_t signs_of_halves(uint32_t halves) {
  uint32_t signs;
  asm("prmt.b32 %0, %1, %1, 0xbb99;" : "=r"(signs) : "r"(halves));
  return signs;
}

// The upper half of one word below that of another.
__device__ inline uint32_t upper_halves(uint32_t low, uint32_t high) {
  uint32_t halves;
  asm("prmt.b32 %0, %1, %2, 0x7632;" : "=r"(halves) : "r"(low), "r"(high));
  return halves;
}

// 0xff for each of the halves of two words whose sign bit is set, 0 for the others.
__device__ inline uint32_t bytes_of_signs(uint32_t first, uint32_t second) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, 0xfdb9;" : "=r"(bytes) : "r"(first), "r"(second));
  return bytes;
}

// 0xffff in the lower half if the sign bit of one word is set, in the upper half if that of another
// is. __byte_perm cannot repeat signs.
__device__ inline uint32_t halves_of_signs(uint32_t low, uint32_t high) {
  uint32_t halves;
  asm("prmt.b32 %0, %1, %2, 0xffbb;" : "=r"(halves) : "r"(low), "r"(high));
  return halves;
}

// The sign of each byte of a word that is not 0.
__device__ inline uint32_t signs_of_bytes(uint32_t bytes) {
  constexpr uint32_t kLow = 0x7f7f7f7f;
  return ((bytes & kLow) + kLow) | bytes;
}

// Over all lanes of a warp, for all of them. Integers have instructions from 8.0 on.
template <class Number, class Operation>
__device__ inline Number over_lanes(Number x, Operation&& operation) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    x = operation(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}
template <class Integer>
__device__ inline Integer largest_of_lanes(Integer x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(~0u, x);
#else
  return over_lanes(x, [](Integer a, Integer b) { return max(a, b); });
#endif
}
template <class Integer>
__device__ inline Integer smallest_of_lanes(Integer x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_min_sync(~0u, x);
#else
  return over_lanes(x, [](Integer a, Integer b) { return min(a, b); });
#endif
}
template <class Integer>
__device__ inline Integer sum_of_lanes(Integer x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(~0u, x);
#else
  return over_lanes(x, [](Integer a, Integer b) { return a + b; });
#endif
}

// From here on words are as they are: the compiler makes them neither later, where they are needed,
// nor anew.
template <int kCount>
__device__ __forceinline__ void settle(uint32_t (&words)[kCount]) {
#pragma unroll
  for (uint32_t& word : words) asm volatile("" : "+r"(word));
}

// A number that all lanes have. The compiler then knows that it is the same, so what it computes
// from it takes neither registers nor time of the lanes.
__device__ inline uint32_t uniform(uint32_t x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_or_sync(~0u, x);
#else
  return __shfl_sync(~0u, x, 0);
#endif
}
__device__ inline int uniform(int x) { return static_cast<int>(uniform(static_cast<uint32_t>(x))); }
__device__ inline uint64_t uniform(uint64_t x) {
  const uint32_t low = uniform(static_cast<uint32_t>(x)),
                 high = uniform(static_cast<uint32_t>(x >> 32));
  return uint64_t{high} << 32 | low;
}

// Two halves of a word, but for their highest bits, against those of `least`, in one instruction:
// as magnitudes of float16. Up to infinity, 31744, they have the order of integers, and what is
// beyond is no number and so not below. 0xffff for each half that is not below.
__device__ inline uint32_t halves_from(uint32_t halves, uint32_t least) {
  uint32_t from;
  asm("{.reg .b32 magnitudes; abs.f16x2 magnitudes, %1; set.geu.u32.f16x2 %0, magnitudes, %2;}"
      : "=r"(from)
      : "r"(halves), "r"(least));
  return from;
}
// Where the half of one of two numbers is below it becomes 0.
__device__ inline void clear_below(float& first, float& second, uint32_t halves, uint32_t least) {
  asm("{.reg .b32 magnitudes; .reg .pred p, q; abs.f16x2 magnitudes, %2;"
      "setp.lt.f16x2 p|q, magnitudes, %3; selp.f32 %0, 0f00000000, %0, p;"
      "selp.f32 %1, 0f00000000, %1, q;}"
      : "+f"(first), "+f"(second)
      : "r"(halves), "r"(least));
}
// There it becomes negative.
__device__ inline void negate_below(float& first, float& second, uint32_t halves, uint32_t least) {
  asm("{.reg .b32 magnitudes; .reg .pred p, q; abs.f16x2 magnitudes, %2;"
      "setp.lt.f16x2 p|q, magnitudes, %3; @p neg.f32 %0, %0; @q neg.f32 %1, %1;}"
      : "+f"(first), "+f"(second)
      : "r"(halves), "r"(least));
}
// It becomes 0, and another two become negative there.
__device__ inline void clear_and_negate_below(float& first, float& second, float& other_first,
                                              float& other_second, uint32_t halves,
                                              uint32_t least) {
  asm("{.reg .b32 magnitudes; .reg .pred p, q; abs.f16x2 magnitudes, %4;"
      "setp.lt.f16x2 p|q, magnitudes, %5; selp.f32 %0, 0f00000000, %0, p;"
      "selp.f32 %1, 0f00000000, %1, q; @p neg.f32 %2, %2; @q neg.f32 %3, %3;}"
      : "+f"(first), "+f"(second), "+f"(other_first), "+f"(other_second)
      : "r"(halves), "r"(least));
}

// Lets the next launch of the stream begin when all blocks have called this or ended, where it is
// Together::kOverlapping. There, wait_for_launch_before waits until this launch has ended and what
// it wrote is visible. Each overlapping launch waits before it ends, so that whoever waits for it
// waits for all launches before. If the next one reads what launches further back wrote before it
// waits, this one waits first and then lets it begin.
__device__ inline void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The address of shared memory that the instructions below take.
__device__ inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Bulk copies and products of compute capability 9.0 and later. Makes what this thread wrote to
// shared memory visible to them; others may start them after a barrier of the threads.
__device__ inline void publish_writes() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// Starts to write `bytes` of shared to global memory, which caches keep no longer than they must.
// All three are multiples of 16.
__device__ inline void start_store(void* global, uint32_t shared, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(
          global),
      "r"(shared), "r"(bytes), "l"(policy)
      : "memory");
#endif
}
__device__ inline void end_stores() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
// Until the stores and sums that this thread started, but for the last kPending groups of them,
// have read shared memory.
template <int kPending = 0>
__device__ inline void wait_for_reads_of_stores() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
#endif
}

// Until those that this thread started are done, and others can see them.
__device__ inline void wait_for_stores() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}
// Between those and what the generic instructions of this thread order, in global memory.
__device__ inline void publish_writes_to_others() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

// Starts to bring `bytes` of global memory to the L2 cache; both are multiples of 16.
__device__ inline void prefetch_to_cache(const void* global, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
#endif
}

// Starts a 16-byte copy to shared memory; visible to this thread after wait_for_copies. Before
// compute capability 8.0 it is a load and a store, and nothing is waited for. Of several in a row
// all loads come first: nothing that is stored to shared memory keeps them back.
__device__ inline void start_copy(uint32_t shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
#else
  const uint4 words = __ldcg(static_cast<const uint4*>(global));
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
#endif
}
__device__ inline void start_copy(void* shared, const void* global) {
  start_copy(shared_address(shared), global);
}
// Starts a 4-byte copy, as start_copy; none before compute capability 8.0.
__device__ inline void start_copy_of_word(uint32_t shared, const void* global) {
  if (kIsAmpere)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}
// Copies the first `bytes` of 16 bytes. The others become 0.
__device__ inline void start_copy_of(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}
__device__ inline void wait_for_copies() {
  if (kIsAmpere) asm volatile("cp.async.wait_all;" ::: "memory");
}
// Copies form groups. These end a group, and wait for all groups but the last kPending.
__device__ inline void end_copies() {
  if (kIsAmpere) asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ inline void wait_for_older_copies() {
  if (kIsAmpere) asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// Waits for all but the last `pending` groups, a number that all lanes of a warp have. More than
// kMost groups count as kMost: then it waits for more than needed.
template <int kMost>
__device__ inline void wait_for_copies_before(int pending) {
  if constexpr (kMost == 0) {
    wait_for_older_copies<0>();
  } else if (pending >= kMost) {
    wait_for_older_copies<kMost>();
  } else {
    wait_for_copies_before<kMost - 1>(pending);
  }
}

// threadIdx.x, read where it is needed. The compiler would keep it, and what depends on it, in
// registers throughout a loop.
__device__ inline int thread_index_anew() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// blockIdx.x, read where it is needed.
__device__ inline int block_index_anew() {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

// Hides a number from the compiler, which would otherwise compute what depends on it once before a
// loop and keep that in registers.
__device__ inline uint32_t unknown(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Four 8x8 matrices of 16-bit elements, whose rows of 16 bytes lane i = 8 * matrix + row points to:
// a lane gets elements 2 * (lane % 4) and the next of row lane / 4; transposed, of column lane / 4.
__device__ inline void load_matrices(uint32_t (&matrices)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(shared)
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&matrices)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(shared)
               : "memory");
}

// c += a b, a: 16x16, b: 16x8, c: 16x8. A lane holds of a rows lane / 4 and 8 below, columns
// 2 * (lane % 4), the next, and both 8 further; of b the same of its columns; of c as of a.
template <class T>
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// A word of shared memory.
__device__ inline uint32_t load_word(uint32_t shared) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(shared) : "memory");
  return word;
}

// The nearest TF32 of a float32 number, as float32.
__device__ inline float to_tf32(float x) {
  uint32_t y;
#if __CUDA_ARCH__ >= 900
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
#else
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
#endif
  return __uint_as_float(y);
}

// c += a b of the TF32 parts of float32 numbers, without their lowest 13 bits, a: 16x8, b: 8x8,
// c: 16x8. A lane holds of a rows lane / 4 and 8 below, column lane % 4, and both 4 columns
// further; of b the same of its columns; of c as above.
__device__ inline void multiply_add_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// Adds to a number in global memory, without a result.
__device__ inline void add_to_global(float* number, float addend) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(number), "f"(addend) : "memory");
}
// Adds two neighbouring numbers in global memory, in one instruction where there is one.
__device__ inline void add_to_global(float* pair, float first, float second) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(pair), "f"(first), "f"(second)
               : "memory");
#else
  add_to_global(pair, first);
  add_to_global(pair + 1, second);
#endif
}

// Adds to four floats, which begin at a multiple of 16 bytes. From compute capability 9.0 on.
__device__ inline void add_to_global(float* four, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(four), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
#endif
}

// Stops the compiler from computing an address in shared memory anew wherever it is used.
template <class T>
__device__ inline T* keep_shared_address(T* pointer) {
  auto address = static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
  asm("" : "+r"(address));
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

// Loads from shared memory before this stay before it, for the latency of one instead of several:
// the compiler would rather save registers. By whole warps.
__device__ inline void keep_loads_together() { __syncwarp(); }

// Byte i of the result is 0xff where the byte of `x` that the i-th digit of kBytes names is
// negative, 0 elsewhere.
template <uint32_t kBytes>
__device__ inline uint32_t spread_signs(uint32_t x) {
  uint32_t y;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(x), "n"(kBytes | 0x8888));
  return y;
}

// Blocks of a cluster: a barrier in two halves, and stores to another block's shared memory, which
// it may read after the barrier. Only where code for compute capability 9.0 or later runs, like all
// that follows.
__device__ inline void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
// Enough if other blocks need to see barriers only that were just initialised.
__device__ inline void arrive_at_cluster_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ inline void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// Along x.
__device__ inline int rank_in_cluster() {
  uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}
__device__ inline int cluster_of_block() {
  uint32_t cluster = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(cluster));
#endif
  return static_cast<int>(cluster);
}
__device__ inline void store_to_cluster(void* shared, int block, uint64_t value) {
#if __CUDA_ARCH__ >= 900
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
      "st.shared::cluster.b64 [there], %2;}" ::"r"(address),
      "r"(block), "l"(value)
      : "memory");
#endif
}

// From another block's shared memory, which must not end before: after the barrier that follows.
template <class Vector>
__device__ inline Vector load_from_cluster(const void* shared, int block) {
  Vector value = {};
#if __CUDA_ARCH__ >= 900
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (sizeof(Vector) == 16) {
    asm volatile(
        "{.reg .b32 there; mapa.shared::cluster.u32 there, %4, %5;"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];}"
        : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
        : "r"(address), "r"(block)
        : "memory");
  } else {
    asm volatile(
        "{.reg .b32 there; mapa.shared::cluster.u32 there, %2, %3;"
        "ld.shared::cluster.v2.f32 {%0, %1}, [there];}"
        : "=f"(value.x), "=f"(value.y)
        : "r"(address), "r"(block)
        : "memory");
  }
#endif
  return value;
}

// What blocks of a cluster send to each other's shared memory is counted in bytes by a barrier
// there: its phase ends when one thread has said how many there will be and all have arrived. The
// barrier must be visible to the cluster, by a barrier of the cluster, before anyone uses it.
__device__ inline void init_byte_barrier(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;"
      "fence.mbarrier_init.release.cluster;" ::"r"(address)
      : "memory");
#endif
}
__device__ inline void expect_bytes(uint64_t* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes)
               : "memory");
#endif
}
// Phases are counted modulo 2.
__device__ inline void wait_for_bytes(uint64_t* barrier, int phase) {
#if __CUDA_ARCH__ >= 900
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile(
      "{.reg .pred done;"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;"
      "@!done bra again;}" ::"r"(address),
      "r"(phase)
      : "memory");
#endif
}
__device__ inline void send_to_cluster(void* shared, uint64_t* barrier, int block, uint64_t value) {
#if __CUDA_ARCH__ >= 900
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const auto counter = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile(
      "{.reg .b32 there, counter;"
      "mapa.shared::cluster.u32 there, %0, %2;"
      "mapa.shared::cluster.u32 counter, %1, %2;"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [there], %3, [counter];}" ::"r"(
          address),
      "r"(counter), "r"(block), "l"(value)
      : "memory");
#endif
}

}  // namespace megasoftmax
