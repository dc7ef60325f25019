// Loads, stores and bulk copies. `Words` is 16 bytes, what one thread moves at once.

struct alignas(16) Words {
  unsigned word[4];
};

__device__ __forceinline__ int load(const int* from) {
  int value;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ float load(const float* from) {
  float value;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
  return value;
}

// Reads only where the value is `there`. A branch around a load would keep others from being on their way with it.
__device__ __forceinline__ float load_where(bool there, const float* from, float otherwise) {
  float value;
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.b32 there, %2, 0;\n"
      "mov.f32 %0, %3;\n"
      "@there ld.global.f32 %0, [%1];\n"
      "}"
      : "=&f"(value)
      : "l"(from), "r"(static_cast<int>(there)), "f"(otherwise)
      : "memory");
  return value;
}

__device__ __forceinline__ long long load(const long long* from) {
  long long value;
  asm volatile("ld.global.b64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ Words load(const Words* from) {
  Words value;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
               : "l"(from)
               : "memory");
  return value;
}

__device__ __forceinline__ void store(int* to, int value) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ void store(float* to, float value) {
  asm volatile("st.global.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}

__device__ __forceinline__ void store(Words* to, const Words& value) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.word[0]), "r"(value.word[1]),
               "r"(value.word[2]), "r"(value.word[3])
               : "memory");
}

// The address is at hand from here on. Where the compiler may move its computation behind a wait, it does.
template <class T>
__device__ __forceinline__ void make_ready(T*& pointer) {
  asm volatile("" : "+l"(pointer));
}

__device__ __forceinline__ void make_ready(long long& value) {
  asm volatile("" : "+l"(value));
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ Words load_shared(const unsigned char* from) {
  Words value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
               : "r"(shared_address(from))
               : "memory");
  return value;
}

// Dynamic shared memory of the launch, 128-byte aligned.
__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char memory[];
  return memory;
}

// How much of it the launch has.
__device__ __forceinline__ int dynamic_shared_bytes() {
  int bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return bytes;
}

// Starts a copy into shared memory that keeps no register waiting.
__device__ __forceinline__ void copy_word(float* to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// What this thread has copied with `copy_word` is there for it, and for nobody else yet.
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ __forceinline__ void store_shared(unsigned char* to, unsigned value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared_address(to)), "r"(value) : "memory");
}

// What the word in shared memory was; the threads of a CTA add in any order.
__device__ __forceinline__ int add_shared(int* word, int value) {
  int before;
  asm volatile("atom.relaxed.cta.shared::cta.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(shared_address(word)), "r"(value)
               : "memory");
  return before;
}

// What this thread has stored to shared memory is there for the copy engine and for matrix products.
__device__ __forceinline__ void publish_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Barriers in shared memory. A phase ends when `arrivals` threads have arrived, and all bytes of the copies that were
// announced with an arrival are there. Any thread may wait, once the warp has met after the barrier was made.
using Barrier = unsigned long long;

__device__ __forceinline__ void make_barrier(Barrier* barrier, unsigned arrivals = 1) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes new barriers visible to the copy engine.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and says that copies of `bytes` are to come, each by one `copy_announced`.
__device__ __forceinline__ void announce(Barrier* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Starts a copy of `bytes` (a multiple of 16, both addresses 16-byte aligned) into shared memory. The keys are read once
// a launch, so their lines may leave the L2 first.
__device__ __forceinline__ void copy_announced(unsigned char* to, const unsigned char* from, unsigned bytes,
                                               Barrier* barrier) {
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Announces a copy, and starts it.
__device__ __forceinline__ void copy_to_shared(unsigned char* to, const unsigned char* from, unsigned bytes,
                                               Barrier* barrier) {
  announce(barrier, bytes);
  copy_announced(to, from, bytes, barrier);
}

// Asks for `bytes` (a multiple of 16, at a 16-byte aligned address) to be in the L2, where every later read finds what was
// written until then.
__device__ __forceinline__ void prefetch(const unsigned char* from, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Waits for the end of a phase. `parity`: 0 for the barrier's first phase, 1 for its second, 0 for its third.
__device__ __forceinline__ void wait_for(Barrier* barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
