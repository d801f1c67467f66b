#pragma once
// Hopper's instructions behind names: barriers in shared memory, tensor copies, and asynchronous
// products of a warpgroup, 128 threads.

#include <cuda.h>

#include <algorithm>

#include "../../common/ptx.cuh"

namespace megasoftmax {

// A barrier in shared memory. The parities of its phases alternate between 0 and 1.
struct Barrier {
  uint32_t address;

  __device__ void init(int arrivals) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals));
  }
  __device__ void arrive() const {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
  }
  // Arrives at the same barrier of another block of the cluster.
  __device__ void arrive_in(int block) const {
    asm volatile(
        "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(address),
        "r"(block)
        : "memory");
  }
  // Arrives. The phase also waits for so many bytes of copies.
  __device__ void arrive_and_expect(int bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes)
                 : "memory");
  }
  // The phase also waits for the copies that this thread has begun by start_copy. Some thread
  // arrives after that.
  __device__ void expect_copies() const {
    asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(address) : "memory");
  }
  // Waits until the phase of this parity is complete.
  __device__ void wait(int parity) const {
    asm volatile(
        "{.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;}" ::"r"(address),
        "r"(parity)
        : "memory");
  }
};

// Which block of its cluster this is; 0 without one.
__device__ inline int block_of_cluster() {
  int block;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
  return block;
}

__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Prefetches a map that copies will use.
__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Prefetches what loads will read to the L1 cache.
__device__ inline void prefetch(const void* global) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(global) : "memory");
}

// Starts to copy a box of a tensor to shared memory, which counts on the barrier. What lies beyond
// the tensor becomes 0.
__device__ inline void start_copy_of_box(uint32_t shared, const CUtensorMap& map, Barrier barrier,
                                         int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier.address), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// As start_copy_of_box, of a map of five dimensions: rows that begin anywhere.
inline __device__ void start_copy_of_rows(uint32_t shared, const CUtensorMap& map, Barrier barrier,
                                          int column, int eight) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %5, %5, %5, %4}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier.address), "r"(column), "r"(eight), "r"(0)
      : "memory");
}

// Starts to copy kPanels boxes of `rows` rows that lie side by side.
template <int kPanels>
__device__ __forceinline__ void start_copy_of_panels(uint32_t shared, const CUtensorMap& map,
                                                     Barrier barrier, int rows, int first_row,
                                                     int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel)
    start_copy_of_box(shared + panel * rows * 128, map, barrier, panel * 64, first_row, head,
                      batch);
}

// Starts to copy bytes to shared memory, which counts on the barrier. Size and addresses are
// multiples of 16.
__device__ inline void start_copy_of_bytes(uint32_t shared, const void* global, int bytes,
                                           Barrier barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier.address)
      : "memory");
}

// Starts to copy bytes of shared memory to the same place of another block of the cluster, which
// counts on the same barrier there. Size and addresses are multiples of 16.
__device__ inline void start_copy_to_block(uint32_t to, uint32_t from, int bytes, Barrier barrier,
                                           int block) {
  asm volatile(
      "{.reg .b32 there, counter;\n"
      "mapa.shared::cluster.u32 there, %0, %4;\n"
      "mapa.shared::cluster.u32 counter, %3, %4;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
      "[there], [%1], %2, [counter];}" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier.address), "r"(block)
      : "memory");
}

// Starts to write a box in shared memory to a tensor in global memory, except for what lies beyond
// it.
__device__ inline void start_store_of_box(const CUtensorMap& map, uint32_t shared, int column,
                                          int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::
          "l"(&map),
      "r"(shared), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
// Starts to add a box in shared memory to a tensor in global memory.
__device__ inline void start_sum_of_box(const CUtensorMap& map, uint32_t shared, int column,
                                        int row, int head, int batch) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
      "r"(shared), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// Loads 8 bytes of shared memory.
__device__ inline void load_pair(uint32_t (&words)[2], uint32_t shared) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "r"(shared)
               : "memory");
}
// Loads 16 bytes of shared memory.
__device__ inline void load_four(uint32_t (&words)[4], uint32_t shared) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared)
               : "memory");
}
// Stores 4 bytes to shared memory.
__device__ inline void store_word(uint32_t shared, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(word) : "memory");
}
// Stores 16 bytes to shared memory.
__device__ inline void store_four(uint32_t shared, const uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Starts to load words that no thread writes. The compiler may not move the load to where they are
// needed. The address is a multiple of their bytes.
__device__ inline void start_load(uint32_t (&words)[2], const uint32_t* global) {
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(global));
}
__device__ inline void start_load(uint32_t (&words)[4], const uint32_t* global) {
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(global));
}

// Loads what no thread writes if `is_given`, without a branch. Else the word stays as it is.
__device__ inline void load_if(bool is_given, uint32_t& word, const uint32_t* global) {
  asm("{.reg .pred p; setp.ne.b32 p, %2, 0; @p ld.global.nc.b32 %0, [%1];}"
      : "+r"(word)
      : "l"(global), "r"(static_cast<int>(is_given)));
}
__device__ inline void load_if(bool is_given, uint32_t (&words)[4], const uint4* global) {
  asm("{ .reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
      : "l"(global), "r"(int{is_given}));
}
__device__ inline void load_if(bool is_given, uint32_t& word, const uint16_t* global) {
  asm("{.reg .pred p; setp.ne.b32 p, %2, 0; @p ld.global.nc.u16 %0, [%1];}"
      : "+r"(word)
      : "l"(global), "r"(static_cast<int>(is_given)));
}

// Waits until loads of the warp from shared memory are complete, from which `words` is made. An
// arrival at a barrier after a load does not wait for it, so others could overwrite the words
// before.
__device__ __forceinline__ void wait_for_loads(uint32_t words) {
  constexpr uint32_t kAny = 0x9e3779b9;
  if (__any_sync(~0u, words == kAny)) __nanosleep(0);  // the vote needs them, whatever they are
}

// Sets the registers of each thread of a warpgroup.
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Synchronises the threads of a warpgroup. Barrier 0 is that of __syncthreads.
__device__ inline void sync_warpgroup(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}
// Synchronises warpgroups 0 to kWarpgroups - 1.
template <int kWarpgroups>
__device__ inline void sync_warpgroups() {
  asm volatile("bar.sync %0, %1;" ::"n"(kWarpgroups + 1), "n"(128 * kWarpgroups) : "memory");
}

// Ping-pong: a warpgroup waits until the one before it passes, by a barrier of its own. The last
// one passes first.
template <int kWarpgroups>
__device__ inline void wait_in_ping_pong(int warpgroup) {
  asm volatile("bar.sync %0, 256;" ::"r"(warpgroup + kWarpgroups + 1) : "memory");
}
template <int kWarpgroups>
__device__ inline void pass_in_ping_pong(int warpgroup) {
  const int next = warpgroup == kWarpgroups - 1 ? 0 : warpgroup + 1;
  asm volatile("bar.arrive %0, 256;" ::"r"(next + kWarpgroups + 1) : "memory");
}

// Synchronises so many other warps, by a barrier with a number of their own.
template <int kNumber, int kWarps>
__device__ inline void sync_warps() {
  asm volatile("bar.sync %0, %1;" ::"n"(kNumber), "n"(32 * kWarps) : "memory");
}

// Writes four 8x8 matrices of 16-bit elements, as load_matrices reads them.
__device__ inline void store_matrices(uint32_t shared, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}
// As load_matrices_transposed reads them.
__device__ inline void store_matrices_transposed(uint32_t shared, const uint32_t (&matrices)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
      "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
      : "memory");
}

// Precedes products: orders them after earlier writes to their registers.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until all but the last kPending groups are done.
template <int kPending>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// x ^ y, computed here: the compiler may move it neither before nor behind a wait.
__device__ __forceinline__ uint32_t xor_here(uint32_t x, uint32_t y) {
  uint32_t result;
  asm volatile("xor.b32 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
  return result;
}

// Tells the compiler that products may have changed these registers.
template <int kN>
__device__ __forceinline__ void touch(float (&results)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
    asm volatile(""
                 : "+f"(results[n][0]), "+f"(results[n][1]), "+f"(results[n][2]),
                   "+f"(results[n][3])::"memory");
}

// The descriptor of a matrix in shared memory: panels of 64 columns, rows of 128 bytes, swizzled as
// tensor copies do it. `panel_bytes` is used if the product does not sum over the columns.
__device__ inline uint64_t matrix_at(uint32_t address, int panel_bytes) {
  const uint64_t encoded_address = (address & 0x3ffff) >> 4;
  return encoded_address | static_cast<uint64_t>(panel_bytes >> 4) << 16 |
         uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

// The descriptor of a matrix of 32 columns: rows of 64 bytes, swizzled as tensor copies do it.
__device__ inline uint64_t narrow_matrix_at(uint32_t address) {
  const uint64_t encoded_address = (address & 0x3ffff) >> 4;
  return encoded_address | uint64_t{1} << 16 | uint64_t{512 >> 4} << 32 | uint64_t{2} << 62;
}

// The descriptor of a matrix of 32 or 64 columns.
template <int kColumns>
__device__ inline uint64_t rows_at(uint32_t address) {
  return kColumns == 32 ? narrow_matrix_at(address) : matrix_at(address, 16);
}

// The descriptor of a matrix of up to 64 columns whose rows repeat after eight rows.
__device__ inline uint64_t rows_alike_at(uint32_t address) {
  return matrix_at(address, 16) & ~(uint64_t{0x3fff} << 32);
}

// The descriptor of a matrix that begins so many bytes later, a multiple of 16.
__device__ inline uint64_t moved(uint64_t matrix, int bytes) {
  const uint32_t low = static_cast<uint32_t>(matrix) + (bytes >> 4);
  return matrix >> 32 << 32 | low;
}

// Operands of products: numbers of registers, and the registers of groups of 8 columns.
#define MEGASOFTMAX_4(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define MEGASOFTMAX_8(d, n) MEGASOFTMAX_4(d, n), MEGASOFTMAX_4(d, n + 1)
#define MEGASOFTMAX_16(d, n) MEGASOFTMAX_8(d, n), MEGASOFTMAX_8(d, n + 2)
#define MEGASOFTMAX_32(d, n) MEGASOFTMAX_16(d, n), MEGASOFTMAX_16(d, n + 4)
#define MEGASOFTMAX_TO_7 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MEGASOFTMAX_TO_15 MEGASOFTMAX_TO_7 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MEGASOFTMAX_TO_23 MEGASOFTMAX_TO_15 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define MEGASOFTMAX_TO_31 MEGASOFTMAX_TO_23 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define MEGASOFTMAX_TO_39 MEGASOFTMAX_TO_31 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define MEGASOFTMAX_TO_47 MEGASOFTMAX_TO_39 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MEGASOFTMAX_TO_63                                               \
  MEGASOFTMAX_TO_47                                                     \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, " \
  "%61, %62, %63"
#define MEGASOFTMAX_TO_95                                                  \
  MEGASOFTMAX_TO_63                                                        \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, "    \
  "%77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, " \
  "%91, %92, %93, %94, %95"
#define MEGASOFTMAX_TO_127                                                   \
  MEGASOFTMAX_TO_95                                                          \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, "   \
  "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, " \
  "%120, %121, %122, %123, %124, %125, %126, %127"

// Starts results = a b^T, or += if is_sum: a 64 x 16, b kN * 8 rows and 16 columns, both in shared
// memory. If kIsTransposed, b has 16 rows and kN * 8 columns.
template <class T, bool kIsTransposed = false, int kN>
__device__ __forceinline__ void start_product(float (&results)[kN][4], uint64_t a, uint64_t b,
                                              int is_sum) {
  static_assert(kN == 2 || kN == 4 || kN == 6 || kN == 8 || kN == 16);
#define MEGASOFTMAX_PRODUCT(type, columns, registers, first, second, third, fourth, ...)  \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" #third                                   \
               ", 0; wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type \
               " {" registers "}, %" #first ", %" #second ", p, 1, 1, 0, %" #fourth ";}"  \
               : __VA_ARGS__                                                              \
               : "l"(a), "l"(b), "r"(is_sum), "n"(kIsTransposed))
#define MEGASOFTMAX_PRODUCTS(type)                                                                \
  if constexpr (kN == 2)                                                                          \
    MEGASOFTMAX_PRODUCT(type, 16, MEGASOFTMAX_TO_7, 8, 9, 10, 11, MEGASOFTMAX_8(results, 0));     \
  if constexpr (kN == 4)                                                                          \
    MEGASOFTMAX_PRODUCT(type, 32, MEGASOFTMAX_TO_15, 16, 17, 18, 19, MEGASOFTMAX_16(results, 0)); \
  if constexpr (kN == 6)                                                                          \
    MEGASOFTMAX_PRODUCT(type, 48, MEGASOFTMAX_TO_23, 24, 25, 26, 27, MEGASOFTMAX_16(results, 0),  \
                        MEGASOFTMAX_8(results, 4));                                               \
  if constexpr (kN == 8)                                                                          \
    MEGASOFTMAX_PRODUCT(type, 64, MEGASOFTMAX_TO_31, 32, 33, 34, 35, MEGASOFTMAX_32(results, 0)); \
  if constexpr (kN == 16)                                                                         \
  MEGASOFTMAX_PRODUCT(type, 128, MEGASOFTMAX_TO_63, 64, 65, 66, 67, MEGASOFTMAX_32(results, 0),   \
                      MEGASOFTMAX_32(results, 8))
  if constexpr (std::is_same_v<T, __half>) {
    MEGASOFTMAX_PRODUCTS("f16");
  } else {
    MEGASOFTMAX_PRODUCTS("bf16");
  }
#undef MEGASOFTMAX_PRODUCTS
#undef MEGASOFTMAX_PRODUCT
}

// Starts results = a b, or += if is_sum: a 64 x 16 in registers, b 16 rows and kN * 8 columns. The
// last panel of b may be used in part. If not kIsTransposed, b has kN * 8 rows and 16 columns.
template <class T, bool kIsTransposed = true, int kN>
__device__ __forceinline__ void start_product(float (&results)[kN][4], const uint32_t (&a)[4],
                                              uint64_t b, int is_sum = 1) {
  static_assert(kN == 4 || kN == 6 || kN == 8 || kN == 10 || kN == 12 || kN == 16 || kN == 24 ||
                kN == 32);
#define MEGASOFTMAX_PRODUCT(type, columns, registers, a0, a1, a2, a3, second, third, fourth, ...) \
  asm volatile(                                                                                   \
      "{.reg .pred p; setp.ne.b32 p, %" #third ", 0; wgmma.mma_async.sync.aligned.m64n" #columns  \
      "k16.f32." type "." type " {" registers "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3           \
      "}, %" #second ", p, 1, 1, %" #fourth ";}"                                                  \
      : __VA_ARGS__                                                                               \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(is_sum), "n"(kIsTransposed))
#define MEGASOFTMAX_PRODUCTS(type)                                                      \
  if constexpr (kN == 4)                                                                \
    MEGASOFTMAX_PRODUCT(type, 32, MEGASOFTMAX_TO_15, 16, 17, 18, 19, 20, 21, 22,        \
                        MEGASOFTMAX_16(results, 0));                                    \
  if constexpr (kN == 6)                                                                \
    MEGASOFTMAX_PRODUCT(type, 48, MEGASOFTMAX_TO_23, 24, 25, 26, 27, 28, 29, 30,        \
                        MEGASOFTMAX_8(results, 0), MEGASOFTMAX_8(results, 2),           \
                        MEGASOFTMAX_8(results, 4));                                     \
  if constexpr (kN == 8)                                                                \
    MEGASOFTMAX_PRODUCT(type, 64, MEGASOFTMAX_TO_31, 32, 33, 34, 35, 36, 37, 38,        \
                        MEGASOFTMAX_32(results, 0));                                    \
  if constexpr (kN == 10)                                                               \
    MEGASOFTMAX_PRODUCT(type, 80, MEGASOFTMAX_TO_39, 40, 41, 42, 43, 44, 45, 46,        \
                        MEGASOFTMAX_32(results, 0), MEGASOFTMAX_8(results, 8));         \
  if constexpr (kN == 12)                                                               \
    MEGASOFTMAX_PRODUCT(type, 96, MEGASOFTMAX_TO_47, 48, 49, 50, 51, 52, 53, 54,        \
                        MEGASOFTMAX_32(results, 0), MEGASOFTMAX_8(results, 8),          \
                        MEGASOFTMAX_8(results, 10));                                    \
  if constexpr (kN == 16)                                                               \
    MEGASOFTMAX_PRODUCT(type, 128, MEGASOFTMAX_TO_63, 64, 65, 66, 67, 68, 69, 70,       \
                        MEGASOFTMAX_32(results, 0), MEGASOFTMAX_32(results, 8));        \
  if constexpr (kN == 24)                                                               \
    MEGASOFTMAX_PRODUCT(type, 192, MEGASOFTMAX_TO_95, 96, 97, 98, 99, 100, 101, 102,    \
                        MEGASOFTMAX_32(results, 0), MEGASOFTMAX_32(results, 8),         \
                        MEGASOFTMAX_32(results, 16));                                   \
  if constexpr (kN == 32)                                                               \
  MEGASOFTMAX_PRODUCT(type, 256, MEGASOFTMAX_TO_127, 128, 129, 130, 131, 132, 133, 134, \
                      MEGASOFTMAX_32(results, 0), MEGASOFTMAX_32(results, 8),           \
                      MEGASOFTMAX_32(results, 16), MEGASOFTMAX_32(results, 24))
  if constexpr (std::is_same_v<T, __half>) {
    MEGASOFTMAX_PRODUCTS("f16");
  } else {
    MEGASOFTMAX_PRODUCTS("bf16");
  }
#undef MEGASOFTMAX_PRODUCTS
#undef MEGASOFTMAX_PRODUCT
}

// The first columns of 64 rows, 16 a step, in registers of a warpgroup.
template <int kSteps>
struct HeldColumns {
  uint32_t steps[std::max(kSteps, 1)][4];
};

// Starts results = a b^T: a 64 rows, b kN * 8 rows, both with kColumns columns in panels of so many
// bytes. Columns that registers hold are not read from a.
template <class T, int kColumns, int kN, int kHeld>
__device__ __forceinline__ void start_product_of_rows(float (&results)[kN][4],
                                                      const HeldColumns<kHeld>& held, uint64_t a,
                                                      int panel_bytes_of_a, uint64_t b,
                                                      int panel_bytes_of_b) {
#pragma unroll
  for (int step = 0; step < kColumns / 16; ++step) {
    const int panel = step / 4, offset = step % 4 * 32;
    const uint64_t columns = moved(b, panel * panel_bytes_of_b + offset);
    if (step < kHeld) {
      start_product<T, false>(results, held.steps[step], columns, step > 0);
    } else {
      start_product<T>(results, moved(a, panel * panel_bytes_of_a + offset), columns, step > 0);
    }
  }
}
template <class T, int kColumns, int kN>
__device__ __forceinline__ void start_product_of_rows(float (&results)[kN][4], uint64_t a,
                                                      int panel_bytes_of_a, uint64_t b,
                                                      int panel_bytes_of_b) {
  start_product_of_rows<T, kColumns>(results, HeldColumns<0>(), a, panel_bytes_of_a, b,
                                     panel_bytes_of_b);
}

// Starts results += a b: a 64 x 16 * kSteps in registers, b with rows of kRowBytes bytes.
template <class T, int kRowBytes = 128, int kN, int kSteps>
__device__ __forceinline__ void start_sum_of_products(float (&results)[kN][4],
                                                      const uint32_t (&a)[kSteps][4], uint64_t b) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    start_product<T>(results, a[step], moved(b, step * 16 * kRowBytes));
}

#undef MEGASOFTMAX_4
#undef MEGASOFTMAX_8
#undef MEGASOFTMAX_16
#undef MEGASOFTMAX_32
#undef MEGASOFTMAX_TO_15
#undef MEGASOFTMAX_TO_23
#undef MEGASOFTMAX_TO_31
#undef MEGASOFTMAX_TO_39
#undef MEGASOFTMAX_TO_47
#undef MEGASOFTMAX_TO_63
#undef MEGASOFTMAX_TO_95
#undef MEGASOFTMAX_TO_127

}  // namespace megasoftmax
