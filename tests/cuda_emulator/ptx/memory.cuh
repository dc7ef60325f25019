// Stands in for device/ptx/memory.cuh. A bulk copy reads its source when it is started and shows in shared memory
// when somebody waits for it: the two moments that a kernel may not mix up.

struct alignas(16) Words {
  unsigned word[4];
};

template <class T>
inline void check_aligned(const T* at) {
  if (reinterpret_cast<unsigned long long>(at) % sizeof(T)) emulator::fail("an access that is not aligned");
}

template <class T>
inline T load(const T* from) {
  check_aligned(from);
  return *from;
}

inline float load_where(bool there, const float* from, float otherwise) { return there ? load(from) : otherwise; }

template <class T>
inline void store(T* to, const T& value) {
  check_aligned(to);
  *to = value;
}

inline Words load_shared(const unsigned char* from) { return load(reinterpret_cast<const Words*>(from)); }

inline unsigned char* dynamic_shared() {
  alignas(128) static thread_local unsigned char memory[227 * 1024];
  return memory;
}

template <class T>
inline void make_ready(T*&) {}

inline void make_ready(long long&) {}

// Every other CTA has none: a kernel that asks how much there is does without it, too.
inline int dynamic_shared_bytes() { return (blockIdx.x + blockIdx.y) % 2 ? 0 : 227 * 1024; }

struct WordCopy {
  float *to, value;
};

inline std::vector<WordCopy>& word_copies() {
  static thread_local std::vector<WordCopy> of_threads[emulator::kMostThreads];
  return of_threads[emulator::current];
}

// Until this thread waits there is something else.
inline void copy_word(float* to, const float* from) {
  word_copies().push_back({to, load(from)});
  *to = 1e30f;
  ++emulator::copies_in_flight;
}

inline void wait_for_copies() {
  for (const WordCopy& copy : word_copies()) *copy.to = copy.value;
  emulator::copies_in_flight -= static_cast<int>(word_copies().size());
  word_copies().clear();
}

inline void store_shared(unsigned char* to, unsigned value) { store(reinterpret_cast<unsigned*>(to), value); }

inline int add_shared(int* word, int value) {
  const int before = *word;
  *word += value;
  return before;
}

inline void publish_shared() {}

struct Copy {
  unsigned char* to;
  std::vector<unsigned char> bytes;
};

struct Barrier {
  unsigned long long made_in;  // which CTA; shared memory outlives one here
  unsigned arrivals, arrived, phases, announced;  // bytes of copies that have not been started
  std::vector<Copy> copies;  // of the phase that runs
};

inline bool is_made(const Barrier* barrier) { return barrier->made_in == emulator::cta_number; }

inline void end_phase(Barrier* barrier) {
  barrier->arrived = 0;
  ++barrier->phases;
  ++emulator::progress;
}

inline void make_barrier(Barrier* barrier, unsigned arrivals = 1) {
  barrier->made_in = emulator::cta_number;
  barrier->arrivals = arrivals;
  barrier->arrived = barrier->phases = barrier->announced = 0;
  barrier->copies.clear();
}

inline void publish_barriers() {}

inline void arrive(Barrier* barrier) {
  if (!is_made(barrier)) emulator::fail("an arrival at a barrier that is not there");
  if (barrier->arrived == barrier->arrivals) emulator::fail("more arrivals than a barrier takes");
  if (++barrier->arrived == barrier->arrivals && barrier->copies.empty() && barrier->announced == 0) end_phase(barrier);
  ++emulator::progress;
}

inline void announce(Barrier* barrier, unsigned bytes) {
  if (!is_made(barrier)) emulator::fail("copies announced to a barrier that is not there");
  barrier->announced += bytes;
  arrive(barrier);
}

inline void copy_announced(unsigned char* to, const unsigned char* from, unsigned bytes, Barrier* barrier) {
  if (!is_made(barrier)) emulator::fail("a copy to a barrier that is not there");
  if (barrier->announced < bytes) emulator::fail("a copy that was not announced");
  if (bytes % 16 || reinterpret_cast<unsigned long long>(from) % 16 || reinterpret_cast<unsigned long long>(to) % 16) {
    emulator::fail("a copy that is not aligned");
  }
  barrier->copies.push_back({to, {from, from + bytes}});
  barrier->announced -= bytes;
  ++emulator::copies_in_flight;
  ++emulator::progress;
}

inline void copy_to_shared(unsigned char* to, const unsigned char* from, unsigned bytes, Barrier* barrier) {
  announce(barrier, bytes);
  copy_announced(to, from, bytes, barrier);
}

// What is read later is what is there then.
inline void prefetch(const unsigned char* from, unsigned bytes) {
  if (bytes % 16 || reinterpret_cast<unsigned long long>(from) % 16) emulator::fail("a prefetch that is not aligned");
}

inline void wait_for(Barrier* barrier, unsigned parity) {
  for (;;) {
    if (is_made(barrier) && barrier->phases % 2 != parity) return;
    if (is_made(barrier) && barrier->arrived == barrier->arrivals && barrier->announced == 0) break;  // its copies arrive now
    emulator::yield();
  }
  for (const Copy& copy : barrier->copies) {
    std::memcpy(copy.to, copy.bytes.data(), copy.bytes.size());
    --emulator::copies_in_flight;
  }
  barrier->copies.clear();
  end_phase(barrier);
}
