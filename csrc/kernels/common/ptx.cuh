#pragma once
// Inline PTX behind names.

#include <cstdint>

namespace megasoftmax {

// 2^x to 2 ulp, subnormal results flushed to 0: the special-function unit's own instruction.
__device__ inline float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to 1 ulp.
__device__ inline float reciprocal_approximate(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 0xffff for each half whose sign bit is set, 0 for the others.
__device__ inline uint32_t signs_of_halves(uint32_t halves) {
  uint32_t signs;
  asm("prmt.b32 %0, %1, %1, 0xbb99;" : "=r"(signs) : "r"(halves));
  return signs;
}

// Starts a 16-byte copy to shared memory; visible to this thread after wait_for_copies.
__device__ inline void start_copy(void* shared, const void* global) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Copies in groups: ends one, and waits for all but the last kPending of them.
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void wait_for_older_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
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
__device__ inline void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
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
