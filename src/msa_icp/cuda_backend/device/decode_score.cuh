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
};

// Keys of a request from the first column on. Everything else about positions is relative to that as well: a token
// sees a key, or not, wherever both are counted from.
__device__ __forceinline__ int sequence_length(const Arguments& with, long long request) {
  const int keys = load(with.seq_lens + request);
  return keys > 0 ? keys - static_cast<int>(with.first_key) : 0;
}

__device__ __forceinline__ int sequence_pages(int seq_len) {
  return seq_len > 0 ? (seq_len - 1) / PAGE + 1 : 0;
}

// Columns that a request writes: those of the sequence, rounded up to a multiple of four.
__device__ __forceinline__ int written_columns(const Arguments& with, int seq_len) {
  const int rounded = (sequence_pages(seq_len) + kColumnStep - 1) / kColumnStep * kColumnStep;
  return rounded < with.columns ? rounded : static_cast<int>(with.columns);
}

// What the table says of column `column`, or -1. An entry behind the live prefix may be read, but is not followed:
// see `readable`.
__device__ __forceinline__ int table_entry(const Arguments& with, long long request, int column) {
  return column < with.table_columns ? load(with.block_table + request * with.table_stride + column) : -1;
}

__device__ __forceinline__ bool readable(const Arguments& with, int page, int column, int seq_len) {
  return page >= 0 && page < with.pages && column < sequence_pages(seq_len);
}

// The page ends before the request's first query token: it was written in an earlier step, and all tokens see it
// whole.
__device__ __forceinline__ bool is_history(const Arguments& with, int column, int seq_len) {
  return (column + 1) * PAGE <= seq_len - static_cast<int>(with.query_len);
}

__device__ __forceinline__ const unsigned char* piece_address(const Arguments& with, int page, int first_row) {
  return with.index_k + page * with.page_pitch + first_row * kDim;
}

template <int kGroups>
__device__ __forceinline__ void take_queries(QueryFragment (&queries)[kGroups], const Arguments& with,
                                             long long request, int lane) {
  const int rows = kHeads * static_cast<int>(with.query_len);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int row = group * kGroup + lane / 4;
    queries[group].take(row < rows ? with.index_q + (request * rows + row) * kDim : nullptr, lane);
  }
}

// The best product of each query row so far. A lane holds columns 2 t and 2 t + 1 of each group, t = lane % 4, over
// the key rows that it has seen; after `combine` over all that the warp has seen.
template <int kGroups>
struct Best {
  float of[kGroups][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) of[group][0] = of[group][1] = minus_infinity();
  }

  // The rows of a piece, from local row `first_row` of the page on. `all_seen`: every token sees every row of it.
  __device__ __forceinline__ void add(const unsigned char* keys, const QueryFragment (&queries)[kGroups], int lane,
                                      bool all_seen, int column, int first_row, int first_position, int rank) {
#pragma unroll
    for (int rows = 0; rows < kPieceRows; rows += 16) {
      float sums[kGroups][4];
      score_rows(sums, keys + rows * kDim, lane, queries);
      if (!all_seen) {
        const int row = first_row + rows + lane / 4;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const int position = first_position + (group * kGroup + lane % 4 * 2) / kHeads;
          if (Layout::position(column, row, rank) > position) sums[group][0] = sums[group][1] = minus_infinity();
          if (Layout::position(column, row + 8, rank) > position) {
            sums[group][2] = sums[group][3] = minus_infinity();
          }
        }
      }
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < 2; ++i) of[group][i] = larger(of[group][i], larger(sums[group][i], sums[group][i + 2]));
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

__device__ __forceinline__ void store_score(const Arguments& with, long long request, int query_row, int column,
                                            float score) {
  const long long token = request * with.query_len + query_row / kHeads;
  // -0.0 becomes +0.0.
  with.score_out[token * with.token_stride + query_row % kHeads * with.head_stride + column] = score + 0.0f;
}

// The warp's combined maxima are the scores of `column`.
template <int kGroups>
__device__ __forceinline__ void store_scores(const Arguments& with, const Best<kGroups>& best, long long request,
                                             int column, int lane) {
  if (lane >= 4) return;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = group * kGroup + lane * 2 + i;
      if (row < kHeads * with.query_len) store_score(with, request, row, column, best.of[group][i]);
    }
  }
}
