// The ruler: kernels that read a buffer once and do nothing else. A scorer cannot be faster than its
// keys can be read; `plain_read` is the read of a kernel without programmatic dependent launch,
// `chained_read` that of a chain with it.
//
// Every CTA owns one contiguous slice. A thread keeps kInFlight 16-byte loads in flight, which bypass
// L1; the values are folded together so that no load can be dropped.
// Header-free, for NVRTC. Launch with kThreads threads; the best grid depends on the size, so a caller
// tries several and takes the fastest.

struct alignas(16) Line {
  unsigned word[4];
};

constexpr int kThreads = 512;
constexpr int kInFlight = 8;
// Random data folds to this about once in 2**32 threads: the store is there for the compiler alone.
constexpr unsigned kUnlikely = 0x51ed270bu;

__device__ __forceinline__ Line stream(const Line* from) {
  Line line;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(line.word[0]), "=r"(line.word[1]), "=r"(line.word[2]), "=r"(line.word[3])
               : "l"(from));
  return line;
}

__device__ __forceinline__ unsigned fold(const Line& line) {
  return line.word[0] ^ line.word[1] ^ line.word[2] ^ line.word[3];
}

// `lines` below 2**31: at small sizes a 64-bit division would be part of what is measured.
__device__ __forceinline__ void read_slice(const Line* data, unsigned lines, unsigned* sink) {
  const unsigned share = (lines + gridDim.x - 1) / gridDim.x;
  const unsigned begin = share * blockIdx.x;
  const unsigned end = min(begin + share, lines);
  unsigned folded = 0;
  unsigned at = begin + threadIdx.x;
  for (; at + (kInFlight - 1) * kThreads < end; at += kInFlight * kThreads) {
    Line line[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) line[i] = stream(data + at + i * kThreads);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) folded ^= fold(line[i]);
  }
  for (; at < end; at += kThreads) folded ^= fold(stream(data + at));
  if (folded == kUnlikely) *sink = folded;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    plain_read(const Line* data, unsigned lines, unsigned* sink) {
  read_slice(data, lines, sink);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    chained_read(const Line* data, unsigned lines, unsigned* sink) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  read_slice(data, lines, sink);
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
