// The decode scorer (contract, section 4).
//
// The key rows of a request are cut into rounds: one piece for each warp of a CTA. A CTA takes every `stride`-th round of
// its request, so that short requests have few rounds a CTA rather than few CTAs. A warp works alone: it
// reads the length and all its table entries side by side, keeps up to STAGES bulk copies in flight, and
// multiplies. A page is 1, 2 or 4 pieces of neighbouring warps, whose maxima meet in shared memory.
//
// Dependents are released at once: their CTAs take the places that this launch's last ones leave, read their
// keys, and wait. If all places were taken so, the keys of a whole wave would be there when the predecessor ends, and
// all would multiply while nothing is read. So of the first CTAs every other one may be a gap: it only waits, and
// leaves its place to one that reads while those beside it multiply.
//
// That is also why it is no lawful direct predecessor of a kernel that reads before it waits (contract, section 11).
//
// Launch: gaps + stride * requests CTAs, kThreads threads.

#include "device/decode_score.cuh"
#include "device/group_scorer.cuh"
#include "device/ptx/launch.cuh"

constexpr int kRoundColumns = kWarps / kPagePieces;

// Which CTA of which request a CTA is, or that it is a gap.
struct Share {
  int first_round;
  int request;
  bool gap;

  __device__ __forceinline__ Share(const Arguments& with, unsigned index) {
    const unsigned gaps = static_cast<unsigned>(with.gaps);
    gap = index < 2 * gaps && index % 2 == 1;
    index = index < 2 * gaps ? index / 2 : index - gaps;
    // Requests alternate, so that long ones, whose CTAs run longest, are not all at the end.
    const int requests = static_cast<int>(with.requests);
    first_round = static_cast<int>(requests == 1 ? index : upper_product(index, with.reciprocal));
    request = static_cast<int>(index) - first_round * requests;
  }
};

template <class Scorer, int kGroups, int kStages>
__device__ __forceinline__ void score(const Arguments& with) {
  constexpr bool kLoop = kStages > 1;
  constexpr int kRows = kGroups * kGroup;
  alignas(128) __shared__ unsigned char keys[kWarps][kStages][kPieceBytes];
  __shared__ Barrier arrived[kWarps][kStages];
  __shared__ float of_piece[2][kWarps][kRows];  // where a page has several pieces

  release_dependents();
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int stride = static_cast<int>(with.stride);
  const Share share(with, blockIdx.x);
  if (share.gap) {
    wait_for_predecessor();
    return;
  }
  const int request = share.request;

  // Lane i sees to the warp's i-th piece; of more than 32 of them 32 at a time.
  const int first_column = share.first_round * kRoundColumns;
  const int step = stride * kRoundColumns;
  const int own_round = first_column + lane * step;
  const int own_column = own_round + warp / kPagePieces;
  const int first_row = warp % kPagePieces * kPieceRows;
  const bool mine = kLoop ? lane < static_cast<int>(with.rounds) : lane == 0;
  const int page = mine ? table_entry(with, request, own_column) : -1;
  const int keys_of_request = load(with.seq_lens + request);
  if (lane < kStages) {
    make_barrier(&arrived[warp][lane]);
    publish_barriers();
  }
  meet_warp();  // before any lane announces a copy: the compiler makes barriers in an instruction of no lane's own
  // Of the lane's query row: the first of two of a group, or the one that it stores for all warps of a page.
  float* const scores = score_row(with, request, kPagePieces == 1 ? lane * 2 : lane);
  const int seq_len = sequence_length(with, keys_of_request);
  const int written = written_columns(with, seq_len);
  if (first_column >= written) {
    wait_for_predecessor();
    return;
  }

  bool has_keys = readable(with, page, own_column, seq_len);
  const bool history = is_history(with, own_column, seq_len);
  unsigned with_keys = kLoop ? lanes_where(has_keys) : 0;
  unsigned seen_whole = kLoop ? lanes_where(history) : 0;
  int pieces = kLoop ? number_of_ones(lanes_where(mine && own_round < written)) : 1;
  const unsigned char* source = piece_address(with, page, first_row);
  if (lane < kStages && has_keys) {
    if (history) {
      copy_to_shared(keys[warp][lane], source, kPieceBytes, &arrived[warp][lane]);
    } else {
      prefetch(source, kPieceBytes);  // the predecessor may still write it there
      announce(&arrived[warp][lane], kPieceBytes);
    }
  }
  Scorer scorer;
  scorer.prepare(with, request, lane);
  make_ready(source);
  wait_for_predecessor();
  if (lane < kStages && has_keys && !history) {
    copy_announced(keys[warp][lane], source, kPieceBytes, &arrived[warp][lane]);
  }
  meet_warp();
  scorer.take();

  const int first_position = seq_len - static_cast<int>(with.query_len);
  unsigned parity = 0;  // bit i: of the copy that stage i waits for
  int column = first_column + warp / kPagePieces;
  int stage = 0;
  for (;;) {
    for (int piece = 0; piece < pieces; ++piece) {
      Best<kGroups> best;
      best.clear();
      const bool here = kLoop ? with_keys >> piece & 1 : from_lane(has_keys, 0);
      if (here) {
        wait_for(&arrived[warp][stage], parity >> stage & 1);
        if constexpr (kLoop) parity ^= 1u << stage;
      }
      if (here || Scorer::kTogether) {
        const bool all_seen = kLoop ? seen_whole >> piece & 1 : from_lane(history, 0);
        const Sight sight = {all_seen, column, first_row, first_position, static_cast<int>(with.rank)};
        scorer.add(best, keys[warp][stage], sight, lane);
        if (!here) best.clear();
      }
      if constexpr (kLoop) {
        meet_warp();  // all lanes have read the stage
        if (lane == piece + kStages && has_keys) {
          copy_to_shared(keys[warp][stage], source, kPieceBytes, &arrived[warp][stage]);
        }
      }
      best.combine();
      if constexpr (kPagePieces == 1) {
        if (column < written) store_scores(with, best, scores, column, lane);
      } else {
        float(*team)[kRows] = &of_piece[piece % 2][warp / kPagePieces * kPagePieces];
        if (lane < 4) {
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
#pragma unroll
            for (int i = 0; i < 2; ++i) team[warp % kPagePieces][group * kGroup + lane * 2 + i] = best.of[group][i];
          }
        }
        meet_cta();
        const bool stores = warp % kPagePieces == piece % kPagePieces && column < written;
        if (stores && lane < kHeads * static_cast<int>(with.query_len)) {
          float most = team[0][lane];
#pragma unroll
          for (int other = 1; other < kPagePieces; ++other) most = larger(most, team[other][lane]);
          scores[column] = most + 0.0f;  // -0.0 becomes +0.0
        }
      }
      column += step;
      if constexpr (kLoop) stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    if constexpr (!kLoop) break;
    if (pieces < kWarpSize) break;
    const int next_round = column - warp / kPagePieces + lane * step;
    const int next_column = column + lane * step;
    // With more queries there is no register left that could keep it.
    const int same_request = kGroups == 1 ? request : Share(with, cta_again()).request;
    const int next_page = table_entry(with, same_request, next_column);
    const int keys_in_all = first_position + static_cast<int>(with.query_len);
    has_keys = readable(with, next_page, next_column, keys_in_all);
    with_keys = lanes_where(has_keys);
    seen_whole = lanes_where(is_history(with, next_column, keys_in_all));
    pieces = number_of_ones(lanes_where(next_round < written));
    source = piece_address(with, next_page, first_row);
    stage = 0;
    if (lane < kStages && has_keys) copy_to_shared(keys[warp][lane], source, kPieceBytes, &arrived[warp][lane]);
  }
}

// GROUPS times eight query rows, STAGES pieces of a warp in flight; with one a CTA has one round. RESIDENT CTAs are to
// share a multiprocessor. TOGETHER: the four warps multiply as a warp group, else each on its own.
extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT)
    decode_index_score_sharded(const __grid_constant__ Arguments with) {
  if constexpr (TOGETHER) {
    score<GroupScorer<GROUPS>, GROUPS, STAGES>(with);
  } else {
    score<WarpScorer<GROUPS, CHAINS>, GROUPS, STAGES>(with);
  }
}
