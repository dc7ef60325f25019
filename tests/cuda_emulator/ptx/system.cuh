// Stands in for device/ptx/system.cuh. Ranks may be threads of this process, or processes.

inline void count_poll(const void* word) { emulator::polls += word == emulator::watched; }

inline int poll(const int* word) {
  count_poll(word);
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

inline void signal(int* word, int value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

inline long long poll_tagged(const long long* word) {
  count_poll(word);
  return __atomic_load_n(word, __ATOMIC_RELAXED);
}

inline void store_tagged(long long* word, long long value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }

inline int peek(const int* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }

inline int add(int* word, int value) { return __atomic_fetch_add(word, value, __ATOMIC_RELAXED); }
