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
  if (id < 0 || id >= num_valid || id >= kMostBlocks) return 0;
  const float number = score == score ? score + 0.0f : minus_infinity();
  const unsigned ordered = ordered_bits(bits_of(number));
  const bool forced = id < force_begin || id >= num_valid - force_end;
  return (static_cast<Key>(forced) << 32 | ordered) << kIdBits | static_cast<unsigned>(kMostBlocks - 1 - id);
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

// How many of `count` keys in shared memory, an even number, are larger.
__device__ __forceinline__ int larger_keys(const Key* keys, int count, Key own) {
  int larger = 0;
#pragma unroll 8
  for (int i = 0; i < count; ++i) larger += keys[i] > own;
  return larger;
}

// Where a block of the selected 16 goes in a row: ids ascending, what is no candidate last. `best` are 16 keys.
struct Placed {
  int id;
  int place;
};

__device__ __forceinline__ Placed place_ascending(const Key* best, int index) {
  const auto order = [&](int i) { return best[i] != 0 ? block_of(best[i]) : kMostBlocks + i; };
  const int own = order(index);
  Placed placed = {best[index] != 0 ? own : kPaddingId, 0};
#pragma unroll
  for (int i = 0; i < kTop; ++i) placed.place += order(i) < own;
  return placed;
}
