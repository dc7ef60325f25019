// The prefill scorer (contract, section 7), for one layout: PAGE, WORLD and STAGES are defined by the loader.
//
// A CTA does one worker's share of the plan, piece by piece. Of an item it holds the queries, up to 64 tokens of four
// heads, as fp16 in registers: 64 rows a warp group. Keys come in tiles of 128 rows. All warps convert a tile to fp16
// in shared memory, in a ring of kStages, and every warp group multiplies it by its queries while the next tile is
// converted and the one after that is on its way in registers.
//
// The warp groups take turns in two halves: while the products of one half run, the other takes the maxima of its own,
// which would else find the matrix units idle in all of them at once.
//
// Launch: CTAs (workers), kThreads threads, kStages * kStageBytes of dynamic shared memory.

#include "device/fragments.cuh"
#include "device/ptx/launch.cuh"
#include "device/ptx/products.cuh"
#include "device/ptx/warp.cuh"
#include "device/shard.cuh"

using Layout = Shard<PAGE, WORLD>;

constexpr int kBlock = 128;
constexpr int kItemTokens = 64;
constexpr int kUnitBlocks = 4;
constexpr int kGroups = 4;  // warp groups
constexpr int kHalves = 2;  // of the warp groups, which take turns
constexpr int kWarps = kGroups * kGroupWarps;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kGroupTokens = kItemTokens / kGroups;
constexpr int kStages = STAGES;
constexpr unsigned kNan = 0x7f7f7f7f;  // four e4m3 NaN

constexpr int kTileKeys = 128;
constexpr int kTilePages = kTileKeys / Layout::kRows;
constexpr int kPageBlocks = PAGE / kBlock;
constexpr int kUnitTiles = kUnitBlocks / kPageBlocks / kTilePages;

// A tile in shared memory: for each step of 16 k two planes of 8 k, each the cores of all 128 keys.
constexpr int kCoreBytes = 128;
constexpr int kPlaneBytes = kTileKeys / 8 * kCoreBytes;
constexpr int kStepBytes = 2 * kPlaneBytes;
constexpr int kStageBytes = kSteps * kStepBytes;

struct Arguments {
  const unsigned char* q;
  const unsigned char* k;
  const int* block_table;
  const int* qo_lens;
  const int* kv_lens;
  const int* qo_starts;
  const int* qo_offset;
  const long long* work_range;
  const long long* work_info;
  float* max_score;
  long long pages;
  long long page_pitch;
  long long table_columns;
  long long table_stride;
  long long batch;
  long long total_q;
  long long columns;
  long long capacity;  // items that the plan has room for
  long long token_stride;
  long long head_stride;
  long long rank;
  long long compact;
};

// One item of the plan, with nothing in it taken on trust.
struct Item {
  int segment;
  int tokens;  // 0: nothing to do
  long long first_row;
  long long first_position;
  int keys;

  // Position of the last key that token `i` of the item sees, below 0 where it sees none.
  __device__ __forceinline__ int last_key(int i) const {
    const long long position = first_position + i;
    return position < keys - 1 ? static_cast<int>(position < -1 ? -1 : position) : keys - 1;
  }
};

__device__ __forceinline__ Item read_item(const Arguments& with, long long index) {
  Item item = {0, 0, 0, 0, 0};
  if (index >= with.capacity) return item;
  const long long info = load(with.work_info + index);
  const int segment = static_cast<int>(info & 0xffff);
  if (segment >= with.batch) return item;
  const long long first = (info >> 16 & 0xffff) * kItemTokens;
  const long long left = load(with.qo_lens + segment) - first;
  const int kv_len = load(with.kv_lens + segment);
  const long long most = with.columns * kBlock;
  item.segment = segment;
  item.tokens = left < kItemTokens ? static_cast<int>(left < 0 ? 0 : left) : kItemTokens;
  item.first_row = load(with.qo_starts + segment) + first;
  item.first_position = load(with.qo_offset + segment) + first;
  item.keys = kv_len < most ? (kv_len < 0 ? 0 : kv_len) : static_cast<int>(most);
  return item;
}

// The keys of a tile that a thread converts, on their way: both halves' 16 bytes of one row.
struct TileShare {
  Words halves[2];

  __device__ __forceinline__ static int row() { return threadIdx.x / 4; }

  __device__ __forceinline__ static int page_of(const Arguments& with, int segment, int tile) {
    const int column = tile * kTilePages + row() / Layout::kRows;
    return column < with.table_columns ? load(with.block_table + segment * with.table_stride + column) : -1;
  }

  __device__ __forceinline__ void fetch(const Arguments& with, int page) {
    // Rows of a page that cannot be read count as NaN, which no maximum takes.
    halves[0] = halves[1] = Words{kNan, kNan, kNan, kNan};
    if (page >= 0 && page < with.pages) {
      load_halves(halves, with.k + page * with.page_pitch + row() % Layout::kRows * kDim + threadIdx.x % 4 * 16);
    }
  }

  // A warp stores eight rows, which is one core after the other.
  __device__ __forceinline__ void convert(unsigned char* stage) const {
    unsigned char* to = stage + row() / 8 * kCoreBytes + threadIdx.x % kWarpSize * 4;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      unsigned low, high;
      step_share(halves, step, low, high);
      store_shared(to + step * kStepBytes, low);
      store_shared(to + step * kStepBytes + kPlaneBytes, high);
    }
  }
};

// Whether token `i` of an item has a row in the window.
__device__ __forceinline__ bool has_row(const Arguments& with, const Item& item, int token) {
  const long long row = item.first_row + token;
  return token < item.tokens && row >= 0 && row < with.total_q;
}

// Two rows of queries of a thread, on their way.
struct QueryRows {
  Words halves[2][2];

  __device__ __forceinline__ void fetch(const Arguments& with, const Item& item, int row) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = (row + 8 * i) / kHeads;
      halves[i][0] = halves[i][1] = Words{};
      if (has_row(with, item, token)) {
        load_halves(halves[i],
                    with.q + ((item.first_row + token) * kHeads + row % kHeads) * kDim + threadIdx.x % 4 * 16);
      }
    }
  }

  __device__ __forceinline__ void convert(unsigned (&queries)[kSteps][4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) step_share(halves[i], step, queries[step][i], queries[step][i + 2]);
    }
  }
};

__device__ __forceinline__ void store_column(const Arguments& with, float* scores, int column, int last_key,
                                             float score) {
  // A column belongs to the causal prefix if the token may see its first key, whoever holds that.
  if (with.compact) {
    if (column * PAGE <= last_key) scores[column] = score;
    return;
  }
  const int own = static_cast<int>(with.rank) * kPageBlocks / WORLD;
#pragma unroll
  for (int i = 0; i < kPageBlocks; ++i) {
    const int block = column * kPageBlocks + i;
    // This rank holds no row of the page's other block.
    if (block * kBlock <= last_key) scores[block] = i == own ? score : minus_infinity();
  }
}

// What all threads know of a piece. It lies in shared memory: the products leave no registers for it.
struct Piece {
  Item item;
  int last_keys[kItemTokens];  // below 0 also for a token that has no row
  int least[kGroups];          // the last key that all tokens of a warp group see
  int most[kGroups];           // and the last one that any of them sees
};

// The maxima of the products over each page, and their places in the score rows. A thread holds rows `row` and `row` + 8
// of the item.
__device__ __forceinline__ void store_scores(const Arguments& with, const float (&sums)[64], const Piece& piece, int row,
                                             int tile, bool all_seen) {
  const int lane = threadIdx.x % 4;  // of the four that share two rows
  constexpr int kPageGroups = Layout::kRows / 8;
  constexpr int kTurns = (2 * kTilePages + 3) / 4;
  const int token = row / kHeads;
  const int last_keys[2] = {piece.last_keys[token], piece.last_keys[token + 8 / kHeads]};
  float best[kTilePages][2];
#pragma unroll
  for (int page = 0; page < kTilePages; ++page) {
    const int column = tile * kTilePages + page;
    const float* products = sums + page * kPageGroups * 4;
    best[page][0] = best[page][1] = minus_infinity();
    if (all_seen) {
#pragma unroll
      for (int i = 0; i < kPageGroups * 4; ++i) {
        best[page][i / 2 % 2] = larger(best[page][i / 2 % 2], products[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPageGroups * 4; ++i) {
        // The key is row i / 4 * 8 + lane * 2 + i % 2 of the page.
        const int seen = Layout::rows_up_to(column, last_keys[i / 2 % 2], static_cast<int>(with.rank)) - lane * 2;
        if (i / 4 * 8 + i % 2 < seen) best[page][i / 2 % 2] = larger(best[page][i / 2 % 2], products[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      best[page][i] = larger(best[page][i], from_lane_across(best[page][i], 1));
      best[page][i] = larger(best[page][i], from_lane_across(best[page][i], 2));
    }
  }
  // The four lanes store neighbouring columns of a row as far as there are any.
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int place = turn * 4 + lane;
    const int page = place % kTilePages;
    const int i = place / kTilePages;
    if (i < 2) {
      float score = best[0][0];
#pragma unroll
      for (int other = 1; other < 2 * kTilePages; ++other) {
        if (place == other) score = best[other % kTilePages][other / kTilePages];
      }
      const long long offset = (piece.item.first_row + token + i * (8 / kHeads)) * with.token_stride;
      float* scores = with.max_score + offset + row % kHeads * with.head_stride;
      // -0.0 becomes +0.0.
      store_column(with, scores, tile * kTilePages + page, i ? last_keys[1] : last_keys[0], score + 0.0f);
    }
  }
}

struct Ring {
  unsigned char* stages;
  Barrier* full;
  Barrier* empty;
  Barrier* turn;  // of each half: the other's products have ended
};

// Tiles `begin` to `end` of an item; `done`: tiles of the ring before them.
__device__ __forceinline__ void do_piece(const Arguments& with, const Piece& piece, int begin, int end, const Ring& ring,
                                         unsigned done) {
  const int lane = threadIdx.x % kWarpSize;
  const int group = threadIdx.x / (kGroupWarps * kWarpSize);
  const int half = group / (kGroups / kHalves);
  const int row = threadIdx.x / kWarpSize * 16 + lane / 4;
  // Pages, queries and the first keys are on their way together.
  const int first_page = TileShare::page_of(with, piece.item.segment, begin);
  const int second_page = begin + 1 < end ? TileShare::page_of(with, piece.item.segment, begin + 1) : -1;
  int next_page = TileShare::page_of(with, piece.item.segment, begin + 2);
  QueryRows rows;
  rows.fetch(with, piece.item, row);
  TileShare share;
  share.fetch(with, first_page);
  unsigned queries[kSteps][4];
  rows.convert(queries);
  const auto convert = [&](unsigned tile) {
    const unsigned stage = tile % kStages;
    const unsigned use = tile / kStages;
    if (use > 0) wait_for(&ring.empty[stage], (use - 1) % 2);
    share.convert(ring.stages + stage * kStageBytes);
    publish_shared();
    meet_warp();
    if (lane == 0) arrive(&ring.full[stage]);
  };
  convert(done);
  share.fetch(with, second_page);

  for (int tile = begin; tile < end; ++tile, ++done) {
    const unsigned stage = done % kStages;
    const unsigned char* keys = ring.stages + stage * kStageBytes;
    float sums[64];
    wait_for(&ring.full[stage], done / kStages % 2);
    // The first half begins; then each waits for the other's products of the turn before.
    if (half > 0 || done > 0) wait_for(&ring.turn[half], (done + (half > 0 ? 0 : 1)) % 2);
    // Warp groups without a token multiply as well: a condition here makes the compiler wait for each product.
    begin_products();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      multiply_add_async(sums, queries[step], describe(keys + step * kStepBytes, kPlaneBytes, kCoreBytes), step > 0);
    }
    end_products();
    // Meanwhile the next tile, whose keys were fetched a tile ago, and the fetch of the one after that.
    if (tile + 1 < end) {
      convert(done + 1);
      share.fetch(with, tile + 2 < end ? next_page : -1);
      next_page = TileShare::page_of(with, piece.item.segment, tile + 3);
    }
    wait_for_products(sums);
    if (lane == 0) arrive(&ring.turn[1 - half]);
    if (tile * kTilePages * PAGE <= piece.most[group]) {
      const bool all_seen = (tile + 1) * kTilePages * PAGE - 1 <= piece.least[group];
      store_scores(with, sums, piece, row, tile, all_seen);
    }
    meet_warp();
    if (lane == 0) arrive(&ring.empty[stage]);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) index_score_sharded(const __grid_constant__ Arguments with) {
  __shared__ Barrier full[kStages];
  __shared__ Barrier empty[kStages];
  __shared__ Barrier turn[kHalves];
  __shared__ Piece piece;
  if (threadIdx.x < kStages) {
    make_barrier(&full[threadIdx.x], kWarps);
    make_barrier(&empty[threadIdx.x], kWarps);
    if (threadIdx.x < kHalves) make_barrier(&turn[threadIdx.x], kWarps / kHalves);
    publish_barriers();
  }
  wait_for_predecessor();
  release_dependents();
  meet_cta();

  const Ring ring = {dynamic_shared(), full, empty, turn};
  const unsigned long long range = static_cast<unsigned long long>(load(with.work_range + blockIdx.x));
  const int first_item = static_cast<int>(range & 0xffff);
  const int first_unit = static_cast<int>(range >> 16 & 0xffff);
  const int last_item = static_cast<int>(range >> 32 & 0xffff);
  const int last_unit = static_cast<int>(range >> 48);
  unsigned done = 0;
  for (int index = first_item; index <= last_item; ++index) {
    const Item item = read_item(with, index);
    if (item.tokens == 0) continue;
    // Units behind what the last token sees hold nothing, whatever the words say.
    const int blocks = (item.last_key(item.tokens - 1) + kBlock) / kBlock;
    const int units = (blocks + kUnitBlocks - 1) / kUnitBlocks;
    const int begin = (index == first_item ? first_unit : 0) * kUnitTiles;
    const int end = (index == last_item && last_unit < units ? last_unit : units) * kUnitTiles;
    if (begin >= end) continue;
    meet_cta();  // nobody needs the piece before
    if (threadIdx.x == 0) piece.item = item;
    if (threadIdx.x < kItemTokens) {
      piece.last_keys[threadIdx.x] = has_row(with, item, threadIdx.x) ? item.last_key(threadIdx.x) : -1;
    }
    if (threadIdx.x < kGroups) {
      const int first = threadIdx.x * kGroupTokens;
      const int last = first + kGroupTokens < item.tokens ? first + kGroupTokens : item.tokens;
      piece.least[threadIdx.x] = last - first == kGroupTokens ? item.last_key(first) : -1;
      piece.most[threadIdx.x] = first < last ? item.last_key(last - 1) : -1;
    }
    meet_cta();
    do_piece(with, piece, begin, end, ring, done);
    done += end - begin;
  }
}
