// What the forms of the decode scorer share, for one layout: PAGE and WORLD are defined by the loader.
//
// The unit of work is a *piece*: 32 key rows, 4 KiB, of one page, scored by one warp.

#include "fragments.cuh"
#include "ptx/warp.cuh"
#include "shard.cuh"

using Layout = Shard<PAGE, WORLD>;

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kPieceRows = 32;
constexpr int kPieceBytes = kPieceRows * kDim;
constexpr int kPagePieces = Layout::kRows / kPieceRows;
constexpr int kColumnStep = 4;  // columns are written in multiples of four

// Everything that a launch needs; 64-bit, so that the host packs one kind of word.
struct Arguments {
  const unsigned char* index_q;
  const unsigned char* index_k;
  const int* block_table;
  const int* seq_lens;
  float* score_out;
  long long requests;
  long long pages;
  long long page_pitch;
  long long table_columns;
  long long table_stride;
  long long columns;
  long long token_stride;
  long long head_stride;
  long long query_len;
  long long rank;
  long long first_key;  // position of the first key of column 0: a multiple of four pages
  long long stride;      // CTAs of a request, each of which takes every stride-th of its rounds
  unsigned long long reciprocal;  // 2**64 / requests, rounded up; of no use where there is one
  long long rounds;      // of a CTA, at most
  long long gaps;        // CTAs that only wait
};

// Keys of a request from the first column on. Everything else about positions is relative to that as well: a token
// sees a key, or not, wherever both are counted from. `keys` is what `seq_lens` says.
__device__ __forceinline__ int sequence_length(const Arguments& with, int keys) {
  return keys > 0 ? keys - static_cast<int>(with.first_key) : 0;
}

__device__ __forceinline__ int sequence_pages(int seq_len) {
  return seq_len > 0 ? (seq_len - 1) / PAGE + 1 : 0;
}

// Columns that a request writes: those of the sequence, rounded up to a multiple of four.
__device__ __forceinline__ int written_columns(const Arguments& with, int seq_len) {
  const int rounded = (sequence_pages(seq_len) + kColumnStep - 1) / kColumnStep * kColumnStep;
  const int columns = static_cast<int>(with.columns);
  return rounded < columns ? rounded : columns;
}

// What the table says of column `column`, or -1. An entry behind the live prefix may be read, but is not followed:
// see `readable`.
__device__ __forceinline__ int table_entry(const Arguments& with, long long request, int column) {
  return column < static_cast<int>(with.table_columns) ? load(with.block_table + request * with.table_stride + column) : -1;
}

__device__ __forceinline__ bool readable(const Arguments& with, int page, int column, int seq_len) {
  return page >= 0 && page < static_cast<int>(with.pages) && column < sequence_pages(seq_len);
}

// The page ends before the request's first query token: it was written in an earlier step, and all tokens see it
// whole.
__device__ __forceinline__ bool is_history(const Arguments& with, int column, int seq_len) {
  return (column + 1) * PAGE <= seq_len - static_cast<int>(with.query_len);
}

__device__ __forceinline__ const unsigned char* piece_address(const Arguments& with, int page, int first_row) {
  return with.index_k + page * with.page_pitch + first_row * kDim;
}

// Which keys of a piece a token sees.
struct Sight {
  bool all;            // every token sees every one
  int column;          // of the page
  int first_row;       // of the piece, in the page
  int first_position;  // of the request's first token
  int rank;
};

// The best product of each query row so far. A lane holds columns 2 t and 2 t + 1 of each group, t = lane % 4, over
// the key rows that it has seen; after `combine` over all that the warp has seen.
template <int kGroups>
struct Best {
  float of[kGroups][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) of[group][0] = of[group][1] = minus_infinity();
  }

  // The products of 16 key rows, from row `rows` of the piece on, with all groups.
  __device__ __forceinline__ void add(float (&sums)[4 * kGroups], int rows, const Sight& sight, int lane) {
    if (!sight.all) {
      const int row = sight.first_row + rows + lane / 4;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int position = sight.first_position + (group * kGroup + lane % 4 * 2) / kHeads;
        if (Layout::position(sight.column, row, sight.rank) > position) {
          sums[4 * group] = sums[4 * group + 1] = minus_infinity();
        }
        if (Layout::position(sight.column, row + 8, sight.rank) > position) {
          sums[4 * group + 2] = sums[4 * group + 3] = minus_infinity();
        }
      }
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        of[group][i] = larger(of[group][i], larger(sums[4 * group + i], sums[4 * group + i + 2]));
      }
    }
  }

  __device__ __forceinline__ void combine() {
#pragma unroll
    for (int distance = 4; distance < kWarpSize; distance *= 2) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < 2; ++i) of[group][i] = larger(of[group][i], from_lane_across(of[group][i], distance));
      }
    }
  }
};

// Scores pieces with the queries in registers, each warp on its own. kChains is 1 or 2: how many of a piece's two
// blocks of 16 rows are multiplied side by side. Two wait less for each other's sums, one takes fewer registers.
template <int kGroups, int kChains>
struct WarpScorer {
  static constexpr bool kTogether = false;  // whether all warps must be there
  QueryFragment queries[kGroups];

  const unsigned char* first;  // the lane's row of the first group
  int rows;                    // of the request, from there on

  // Before the predecessor has ended, and after.
  __device__ __forceinline__ void prepare(const Arguments& with, long long request, int lane) {
    rows = kHeads * static_cast<int>(with.query_len);
    first = with.index_q + (request * rows + lane / 4) * kDim + lane % 4 * 16;
    make_ready(first);
    rows -= lane / 4;
  }

  __device__ __forceinline__ void take() {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      queries[group].take(group * kGroup < rows ? first + group * kGroup * kDim : nullptr);
    }
  }

  __device__ __forceinline__ void add(Best<kGroups>& best, const unsigned char* keys, const Sight& sight, int lane) const {
#pragma unroll
    for (int first = 0; first < 2; first += kChains) {
      KeyFragment fragments[kChains];
      float sums[kChains][4 * kGroups] = {};
#pragma unroll
      for (int i = 0; i < kChains; ++i) fragments[i].take(keys + (first + i) * 16 * kDim, lane);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < kChains; ++i) {
          unsigned a[4];
          fragments[i].share(step, a);
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            multiply_add(sums[i] + 4 * group, a, queries[group].share[step]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kChains; ++i) best.add(sums[i], (first + i) * 16, sight, lane);
    }
  }
};

// Column 0 of the scores of a request's query row. Made before the products, whose end would wait for it otherwise.
__device__ __forceinline__ float* score_row(const Arguments& with, long long request, int query_row) {
  const long long token = request * with.query_len + query_row / kHeads;
  return with.score_out + token * with.token_stride + query_row % kHeads * with.head_stride;
}

// Stores what a lane holds after `Best::combine`: lanes 0 to 3 have two neighbouring heads of one token in each group. `row`
// is the score row of the lane's first head.
template <int kGroups>
__device__ __forceinline__ void store_scores(const Arguments& with, const Best<kGroups>& best, float* row, int column,
                                             int lane) {
  constexpr int kGroupTokens = kGroup / kHeads;
  if (lane >= 4) return;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    if (group * kGroup + lane * 2 >= kHeads * static_cast<int>(with.query_len)) return;
    float* to = row + group * kGroupTokens * with.token_stride + column;
    to[0] = best.of[group][0] + 0.0f;  // -0.0 becomes +0.0
    to[with.head_stride] = best.of[group][1] + 0.0f;
  }
}
