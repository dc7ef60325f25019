// Select a rank's Top16 of every token of a window into the carrier (contract, sections 5 and 7).
//
// A CTA a token, a warp a head, which holds kChunk columns of its score row at a time: lane l has columns l, l + 32,
// and so on. The best 16 scores are not below the 16th largest of the lanes' own best: 16 columns are at least as good.
// About twenty columns of a thousand reach this floor; that neighbours are in different lanes keeps it high. They are
// gathered, one a lane, and only they are ranked. Where more than 32 reach the floor, of those that equal it only the
// first are kept, and what is still more is ranked 32 at a time.
//
// Launch: CTAs (tokens), kThreads threads.

#include "device/ptx/launch.cuh"
#include "device/ptx/memory.cuh"
#include "device/ranking.cuh"
#include "device/rows.cuh"
#include "device/shard.cuh"

constexpr int kThreads = kHeads * kWarpSize;
constexpr int kHeld = 32;  // scores of a lane, one a bit of a mask
constexpr int kChunk = kHeld * kWarpSize;
constexpr int kResident = 8;  // CTAs of a multiprocessor: 64 registers a thread

struct Arguments {
  const float* scores;
  const int* num_valid_pages;
  int* carrier;
  long long columns;
  long long token_stride;
  long long head_stride;
  long long carrier_head_stride;
  long long carrier_row_stride;
  long long force_begin;
  long long force_end;
  long long index_scale;
  long long index_offset;
};

// What the lanes of a warp share.
struct alignas(16) Shared {
  Key offered[kWarpSize];
  Key kept[kTop];
  Key best[kTop];      // descending, 0 where there are fewer
  int bits[kTop];      // their raw scores
  union {
    float best_of[kWarpSize];  // the lanes' own best
    int column[kWarpSize];     // of the list
    int order[kWarpSize];      // of the ids
  };
};

// `larger_keys` of any number, with a sum of floats: the FP32 units have nothing else to do.
__device__ __forceinline__ int keys_above(const Key* keys, int count, Key own) {
  float above = 0;
#pragma unroll 8
  for (int i = 0; i < count; ++i) {
    if (keys[i] > own) above += 1;
  }
  return static_cast<int>(above);
}

// The best 16 so far. Lanes l and l + 16 have the same one.
struct Best {
  Key key;
  int bits;
  bool any;

  // Takes in a key of each lane, or 0, with the bits of its score: of the first `count` lanes, a multiple of eight. The
  // warp has met since it read what is shared.
  __device__ __forceinline__ void offer(Shared& shared, Key own, int own_bits, int count, int lane) {
    shared.offered[lane] = own;
    if (lane < kTop) {
      shared.kept[lane] = key;
      shared.best[lane] = 0;
    }
    meet_warp();
    int place = keys_above(shared.offered, count, own);
    if (any) {
      place += keys_above(shared.kept, kTop, own);
      const int kept_place = lane + keys_above(shared.offered, count, key);
      if (key != 0 && kept_place < kTop) {
        shared.best[kept_place] = key;
        shared.bits[kept_place] = bits;
      }
    }
    if (own != 0 && place < kTop) {
      shared.best[place] = own;
      shared.bits[place] = own_bits;
    }
    meet_warp();
    key = shared.best[lane % kTop];
    bits = key != 0 ? shared.bits[lane % kTop] : bits_of(minus_infinity());
    any = true;
  }
};

// A chunk of a row: the lane's column i is the chunk's column 32 i + lane.
struct Chunk {
  float score[kHeld];

  __device__ __forceinline__ void take(const float* from, int columns, int lane) {
    from += lane;
    make_ready(from);  // so that the loads differ in a constant
    if (columns >= kChunk) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) score[i] = load(from + i * kWarpSize);
    } else {
      columns -= lane;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        score[i] = load_where(columns > i * kWarpSize, from + i * kWarpSize, minus_infinity());
      }
    }
  }

  // The 16th largest of the lanes' own best; NaN is none.
  __device__ __forceinline__ float floor(Shared& shared, int lane) const {
    float own = minus_infinity();
#pragma unroll
    for (int i = 0; i < kHeld; ++i) own = larger(own, score[i]);
    shared.best_of[lane] = own;
    meet_warp();
    float above = 0;
#pragma unroll
    for (int i = 0; i < kWarpSize; ++i) {
      if (shared.best_of[i] > own) above += 1;
    }
    meet_warp();
    return float_of(unordered_bits(smallest_of_warp(above < kTop ? ordered_bits(bits_of(own)) : ~0u)));
  }

  // A bit for each of the lane's scores.
  template <class Holds>
  __device__ __forceinline__ unsigned where(const Holds& holds) const {
    constexpr int kHalf = kHeld / 2;
    // Added up as floats, like `keys_above`: the last bits of a sum from 2**23 on are the number that was added.
    float low = 1 << 23, high = 1 << 23;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      if (holds(score[i])) low += 1 << i;
      if (holds(score[i + kHalf])) high += 1 << i;
    }
    return (static_cast<unsigned>(bits_of(low)) & 0xffff) | static_cast<unsigned>(bits_of(high)) << kHalf;
  }
};

// The bits of the lane's columns before the chunk's column `end`.
__device__ __forceinline__ unsigned bits_before(int end, int lane) {
  const int count = (end - lane + kWarpSize - 1) >> 5;
  return count >= kHeld ? ~0u : count > 0 ? (1u << count) - 1 : 0;
}

// Those bits whose columns are the chunk's first 16, and a few more.
__device__ __forceinline__ unsigned first_ones(unsigned bits) {
  int found = 0;
  int rows = 0;
  while (found < kTop && rows < kHeld) found += number_of_ones(lanes_where((bits >> rows++ & 1) != 0));
  return bits & bits_before(rows * kWarpSize, 0);
}

// Columns of a chunk that may be among the best 16.
struct Chosen {
  unsigned bits;  // the lane's
  int place;      // of the lane's first one in a list of all
  int total;

  __device__ __forceinline__ void count(int lane) {
    const int own = number_of_ones(bits);
    int so_far = own;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int before = from_lane_before(so_far, distance);
      if (lane >= distance) so_far += before;
    }
    place = so_far - own;
    total = from_lane(so_far, kWarpSize - 1);
  }
};

// Forced columns are chosen whatever their scores are; they are 16 at most.
__device__ __forceinline__ Chosen choose(const Best& best, Shared& shared, const Chunk& chunk, unsigned exist,
                                         unsigned forced, int lane) {
  Chosen chosen = {exist};
  if (best.any) {
    // Of equal scores the earlier column's is better.
    const Key last = shared.best[kTop - 1];
    const float passed = is_forced(last) ? -minus_infinity() : float_of(score_bits_of(last));
    chosen.bits &= chunk.where([&](float score) { return score > passed; }) | forced;
  }
  chosen.count(lane);
  if (chosen.total <= kWarpSize) return chosen;

  const float floor = chunk.floor(shared, lane);
  // Where the floor is -inf a NaN is as good.
  if (floor > minus_infinity()) chosen.bits &= chunk.where([&](float score) { return score >= floor; }) | forced;
  chosen.count(lane);
  if (chosen.total <= kWarpSize) return chosen;

  const unsigned above = chosen.bits & (chunk.where([&](float score) { return score > floor; }) | forced);
  chosen.bits = above | first_ones(chosen.bits & ~above);
  chosen.count(lane);
  return chosen;
}

// Ranks the chosen columns of the chunk that begins at column `first`.
__device__ __forceinline__ void rank(Best& best, Shared& shared, Chosen chosen, const float* row, int first,
                                     const Blocks& blocks, int lane) {
  for (int listed = 0; listed < chosen.total; listed += kWarpSize) {
    while (chosen.bits != 0 && chosen.place < listed + kWarpSize) {
      shared.column[chosen.place - listed] = first + lowest_one(chosen.bits) * kWarpSize + lane;
      chosen.bits &= chosen.bits - 1;
      ++chosen.place;
    }
    meet_warp();
    const int count = chosen.total - listed;
    Key own = 0;
    int bits = 0;
    if (lane < count) {
      const int column = shared.column[lane];
      const float score = load(row + column);
      bits = bits_of(score);
      own = blocks.key(score, column);
      if (best.any && own < shared.best[kTop - 1]) own = 0;
    }
    meet_warp();  // the list and the best have been read
    if (lanes_where(own != 0) == 0) continue;
    best.offer(shared, own, bits, count < kWarpSize ? (count + 7) / 8 * 8 : kWarpSize, lane);
  }
}

__device__ __forceinline__ void select(Best& best, Shared& shared, const float* row, const Blocks& blocks, int columns,
                                       int lane) {
  if (columns <= 0) return;
  const int forced_begin = blocks.columns_below(blocks.force_begin);
  const int forced_end = blocks.columns_below(blocks.num_valid - blocks.force_end);
  for (int first = 0; first < columns; first += kChunk) {
    Chunk chunk;
    chunk.take(row + first, columns - first, lane);
    const unsigned forced = bits_before(forced_begin - first, lane) | ~bits_before(forced_end - first, lane);
    const Chosen chosen = choose(best, shared, chunk, bits_before(columns - first, lane), forced, lane);
    rank(best, shared, chosen, row, first, blocks, lane);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    topk_select_prefill(const __grid_constant__ Arguments with) {
  __shared__ Shared shared_of[kHeads];
  wait_for_predecessor();
  release_dependents();
  const long long token = blockIdx.x;
  const int head = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  Shared& shared = shared_of[head];
  const Blocks blocks = {load(with.num_valid_pages + token), static_cast<int>(with.force_begin),
                         static_cast<int>(with.force_end), static_cast<int>(with.index_scale),
                         static_cast<int>(with.index_offset)};
  const int candidates = blocks.columns_below(blocks.num_valid);
  const int columns = candidates < with.columns ? candidates : static_cast<int>(with.columns);

  Best best = {0, bits_of(minus_infinity()), false};
  select(best, shared, with.scores + token * with.token_stride + head * with.head_stride, blocks, columns, lane);

  // Lanes 0 to 15 store the scores, the others the ids. Ids ascend, what is no candidate comes last.
  const int order = best.key != 0 ? block_of(best.key) : kMostBlocks + lane % kTop;
  shared.order[lane] = order;
  meet_warp();
  int place = lane / kTop * kTop;
#pragma unroll
  for (int i = 0; i < kTop; ++i) place += shared.order[i] < order;
  int* const row = with.carrier + head * with.carrier_head_stride + token * with.carrier_row_stride;
  store(row + place, lane < kTop ? best.bits : best.key != 0 ? order : kPaddingId);
  if (lane == 0) store(row + kReadyWord, kReady);
}
