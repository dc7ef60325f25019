// Select a rank's Top16 and store it into the owners' receive storage (contract, sections 5 and 6).
//
// A CTA a (token, head) row. TAGGED: tagged rows, else legacy ones. FUSED: the scores lie in the pool of the fused
// form, in rounds of columns; between rounds the end of a pool row carries the best 16 keys so far.
//
// A thread has every 128th column. From the threads' own best follows a floor that at least 16 columns reach. What
// reaches it, of a thousand columns 25 or so, goes into a list, and only the list is ranked. A row of which more reaches
// the floor than the list holds, of equal scores, say, is narrowed down by the classes of its columns instead.
//
// The first scores are read before it is known how many of them there are. Columns below `columns` can always be read.
// A row of several batches is copied into shared memory, all at once, where the launch has room for it: read batch after
// batch each would take as long as all of them.
//
// Launch: CTAs (tokens, heads), kThreads threads, any dynamic shared memory.

#include "device/ptx/launch.cuh"
#include "device/ranking.cuh"
#include "device/rows.cuh"
#include "device/waiting.cuh"

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kQuarter = kTop / kWarps;
constexpr int kSplit = kThreads / kTop;
constexpr int kAtOnce = 8;  // scores of a thread on their way
constexpr int kBatch = kAtOnce * kThreads;
constexpr int kMostBatches = kMostBlocks / kBatch;
constexpr int kRoom = kThreads;

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

// What the threads of a CTA share.
struct alignas(16) Shared {
  Key list[kRoom + 2 * kTop];  // what reached the floor, and the best of earlier rounds; zeros follow
  Key best[kTop];              // descending, 0 where there are fewer
  float best_of[kThreads];
  unsigned floors[2][kWarps];
  float best_of_batch[kMostBatches][kThreads];
  Selected selected;
  int listed;

  __device__ __forceinline__ void clear() {
    list[threadIdx.x] = 0;
    if (threadIdx.x < 2 * kTop) list[kRoom + threadIdx.x] = 0;
    if (threadIdx.x < kTop) {
      best[threadIdx.x] = 0;
      selected.clear(threadIdx.x);
    }
    if (threadIdx.x == 0) listed = 0;
  }
};

// A row of scores. Of its `columns` candidates those from `scored` on count as -inf, whatever is read.
struct Row {
  const float* scores;
  Blocks blocks;
  int columns;
  int scored;
  int forced_begin;  // columns before this one are forced,
  int forced_end;    // and from this one on

  __device__ __forceinline__ float score(float read, int column) const {
    return !FUSED || column < scored ? read : minus_infinity();
  }

  // Grows with the key, but not strictly: NaN and -inf are the same here, as are all forced blocks and +inf.
  __device__ __forceinline__ float level(float read, int column) const {
    const bool forced = (column < forced_begin) | (column >= forced_end);
    return forced ? -minus_infinity() : larger(score(read, column), minus_infinity());
  }
};

// A thread's columns in a batch of them: `first`, `first` + 128, and so on.
struct Batch {
  int first;
  float read[kAtOnce];
  float level[kAtOnce];

  __device__ __forceinline__ void take(const float* scores, int from, int end) {
    first = from + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int column = first + i * kThreads;
      read[i] = load_where(column < end, scores + column, minus_infinity());
    }
  }

  // The same of a row in shared memory, in which this thread has copied its columns.
  __device__ __forceinline__ void take_kept(const float* kept, int from, int end) {
    first = from + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int column = first + i * kThreads;
      read[i] = column < end ? kept[column] : minus_infinity();
    }
  }

  // The best level. What the row has no candidates for is not waited for.
  __device__ __forceinline__ float best(const Row& row) {
    const int ahead = row.columns - (first - static_cast<int>(threadIdx.x));
    float best = minus_infinity();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) level[i] = minus_infinity();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if ((i & (i - 1)) == 0 && i * kThreads >= ahead) break;  // not at every one: it takes time, too
      const int column = first + i * kThreads;
      const float own = row.level(read[i], column);
      level[i] = column < row.columns ? own : minus_infinity();
      best = larger(best, level[i]);
    }
    return best;
  }

  // Lists the columns that reach the floor.
  __device__ __forceinline__ void list(Shared& shared, const Row& row, float floor) const {
    unsigned reach = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if ((level[i] >= floor) & (first + i * kThreads < row.columns)) reach |= 1 << i;
    }
    int place = add_shared(&shared.listed, number_of_ones(reach));
#pragma unroll 1
    for (; reach != 0 && place < kRoom; reach &= reach - 1, ++place) {
      const int which = lowest_one(reach & -reach);
      float own = read[0];
#pragma unroll
      for (int i = 1; i < kAtOnce; ++i) own = i == which ? read[i] : own;
      const int column = first + which * kThreads;
      shared.list[place] = row.blocks.key(row.score(own, column), column);
    }
  }
};

// A level that at least 16 columns reach, or -inf: `own` is the best one of the thread's columns.
__device__ __forceinline__ float find_floor(Shared& shared, float own) {
  const int warp = threadIdx.x / kWarpSize;
  const float* const levels = shared.best_of + warp * kWarpSize;
  shared.best_of[threadIdx.x] = own;
  meet_warp();
  const int above = count_where<kWarpSize>([&](int i) { return levels[i] > own; });
  // 16 columns of one warp reach its 16th, and four of every warp the smallest of the fourths.
  const unsigned ordered = ordered_bits(bits_of(own));
  const unsigned last = smallest_of_warp(above < kTop ? ordered : ~0u);
  const unsigned fourth = smallest_of_warp(above < kQuarter ? ordered : ~0u);
  if (threadIdx.x % kWarpSize == 0) {
    shared.floors[0][warp] = last;
    shared.floors[1][warp] = fourth;
  }
  meet_cta();
  unsigned floor = shared.floors[0][0];
  unsigned quarters = shared.floors[1][0];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) {
    floor = shared.floors[0][i] > floor ? shared.floors[0][i] : floor;
    quarters = shared.floors[1][i] < quarters ? shared.floors[1][i] : quarters;
  }
  return float_of(unordered_bits(floor > quarters ? floor : quarters));
}

// Lists the keys of the best 16 columns alone, whatever the scores are.
//
// The best 16 columns lie in the 16 classes of columns, modulo 128, whose own best are the largest: any class before
// them holds a better column. Those 16 fall into 128 classes modulo 1024, and so on, until a class is one column.
__device__ __forceinline__ void narrow(Shared& shared, const Row& row) {
  int residue = threadIdx.x;
#pragma unroll 1
  for (int modulus = kThreads;; modulus *= kSplit) {
    Key own = 0;
#pragma unroll 1
    for (int first = residue; first < row.columns && residue >= 0; first += kAtOnce * modulus) {
      float read[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int column = first + i * modulus;
        read[i] = load_where(column < row.columns, row.scores + column, minus_infinity());
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int column = first + i * modulus;
        const Key key = row.blocks.key(row.score(read[i], column), column);
        if (column < row.columns && key > own) own = key;
      }
    }
    shared.list[threadIdx.x] = own;
    if (threadIdx.x < kTop) shared.best[threadIdx.x] = 0;
    meet_cta();
    const int rank = larger_keys<8>(shared.list, kThreads, own);
    if (own != 0 && rank < kTop) shared.best[rank] = own;
    meet_cta();
    const Key parent = shared.best[threadIdx.x % kTop];
    meet_cta();  // everybody has read `best`
    if (modulus >= row.columns) {
      shared.list[threadIdx.x] = threadIdx.x < kTop ? parent : 0;
      if (threadIdx.x < kTop) shared.best[threadIdx.x] = 0;
      meet_cta();
      return;
    }
    const int column = row.blocks.column_of(parent);
    residue = parent != 0 ? (column & (modulus - 1)) + threadIdx.x / kTop * modulus : -1;
  }
}

// Copies this thread's columns into shared memory and waits for them; null where the launch has no room for the row.
__device__ __forceinline__ const float* keep(const Row& row) {
  if (dynamic_shared_bytes() < row.columns * static_cast<int>(sizeof(float))) return nullptr;
  float* const kept = reinterpret_cast<float*>(dynamic_shared());
#pragma unroll 4
  for (int column = threadIdx.x; column < row.columns; column += kThreads) copy_word(kept + column, row.scores + column);
  wait_for_copies();
  return kept;
}

// Lists the keys of the row's best 16 columns, and some more; how many. `batch` is the first one.
__device__ __forceinline__ int list_best(Shared& shared, const Row& row, Batch& batch) {
  float own = batch.best(row);
  const int batches = (row.columns + kBatch - 1) / kBatch;
  const float* kept = nullptr;
  const auto take = [&](int from) {
    if (kept != nullptr) {
      batch.take_kept(kept, from, row.columns);
    } else {
      batch.take(row.scores, from, row.columns);
    }
  };
  if (__builtin_expect(batches > 1, false)) {
    kept = keep(row);
    shared.best_of_batch[0][threadIdx.x] = own;
#pragma unroll 1
    for (int i = 1; i < batches; ++i) {
      take(i * kBatch);
      const float best = batch.best(row);
      shared.best_of_batch[i][threadIdx.x] = best;
      own = larger(own, best);
    }
  }
  const float floor = find_floor(shared, own);
  if (own >= floor) {
    int i = 0;
#pragma unroll 1
    do {
      if (__builtin_expect(batches > 1, false)) {
        // Each thread goes on to its next batch that has something.
#pragma unroll 1
        while (i < batches && !(shared.best_of_batch[i][threadIdx.x] >= floor)) ++i;
        if (i == batches) break;
        take(i * kBatch);
        batch.best(row);
      }
      batch.list(shared, row, floor);
    } while (++i < batches);
  }
  meet_cta();
  const int listed = shared.listed;
  if (__builtin_expect(listed <= kRoom, true)) return listed;
  narrow(shared, row);
  return kTop;
}

// The first warp leaves the best 16 of `count` listed keys in `best` and `selected`, which are clear.
__device__ __forceinline__ void rank_listed(Shared& shared, int count) {
  int first = 0;
#pragma unroll 1
  do {
    const Key own = shared.list[first + threadIdx.x];
    const int rank = larger_keys<kWarpSize>(shared.list, count, own);
    if (own != 0 && rank < kTop) {
      shared.best[rank] = own;
      shared.selected.order[rank] = block_of(own);
    }
    first += kWarpSize;
  } while (first < count);
  meet_warp();
}

// The first warp stores the row, which begins `offset` words behind `base`.
__device__ __forceinline__ void publish(const Arguments& with, const Selected& selected, int bits, long long token,
                                        int head, long long base, long long offset, int generation) {
  const int lane = threadIdx.x;
  // Lanes 0 to 15 store the scores, the others the ids.
  const int word = lane < kTop ? bits : selected.id(lane % kTop);
  const int at = lane / kTop * kTop + selected.place(lane % kTop);
  if constexpr (TAGGED) {
    const long long tag = static_cast<long long>(static_cast<unsigned long long>(static_cast<unsigned>(generation)) << 32);
    long long* row = reinterpret_cast<long long*>(base) + offset;
    store_tagged(row + at, tag | static_cast<unsigned>(word));
  } else {
    const Failures failures = {with.errors, with.error_words};
    int* row = reinterpret_cast<int*>(base) + offset;
    int ready = kReady;
    if (lane == 0) {
      failures.wait<false>(with.spin_limit, [&] { return (ready = poll(row + kReadyWord)) == 0; });
      if (ready != 0) failures.record(with.slot, 1 << head / static_cast<int>(with.heads_per_rank), token);
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
  __shared__ Shared shared;
  const long long token = blockIdx.x;
  const int head = blockIdx.y;
  const int heads_per_rank = static_cast<int>(with.heads_per_rank);
  const int slot = static_cast<int>(with.slot);
  const long long capacity = static_cast<int>(with.capacity);

  // Before the wait: where everything is.
  const float* scores = with.scores + token * with.token_stride + head * with.head_stride;
  const int* count = with.num_valid_pages + token;
  const long long* owner = with.recv_bases + head / heads_per_rank;
  int* counter = with.generations + (slot * static_cast<int>(gridDim.y) + head) * capacity + token;
  const int* length = FUSED ? with.seq_lens + static_cast<int>(token) / static_cast<int>(with.query_len) : nullptr;
  const int source = slot * static_cast<int>(with.world_size) + static_cast<int>(with.rank);
  const int row_set = source * heads_per_rank + head % heads_per_rank;
  long long offset = (row_set * capacity + token) * (TAGGED ? kTaggedWords : kLegacyWords);
  make_ready(scores);
  make_ready(count);
  make_ready(owner);
  make_ready(counter);
  make_ready(length);
  make_ready(offset);
  shared.clear();
  wait_for_predecessor();
  release_dependents();

  // All of these are on their way at once.
  Batch batch;
  batch.take(scores, 0, static_cast<int>(with.columns));
  const int num_valid = load(count);
  const int seq_len = FUSED ? load(length) : 0;
  const long long base = load(owner);
  const int generation = TAGGED ? static_cast<int>(static_cast<unsigned>(load(counter)) + 1u) : 0;
  Key* const carry = reinterpret_cast<Key*>(const_cast<float*>(scores) + with.pool_row) - kTop;

  Row row = {scores, {num_valid, static_cast<int>(with.force_begin), static_cast<int>(with.force_end),
                      static_cast<int>(with.index_scale), static_cast<int>(with.index_offset)}};
  row.columns = row.scored = static_cast<int>(with.columns);
  if constexpr (FUSED) {
    // Columns that the scorer left alone hold what an earlier call put there: they count as -inf.
    const int pages = seq_len > 0 ? (seq_len - 1) / static_cast<int>(with.page_size) + 1 : 0;
    row.scored = pages - static_cast<int>(with.first_column);
    row.blocks.offset += static_cast<int>(with.first_column) * row.blocks.scale;
  }
  const int candidates = row.blocks.columns_below(num_valid);
  if (candidates < row.columns) row.columns = candidates;
  row.forced_begin = row.blocks.columns_below(row.blocks.force_begin);
  row.forced_end = row.blocks.columns_below(num_valid - row.blocks.force_end);
  int listed = list_best(shared, row, batch);

  if (threadIdx.x >= kWarpSize) return;
  const int lane = threadIdx.x;
  if (FUSED && with.first_column > 0) {
    if (lane < kTop) shared.list[listed + lane] = carry[lane];
    listed += kTop;
    meet_warp();
  }
  rank_listed(shared, listed);
  const Key own = shared.best[lane % kTop];
  if constexpr (FUSED) {
    if (!with.last_round) {
      if (lane < kTop) carry[lane] = own;
      return;
    }
  }

  int bits = own != 0 ? score_bits_of(own) : bits_of(minus_infinity());
  // The key holds the raw bits of every score but NaN and -0.0, of which this backend's scorer has none.
  if (!FUSED && own != 0 && (bits == 0 || bits == bits_of(minus_infinity()))) {
    bits = bits_of(load(scores + row.blocks.column_of(own)));
  }
  publish(with, shared.selected, bits, token, head, base, offset, generation);
  if (TAGGED && lane == 0) store(counter, generation);
}
