// The ranking as integer keys (contract, section 5), and the Top16 of keys that the threads of a CTA hold.

#include "ptx/math.cuh"
#include "ptx/warp.cuh"

constexpr int kTop = 16;
constexpr int kMostBlocks = 8192;
constexpr int kIdBits = 13;
constexpr int kPaddingId = -1;

// The better candidate has the larger key, no two blocks have the same, and 0 is no candidate.
using Key = unsigned long long;

// Bits of a float as an unsigned number that grows with it, and back.
__device__ __forceinline__ unsigned ordered_bits(int bits) {
  return static_cast<unsigned>(bits ^ (bits >> 31 & 0x7fffffff)) ^ 0x80000000u;
}

__device__ __forceinline__ int unordered_bits(unsigned ordered) {
  const int bits = static_cast<int>(ordered ^ 0x80000000u);
  return bits ^ (bits >> 31 & 0x7fffffff);
}

// From the top: forced or not, the score (NaN as -inf, -0.0 as +0.0), the lower id.
__device__ __forceinline__ Key ranking_key(float score, int id, int num_valid, int force_begin, int force_end) {
  const bool candidate = (id >= 0) & (id < num_valid) & (id < kMostBlocks);
  const float number = score == score ? score + 0.0f : minus_infinity();
  const unsigned ordered = ordered_bits(bits_of(number));
  const bool forced = (id < force_begin) | (id >= num_valid - force_end);
  const Key key = (static_cast<Key>(forced) << 32 | ordered) << kIdBits | static_cast<unsigned>(kMostBlocks - 1 - id);
  return candidate ? key : 0;
}

__device__ __forceinline__ int block_of(Key key) {
  return kMostBlocks - 1 - static_cast<int>(key & (kMostBlocks - 1));
}

// The bits of a key's score: the raw ones of a score that is neither NaN nor -0.0.
__device__ __forceinline__ int score_bits_of(Key key) {
  return unordered_bits(static_cast<unsigned>(key >> kIdBits));
}

__device__ __forceinline__ bool is_forced(Key key) {
  return key >> (kIdBits + 32) != 0;
}

// For how many i below `Count`, a multiple of four, `holds(i)` is true. Added up as floats, in four sums: the FP32 units
// have nothing else to do, and no addition waits for the one before. The last bits of a sum from 2**23 on are a number.
template <int Count, class Holds>
__device__ __forceinline__ int count_where(const Holds& holds) {
  float sums[4] = {1 << 23, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    if (holds(i)) sums[i % 4] += 1;
  }
  return bits_of(sums[0] + sums[1] + (sums[2] + sums[3])) & 0xffff;
}

// How many of `count` keys in shared memory, at least one, are larger. As many as round up to a multiple of `Step` are
// looked at.
template <int Step>
__device__ __forceinline__ int larger_keys(const Key* keys, int count, Key own) {
  int larger = 0;
  int first = 0;
#pragma unroll 1
  do {
    larger += count_where<Step>([&](int i) { return keys[first + i] > own; });
    first += Step;
  } while (first < count);
  return larger;
}

// Which columns of a row are candidates, and which of them are forced.
struct Blocks {
  int num_valid;
  int force_begin;
  int force_end;
  int scale;  // 1, 2 or 4: half of it is the shift
  int offset;

  // How many columns stand for blocks below `id`, of those that can be candidates.
  __device__ __forceinline__ int columns_below(int id) const {
    const int below = id < kMostBlocks ? id : kMostBlocks;
    return ((below > offset ? below : offset) - offset + scale - 1) >> (scale >> 1);
  }

  __device__ __forceinline__ Key key(float score, int column) const {
    return ranking_key(score, column * scale + offset, num_valid, force_begin, force_end);
  }

  __device__ __forceinline__ int column_of(Key key) const {
    return (block_of(key) - offset) >> (scale >> 1);
  }
};

// The ids of 16 selected blocks in shared memory, in any order. Where there is none an entry keeps what `clear` gives it,
// which comes behind all ids.
struct alignas(16) Selected {
  int order[kTop];

  __device__ __forceinline__ void clear(int index) {
    order[index] = kMostBlocks + index;
  }

  __device__ __forceinline__ int id(int index) const {
    return order[index] < kMostBlocks ? order[index] : kPaddingId;
  }

  // Where an entry goes in a row: ids ascend, what is no candidate is last.
  __device__ __forceinline__ int place(int index) const {
    const int own = order[index];
    return count_where<kTop>([&](int i) { return order[i] < own; });
  }
};
