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

template <class T>
inline void store(T* to, const T& value) {
  check_aligned(to);
  *to = value;
}

inline Words load_shared(const unsigned char* from) { return load(reinterpret_cast<const Words*>(from)); }

struct Copy {
  unsigned char* to;
  std::vector<unsigned char> bytes;
};

struct Barrier {
  unsigned long long made_in;  // which CTA; shared memory outlives one here
  unsigned uses;               // that have been waited for
  std::vector<Copy> copies;
};

inline void make_barrier(Barrier* barrier) {
  barrier->made_in = emulator::cta_number;
  barrier->uses = 0;
  barrier->copies.clear();
}

inline void publish_barriers() {}

inline void copy_to_shared(unsigned char* to, const unsigned char* from, unsigned bytes, Barrier* barrier) {
  if (barrier->made_in != emulator::cta_number) emulator::fail("a copy to a barrier that is not there");
  if (bytes % 16 || reinterpret_cast<unsigned long long>(from) % 16 || reinterpret_cast<unsigned long long>(to) % 16) {
    emulator::fail("a copy that is not aligned");
  }
  if (!barrier->copies.empty()) emulator::fail("a second copy to a barrier in use");
  barrier->copies.push_back({to, {from, from + bytes}});
  ++emulator::copies_in_flight;
  ++emulator::progress;
}

inline void wait_for_copy(Barrier* barrier, unsigned parity) {
  for (;;) {
    const bool made = barrier->made_in == emulator::cta_number;
    if (made && barrier->uses % 2 != parity) return;  // somebody has seen it arrive already
    if (made && !barrier->copies.empty()) break;
    emulator::yield();
  }
  for (const Copy& copy : barrier->copies) {
    std::memcpy(copy.to, copy.bytes.data(), copy.bytes.size());
    --emulator::copies_in_flight;
  }
  barrier->copies.clear();
  ++barrier->uses;
  ++emulator::progress;
}
