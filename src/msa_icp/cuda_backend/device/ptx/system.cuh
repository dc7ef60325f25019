// Words that other GPUs, or other processes, read and write: loads and stores of system scope.

// What the word's writer had done before its `signal` is visible after this.
__device__ __forceinline__ int poll(const int* word) {
  int value;
  asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Everything that this thread has read or written, or met threads that had, is before this store.
__device__ __forceinline__ void signal(int* word, int value) {
  asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// One word, all of it or nothing; no order with others.
__device__ __forceinline__ long long poll_tagged(const long long* word) {
  long long value;
  asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void store_tagged(long long* word, long long value) {
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// A word that other CTAs change; no order with others.
__device__ __forceinline__ int peek(const int* word) {
  int value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// What the word was.
__device__ __forceinline__ int add(int* word, int value) {
  int before;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
  return before;
}
