// The prefill scorer (contract, section 7), for one layout: PAGE, WORLD and STAGES are defined by the loader.
//
// A CTA does one worker's share of the plan, piece by piece. Of an item it holds the queries, up to 64 tokens of four
// heads, as fp16 in registers: 64 rows a warp group. Keys come in tiles of 128 rows. All warps convert a tile to fp16
// in shared memory, in a ring of kStages, and every warp group that sees some of it multiplies it by its queries while
// the next tile is converted and the one after that is on its way in registers.
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
constexpr int kWarps = kGroups * kGroupWarps;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kGroupTokens = kItemTokens / kGroups;
constexpr int kStages = STAGES;
constexpr unsigned kNan = 0x7f7f7f7f;  // four e4m3 NaN

constexpr int kTileKeys = 128;
constexpr int kTilePages = kTileKeys / Layout::kRows;
constexpr int kPageBlocks = PAGE / kBlock;
constexpr int kTileSpan = kTilePages * PAGE;  // positions, of all ranks' keys
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

// The keys of a tile that a thread converts, on their way: both halves' 16 bytes of one row.
struct TileShare {
  Words halves[2];

  __device__ __forceinline__ static int row() { return threadIdx.x / 4; }

  // The thread's page of a tile. Columns behind the table lie behind what any token sees: any page will do.
  __device__ __forceinline__ static int page_of(const Arguments& with, const int* table, int tile) {
    const int column = tile * kTilePages + row() / Layout::kRows;
    const int last = static_cast<int>(with.table_columns) - 1;
    return load(table + (column < last ? column : last));
  }

  __device__ __forceinline__ void fetch(const Arguments& with, int page) {
    if (page >= 0 && page < with.pages) {
      load_halves(halves, with.k + static_cast<unsigned>(page) * with.page_pitch + row() % Layout::kRows * kDim +
                              threadIdx.x % 4 * 16);
    } else {
      // Rows of a page that cannot be read count as NaN, which no maximum takes.
      halves[0] = halves[1] = Words{kNan, kNan, kNan, kNan};
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

// The item, and the page of tile `begin`: all loads that need no more than the segment are on their way together.
__device__ __forceinline__ Item read_item(const Arguments& with, long long index, int begin, int& page) {
  Item item = {0, 0, 0, 0, 0};
  if (index >= with.capacity) return item;
  const long long info = load(with.work_info + index);
  const int segment = static_cast<int>(info & 0xffff);
  if (segment >= with.batch || with.table_columns == 0) return item;
  const long long first = (info >> 16 & 0xffff) * kItemTokens;
  const long long left = load(with.qo_lens + segment) - first;
  const int kv_len = load(with.kv_lens + segment);
  const int* table = with.block_table + segment * with.table_stride;
  page = TileShare::page_of(with, table, begin);
  const long long most = with.columns * kBlock;
  item.segment = segment;
  item.tokens = left < kItemTokens ? static_cast<int>(left < 0 ? 0 : left) : kItemTokens;
  item.first_row = load(with.qo_starts + segment) + first;
  item.first_position = load(with.qo_offset + segment) + first;
  item.keys = kv_len < most ? (kv_len < 0 ? 0 : kv_len) : static_cast<int>(most);
  return item;
}

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

// What all threads know of a piece. It lies in shared memory: the products leave no registers for it.
struct Piece {
  int index;  // of the item
  int end;    // its tile behind the piece
  unsigned last;                        // the upper half of the share's word
  const int* table;                     // the segment's pages
  float* scores[kItemTokens * kHeads];  // a row each, from the segment's first column
  int last_keys[kItemTokens];  // below 0 also for a token that has no row
  int seen[kGroups];           // tiles, from the segment's first, of which a token of the warp group sees a key
  int whole[kGroups];          // and those of which all its tokens see every key
};

// By a thread a row, of which the first ones do more.
__device__ __forceinline__ void describe_piece(Piece& piece, const Arguments& with, const Item& item, int index,
                                               int end, unsigned last_word) {
  const int token = threadIdx.x;
  if (threadIdx.x >= kItemTokens * kHeads) return;
  piece.scores[threadIdx.x] = with.max_score + (item.first_row + threadIdx.x / kHeads) * with.token_stride +
                              threadIdx.x % kHeads * with.head_stride;
  if (token < kItemTokens) piece.last_keys[token] = has_row(with, item, token) ? item.last_key(token) : -1;
  if (token == 0) {
    piece.index = index;
    piece.end = end;
    piece.last = last_word;
    piece.table = with.block_table + item.segment * with.table_stride;
  }
  if (token < kGroups) {
    const int first = token * kGroupTokens;
    const int last = first + kGroupTokens - 1;
    const int end = last < item.tokens ? last : item.tokens - 1;
    const int most = first <= end ? item.last_key(end) : -1;
    const bool all = has_row(with, item, first) && has_row(with, item, last);
    piece.seen[token] = most < 0 ? 0 : most / kTileSpan + 1;
    piece.whole[token] = all ? (item.last_key(first) + 1) / kTileSpan : 0;
  }
}

// Of maxima at kCount places a lane keeps those at places whose bit kBit is as its own, over it and the lane across,
// to which it sends the others: half as many steps as all maxima in all lanes would take. They lie where the bit is 0.
template <int kCount, int kBit>
__device__ __forceinline__ void share_out(float (&best)[kCount], int lane) {
#pragma unroll
  for (int place = 0; place < kCount; ++place) {
    if ((place & (2 * kBit - 1)) != 0) continue;
    if ((place | kBit) < kCount) {
      const float sent = lane & kBit ? best[place] : best[place | kBit];
      const float kept = lane & kBit ? best[place | kBit] : best[place];
      best[place] = larger(kept, from_lane_across(sent, kBit));
    } else {
      best[place] = larger(best[place], from_lane_across(best[place], kBit));
    }
  }
}

// The maxima of the products over each page, and their places in the score rows. Four lanes hold two rows of the item,
// each two of every eight keys, and store a share of the maxima each, as far as there are enough.
struct ScoreRows {
  static constexpr int kCount = 2 * kTilePages;  // place: page + kTilePages for the second row
  static constexpr int kTurns = (kCount + 3) / 4;

  __device__ __forceinline__ static int row() { return threadIdx.x / kWarpSize * 16 + threadIdx.x % kWarpSize / 4; }
  __device__ __forceinline__ static int place(int turn) { return turn * 4 + threadIdx.x % 4; }
  __device__ __forceinline__ static int row(int turn) { return row() + place(turn) / kTilePages % 2 * 8; }

  __device__ __forceinline__ static void put(const Arguments& with, const float (&sums)[64], const Piece& piece,
                                             int tile, bool whole) {
    float best[kCount];
    if (whole) {
      take<true>(best, sums, with, piece, tile);
    } else {
      take<false>(best, sums, with, piece, tile);
    }
    share_out<kCount, 1>(best, threadIdx.x % 4);
    share_out<kCount, 2>(best, threadIdx.x % 4);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (place(turn) >= kCount) continue;
      const int column = tile * kTilePages + place(turn) % kTilePages;
      const int last_key = whole ? (tile + 1) * kTileSpan : piece.last_keys[row(turn) / kHeads];
      // -0.0 becomes +0.0.
      store_column(with, piece.scores[row(turn)], column, last_key, best[turn * 4] + 0.0f);
    }
  }

  template <bool kWhole>
  __device__ __forceinline__ static void take(float (&best)[kCount], const float (&sums)[64], const Arguments& with,
                                              const Piece& piece, int tile) {
    constexpr int kPageSums = Layout::kRows / 2;
#pragma unroll
    for (int at = 0; at < kCount; ++at) {
      const int second = at / kTilePages;
      int seen = Layout::kRows;
      if (!kWhole) {
        const int last_key = piece.last_keys[(row() + second * 8) / kHeads];
        seen = Layout::rows_up_to(tile * kTilePages + at % kTilePages, last_key, static_cast<int>(with.rank)) -
               threadIdx.x % 4 * 2;
      }
      best[at] = minus_infinity();
#pragma unroll
      for (int i = 0; i < kPageSums; ++i) {
        // The key is row i / 4 * 8 + i % 2 of the page, and two more for each lane before.
        if (i / 2 % 2 != second || (!kWhole && i / 4 * 8 + i % 2 >= seen)) continue;
        best[at] = larger(best[at], sums[at % kTilePages * kPageSums + i]);
      }
    }
  }

  // A column belongs to the causal prefix if the token may see its first key, whoever holds that.
  __device__ __forceinline__ static void store_column(const Arguments& with, float* scores, int column, int last_key,
                                                      float score) {
    if (kPageBlocks == 1 || with.compact) {
      if (column * PAGE <= last_key) store(scores + column, score);
      return;
    }
    const int own = static_cast<int>(with.rank) * kPageBlocks / WORLD;
#pragma unroll
    for (int i = 0; i < kPageBlocks; ++i) {
      // This rank holds no row of the page's other block.
      const int block = column * kPageBlocks + i;
      if (block * kBlock <= last_key) store(scores + block, i == own ? score : minus_infinity());
    }
  }
};

struct Ring {
  unsigned char* stages;
  Barrier* full;
};

// What a piece needs first, on its way.
struct Arrivals {
  TileShare tile;
  QueryRows rows;

  __device__ __forceinline__ void fetch(const Arguments& with, const Item& item, int page) {
    tile.fetch(with, page);
    rows.fetch(with, item, ScoreRows::row());
  }
};

// A piece's tiles from `begin`; `done`: tiles of the ring before them, and then with them.
__device__ __forceinline__ void do_piece(const Arguments& with, const Piece& piece, const Arrivals& arrivals,
                                         int begin, const Ring& ring, unsigned& done) {
  // Who converts tile t + 1 has seen all convert tile t, after their products with tile t - 2.
  static_assert(kStages >= 3);
  const int lane = threadIdx.x % kWarpSize;
  const int group = threadIdx.x / (kGroupWarps * kWarpSize);
  const int second_page = TileShare::page_of(with, piece.table, begin + 1);
  int next_page = TileShare::page_of(with, piece.table, begin + 2);
  TileShare second;
  if (begin + 1 < piece.end) second.fetch(with, second_page);
  TileShare share = arrivals.tile;
  const auto convert = [&](unsigned tile) {
    const unsigned stage = tile % kStages;
    share.convert(ring.stages + stage * kStageBytes);
    publish_shared();
    meet_warp();
    if (lane == 0) arrive(&ring.full[stage]);
  };
  // The next tile, whose keys were fetched a tile ago, and the fetch of the one after that.
  const auto prepare_next = [&](int tile) {
    if (tile + 1 >= piece.end) return;
    convert(done + 1);
    if (tile + 2 < piece.end) share.fetch(with, next_page);
    next_page = TileShare::page_of(with, piece.table, tile + 3);
  };
  convert(done);
  share = second;
  // A warp group that sees nothing of the piece converts keys for the others. The vote tells the compiler that the warp
  // takes one way; a condition within the loop would make it wait for each product.
  if (!true_for_all(piece.seen[group] > begin)) {
    for (int tile = begin; tile < piece.end; ++tile, ++done) {
      wait_for(&ring.full[done % kStages], done / kStages % 2);
      prepare_next(tile);
    }
    return;
  }
  unsigned queries[kSteps][4];
  arrivals.rows.convert(queries);

  for (int tile = begin; tile < piece.end; ++tile, ++done) {
    const unsigned stage = done % kStages;
    const Descriptor keys = describe(ring.stages + stage * kStageBytes, kPlaneBytes, kCoreBytes);
    float sums[64];
    wait_for(&ring.full[stage], done / kStages % 2);
    begin_products();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      multiply_add_async(sums, queries[step], keys.on(step * kStepBytes), step > 0);
    }
    end_products();
    prepare_next(tile);
    wait_for_products(sums);
    if (tile < piece.seen[group]) ScoreRows::put(with, sums, piece, tile, tile < piece.whole[group]);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) index_score_sharded(const __grid_constant__ Arguments with) {
  __shared__ Barrier full[kStages];
  __shared__ Piece piece;
  if (threadIdx.x < kStages) {
    make_barrier(&full[threadIdx.x], kWarps);
    publish_barriers();
  }
  wait_for_predecessor();
  release_dependents();

  const Ring ring = {dynamic_shared(), full};
  const unsigned long long range = static_cast<unsigned long long>(load(with.work_range + blockIdx.x));
  unsigned last = static_cast<unsigned>(range >> 32);
  int begin = static_cast<int>(range >> 16 & 0xffff) * kUnitTiles;
  unsigned done = 0;
  for (int index = static_cast<int>(range & 0xffff); index <= static_cast<int>(last & 0xffff); ++index, begin = 0) {
    int page;
    const Item item = read_item(with, index, begin, page);
    if (item.tokens == 0) continue;
    // Units behind what the last token sees hold nothing, whatever the words say.
    const int blocks = (item.last_key(item.tokens - 1) + kBlock) / kBlock;
    const int units = (blocks + kUnitBlocks - 1) / kUnitBlocks;
    const int last_unit = last >> 16;
    const int end = (index == static_cast<int>(last & 0xffff) && last_unit < units ? last_unit : units) * kUnitTiles;
    if (begin >= end) continue;
    Arrivals arrivals;
    arrivals.fetch(with, item, page);
    meet_cta();  // nobody needs the piece before
    describe_piece(piece, with, item, index, end, last);
    meet_cta();
    do_piece(with, piece, arrivals, begin, ring, done);
    index = piece.index;
    last = piece.last;
  }
}
