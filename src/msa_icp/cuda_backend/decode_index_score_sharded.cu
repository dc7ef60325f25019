// The decode scorer (contract, section 4) as many short CTAs, for batches that one or a few waves of them cover.
//
// Each warp scores PIECES pieces on its own: it reads the length and the table entries side by side, starts all its
// bulk copies, and multiplies. A page is 1, 2 or 4 pieces of neighbouring warps, whose maxima meet at the end. The
// CTAs hide the chain seq_lens, block_table -> keys behind each other.
//
// Launch: CTAs (column groups, requests, requests / gridDim.y), kThreads threads.

#include "device/decode_score.cuh"
#include "device/group_scorer.cuh"
#include "device/ptx/launch.cuh"

constexpr int kTileColumns = kWarps / kPagePieces;  // columns that the warps score at once

template <class Scorer, int kGroups, int kPieces>
__device__ __forceinline__ void score(const Arguments& with) {
  alignas(128) __shared__ unsigned char keys[kWarps][kPieces][kPieceBytes];
  __shared__ Barrier arrived[kWarps][kPieces];
  __shared__ float of_piece[kPieces][kWarps][kGroups * kGroup];  // where a page has several pieces

  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const long long request = blockIdx.y + static_cast<long long>(gridDim.y) * blockIdx.z;
  if (request >= with.requests) {
    wait_for_predecessor();
    return;
  }

  // Lane i sees to piece i.
  const int first_column = blockIdx.x * (kPieces * kTileColumns);
  const int first_row = warp % kPagePieces * kPieceRows;
  const int own_column = first_column + lane * kTileColumns + warp / kPagePieces;
  const int page = lane < kPieces ? table_entry(with, request, own_column) : -1;
  const int seq_len = sequence_length(with, request);
  const int written = written_columns(with, seq_len);
  if (first_column >= written) {
    wait_for_predecessor();
    return;
  }

  const bool has_keys = readable(with, page, own_column, seq_len);
  const bool history = is_history(with, own_column, seq_len);
  if (lane < kPieces) {
    make_barrier(&arrived[warp][lane]);
    publish_barriers();
  }
  const auto start_copy = [&] {
    copy_to_shared(keys[warp][lane], piece_address(with, page, first_row), kPieceBytes, &arrived[warp][lane]);
  };
  if (has_keys && history) start_copy();
  // Earlier, the next launch's CTAs would take the places of this one's late ones.
  release_dependents();
  wait_for_predecessor();
  if (has_keys && !history) start_copy();
  meet_warp();

  Scorer scorer;
  scorer.take(with, request, lane);
  const int first_position = seq_len - static_cast<int>(with.query_len);
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int column = first_column + piece * kTileColumns + warp / kPagePieces;
    Best<kGroups> best;
    best.clear();
    const bool here = from_lane(has_keys, piece);
    if (here) wait_for(&arrived[warp][piece], 0);
    if (here || Scorer::kTogether) {
      const Sight sight = {static_cast<bool>(from_lane(history, piece)), column, first_row, first_position,
                           static_cast<int>(with.rank)};
      scorer.add(best, keys[warp][piece], sight, lane);
      if (!here) best.clear();
      best.combine();
    }
    if constexpr (kPagePieces == 1) {
      if (column < written) store_scores(with, best, request, column, lane);
    } else if (lane < 4) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < 2; ++i) of_piece[piece][warp][group * kGroup + lane * 2 + i] = best.of[group][i];
      }
    }
  }
  if constexpr (kPagePieces > 1) {
    meet_cta();
    constexpr int kRows = kGroups * kGroup;
    for (int i = threadIdx.x; i < kPieces * kTileColumns * kRows; i += kThreads) {
      const int row = i % kRows;
      const int tile_column = i / kRows % kTileColumns;
      const int piece = i / kRows / kTileColumns;
      const int column = first_column + piece * kTileColumns + tile_column;
      if (column < written && row < kHeads * with.query_len) {
        float best = of_piece[piece][tile_column * kPagePieces][row];
#pragma unroll
        for (int other = 1; other < kPagePieces; ++other) {
          best = larger(best, of_piece[piece][tile_column * kPagePieces + other][row]);
        }
        store_score(with, request, row, column, best);
      }
    }
  }
}

// GROUPS times eight query rows, PIECES a warp; RESIDENT CTAs are to share a multiprocessor. TOGETHER: the four warps
// multiply as a warp group, else each on its own.
extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT)
    decode_index_score_sharded(const __grid_constant__ Arguments with) {
  if constexpr (TOGETHER) {
    score<GroupScorer<GROUPS>, GROUPS, PIECES>(with);
  } else {
    score<WarpScorer<GROUPS, 2>, GROUPS, PIECES>(with);
  }
}
