// Select a rank's Top16 and store it into the owners' receive storage (contract, sections 5 and 6).
//
// A CTA a (token, head) row. TAGGED: tagged rows, else legacy ones. FUSED: the scores lie in the pool of the fused
// form, in rounds of columns; between rounds the end of a pool row carries the best 16 keys so far.
//
// Launch: CTAs (tokens, heads), kThreads threads.

#include "device/ptx/launch.cuh"
#include "device/ranking.cuh"
#include "device/rows.cuh"
#include "device/waiting.cuh"

constexpr int kThreads = 128;
constexpr int kSplit = kThreads / kTop;
constexpr int kAtOnce = 8;  // scores of a thread on their way

struct Arguments {
  const float* scores;
  const int* num_valid_pages;
  const long long* recv_bases;
  int* errors;
  int* generations;
  long long columns;
  long long token_stride;
  long long head_stride;
  long long error_words;
  long long slot;
  long long rank;
  long long world_size;
  long long heads_per_rank;
  long long capacity;
  long long force_begin;
  long long force_end;
  long long spin_limit;
  long long index_scale;
  long long index_offset;
  // The fused form alone.
  const int* seq_lens;
  long long query_len;
  long long page_size;
  long long first_column;
  long long last_round;
  long long pool_row;  // FP32 words of a pool row
};

// The scale is 1 or 2, or 4 where the benchmark deals whole blocks to ranks: half of it is the shift.
__device__ __forceinline__ int column_of(Key key, int scale, int offset) {
  return (block_of(key) - offset) >> (scale >> 1);
}

// Leaves the keys of the best 16 columns in best[0 ... 15], descending.
//
// The best 16 columns lie in the 16 classes of columns, modulo 128, whose own best are the largest: any class before
// them holds a better column. Those 16 fall into 128 classes modulo 1024, and so on, until a class is one column.
__device__ __forceinline__ void select(Key* best, Key* keys, const float* row, int columns, int scored, int num_valid,
                                       int force_begin, int force_end, int scale, int offset) {
  const int readable = scored < columns ? scored : columns;
  int residue = threadIdx.x;
  int modulus = kThreads;
  for (;;) {
    Key own = 0;
    if (residue >= 0) {
      for (int first = residue; first < columns; first += kAtOnce * modulus) {
        float scores[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {  // all loads before the first use, so without a branch
          const int column = first + i * modulus;
          scores[i] = load(row + (column < readable ? column : 0));
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int column = first + i * modulus;
          const float score = column < readable ? scores[i] : minus_infinity();
          const Key key = ranking_key(score, column * scale + offset, num_valid, force_begin, force_end);
          if (column < columns && key > own) own = key;
        }
      }
    }
    keys[threadIdx.x] = own;
    if (threadIdx.x < kTop) best[threadIdx.x] = 0;
    meet_cta();
    if (own != 0) {
      const int rank = larger_keys(keys, kThreads, own);
      if (rank < kTop) best[rank] = own;
    }
    meet_cta();
    if (modulus >= columns) return;
    const Key parent = best[threadIdx.x % kTop];
    const int column = column_of(parent, scale, offset);
    residue = parent != 0 ? (column & (modulus - 1)) + threadIdx.x / kTop * modulus : -1;
    modulus *= kSplit;
    meet_cta();  // everybody has read `best`
  }
}

// The first warp stores the row.
__device__ __forceinline__ void publish(const Arguments& with, const Key* best, int bits, long long token, int head,
                                        long long base, int generation) {
  const int lane = threadIdx.x;
  const int heads_per_rank = static_cast<int>(with.heads_per_rank);
  const long long first = (with.slot * with.world_size + with.rank) * heads_per_rank + head % heads_per_rank;
  const long long index = first * with.capacity + token;
  const Placed placed = place_ascending(best, lane % kTop);
  // Lanes 0 to 15 store the scores, the others the ids.
  const int word = lane < kTop ? bits : placed.id;
  const int at = lane / kTop * kTop + placed.place;
  if constexpr (TAGGED) {
    const long long tag = static_cast<long long>(static_cast<unsigned long long>(static_cast<unsigned>(generation)) << 32);
    long long* row = reinterpret_cast<long long*>(base) + index * kTaggedWords;
    store_tagged(row + at, tag | static_cast<unsigned>(word));
  } else {
    const Failures failures = {with.errors, with.error_words};
    int* row = reinterpret_cast<int*>(base) + index * kLegacyWords;
    int ready = kReady;
    if (lane == 0) {
      failures.wait<false>(with.spin_limit, [&] { return (ready = poll(row + kReadyWord)) == 0; });
      if (ready != 0) failures.record(with.slot, 1 << head / heads_per_rank, token);
    }
    ready = from_lane(ready, 0);
    meet_warp();  // what lane 0 acquired is for all of them: the owner has read the row before
    if (ready == 0) {
      store(row + at, word);
      meet_warp();
      if (lane == 0) signal(row + kReadyWord, kReady);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) topk_select_publish(const __grid_constant__ Arguments with) {
  __shared__ Key keys[kThreads];
  __shared__ Key best[kTop];
  wait_for_predecessor();
  release_dependents();
  const long long token = blockIdx.x;
  const int head = blockIdx.y;
  const int scale = static_cast<int>(with.index_scale);
  const int num_valid = load(with.num_valid_pages + token);

  // Read before the selection, which hides them.
  const long long base = load(with.recv_bases + head / static_cast<int>(with.heads_per_rank));
  int* const counter = with.generations + (with.slot * gridDim.y + head) * with.capacity + token;
  const int generation = TAGGED ? static_cast<int>(static_cast<unsigned>(load(counter)) + 1u) : 0;

  int columns = static_cast<int>(with.columns);
  int offset = static_cast<int>(with.index_offset);
  int scored = columns;
  const float* row = with.scores + token * with.token_stride + head * with.head_stride;
  if constexpr (FUSED) {
    // Columns that the scorer left alone hold what an earlier call put there: they count as -inf.
    const int seq_len = load(with.seq_lens + static_cast<int>(token) / static_cast<int>(with.query_len));
    const int pages = seq_len > 0 ? (seq_len - 1) / static_cast<int>(with.page_size) + 1 : 0;
    scored = pages - static_cast<int>(with.first_column);
    offset += static_cast<int>(with.first_column) * scale;
  }
  const int below = num_valid < kMostBlocks ? num_valid : kMostBlocks;
  const int candidates = below > offset ? (below - offset + scale - 1) / scale : 0;
  if (candidates < columns) columns = candidates;
  select(best, keys, row, columns, scored, num_valid, static_cast<int>(with.force_begin),
         static_cast<int>(with.force_end), scale, offset);

  if constexpr (FUSED) {
    Key* const carry = reinterpret_cast<Key*>(const_cast<float*>(row) + with.pool_row) - kTop;
    if (with.first_column > 0) {
      if (threadIdx.x < 2 * kTop) {
        keys[threadIdx.x] = threadIdx.x < kTop ? best[threadIdx.x] : carry[threadIdx.x - kTop];
      }
      meet_cta();
      if (threadIdx.x < kTop) best[threadIdx.x] = 0;
      meet_cta();
      if (threadIdx.x < 2 * kTop && keys[threadIdx.x] != 0) {
        const int rank = larger_keys(keys, 2 * kTop, keys[threadIdx.x]);
        if (rank < kTop) best[rank] = keys[threadIdx.x];
      }
      meet_cta();
    }
    if (!with.last_round) {
      if (threadIdx.x < kTop) carry[threadIdx.x] = best[threadIdx.x];
      return;
    }
  }

  if (threadIdx.x >= kWarpSize) return;
  const Key own = best[threadIdx.x % kTop];
  int bits = bits_of(minus_infinity());
  if (own != 0) {
    // A score of this backend is neither NaN nor -0.0, so in the fused form the key holds its raw bits.
    bits = FUSED ? score_bits_of(own) : bits_of(load(row + column_of(own, scale, offset)));
  }
  publish(with, best, bits, token, head, base, generation);
  if (TAGGED && threadIdx.x == 0) store(counter, generation);
}
