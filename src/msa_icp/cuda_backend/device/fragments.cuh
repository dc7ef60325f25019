// Matrix fragments of e4m3 rows.
//
// A dot product does not mind in which order the 128 dimensions are added, as long as keys and queries agree. So
// a lane takes 16 contiguous bytes of each half of its row: 4 bytes are its share of one 16-wide step, and
// the eight steps need two 16-byte loads a row. The order of the steps is the same for every query length.

#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "shard.cuh"

constexpr int kSteps = kDim / 16;
constexpr int kGroup = 8;  // query rows of one matrix instruction
constexpr int kHalf = kDim / 2;

// Both halves' 16 bytes of a row, of which `from` points to the first.
__device__ __forceinline__ void load_halves(Words (&halves)[2], const unsigned char* from) {
  halves[0] = load(reinterpret_cast<const Words*>(from));
  halves[1] = load(reinterpret_cast<const Words*>(from + kHalf));
}

// The lane's share of step `step` of a row of which it holds the two `halves`: two registers of a fragment.
__device__ __forceinline__ void step_share(const Words (&halves)[2], int step, unsigned& low, unsigned& high) {
  e4m3x4_to_fp16x4(halves[step / 4].word[step % 4], low, high);
}

// Eight query rows: lane g * 4 + t holds its share of row g.
struct QueryFragment {
  unsigned share[kSteps][2];

  // `from` points to the lane's 16 bytes of its row, or is null for a row that does not exist.
  __device__ __forceinline__ void take(const unsigned char* from) {
    Words halves[2] = {};
    if (from != nullptr) load_halves(halves, from);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) step_share(halves, step, share[step][0], share[step][1]);
  }
};

// Sixteen key rows in shared memory as fragments of a first factor.
struct KeyFragment {
  Words upper[2], lower[2];  // rows lane / 4, and eight rows on

  __device__ __forceinline__ void take(const unsigned char* keys, int lane) {
    const unsigned char* from = keys + lane / 4 * kDim + lane % 4 * 16;
    upper[0] = load_shared(from);
    upper[1] = load_shared(from + kHalf);
    lower[0] = load_shared(from + 8 * kDim);
    lower[1] = load_shared(from + 8 * kDim + kHalf);
  }

  __device__ __forceinline__ void share(int step, unsigned (&a)[4]) const {
    step_share(upper, step, a[0], a[2]);
    step_share(lower, step, a[1], a[3]);
  }
};
