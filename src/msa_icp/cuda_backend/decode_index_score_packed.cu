// The decode scorer (contract, section 4) as CTAs that stay, for large batches and for ragged ones, where a
// rectangular grid would be mostly empty.
//
// The columns to be written of all requests form one list, which is dealt to the warps in equal shares. A warp walks
// its share page by page with STAGES pieces in flight, and shares nothing with the others after the prologue.
//
// Launch: any number of CTAs, kThreads threads; at most kMostRequests requests.

#include "device/decode_score.cuh"
#include "device/ptx/launch.cuh"

constexpr int kMostRequests = 1024;
constexpr int kThreadRequests = kMostRequests / kThreads;

// ends[b]: columns of the requests up to and including b.
__device__ __forceinline__ void add_up_columns(int* ends, int* of_warp, const Arguments& with) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int requests = static_cast<int>(with.requests);
  const int each = (requests + kThreads - 1) / kThreads;
  const int first = threadIdx.x * each;
  int columns[kThreadRequests];
  int own = 0;
#pragma unroll
  for (int i = 0; i < kThreadRequests; ++i) {  // all loads before the first use
    columns[i] = i < each && first + i < requests ? sequence_length(with, first + i) : 0;
  }
#pragma unroll
  for (int i = 0; i < kThreadRequests; ++i) {
    columns[i] = written_columns(with, columns[i]);
    own += columns[i];
  }
  int end = own;  // of this thread's requests, within the warp
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int before = from_lane(end, lane - distance);
    if (lane >= distance) end += before;
  }
  if (lane == kWarpSize - 1) of_warp[warp] = end;
  meet_cta();
  for (int i = 0; i < warp; ++i) end += of_warp[i];
  int running = end - own;
#pragma unroll
  for (int i = 0; i < kThreadRequests; ++i) {
    running += columns[i];
    if (i < each && first + i < requests) ends[first + i] = running;
  }
  meet_cta();
}

// One place of the list: a lane each for the next 32.
struct Place {
  int request;
  int column;
  int page;  // -1: nothing to read
  bool history;
};

__device__ __forceinline__ Place find_place(const Arguments& with, const int* ends, int at) {
  int low = 0;  // the first request that ends behind `at`
  int high = static_cast<int>(with.requests) - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] > at) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  Place place;
  place.request = low;
  place.column = at - (low > 0 ? ends[low - 1] : 0);
  const int entry = table_entry(with, low, place.column);
  const int seq_len = sequence_length(with, low);
  place.page = readable(with, entry, place.column, seq_len) ? entry : -1;
  place.history = is_history(with, place.column, seq_len);
  return place;
}

template <int kGroups, int kStages>
__device__ __forceinline__ void score(const Arguments& with) {
  alignas(128) __shared__ unsigned char keys[kWarps][kStages][kPieceBytes];
  __shared__ Barrier arrived[kWarps][kStages];
  __shared__ int ends[kMostRequests];
  __shared__ int of_warp[kWarps];

  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  if (lane < kStages) {
    make_barrier(&arrived[warp][lane]);
    publish_barriers();
  }
  add_up_columns(ends, of_warp, with);

  const long long total = ends[with.requests - 1];
  const long long warps = static_cast<long long>(gridDim.x) * kWarps;
  const long long own = static_cast<long long>(blockIdx.x) * kWarps + warp;
  const int begin = static_cast<int>(total * own / warps);
  const int pieces = (static_cast<int>(total * (own + 1) / warps) - begin) * kPagePieces;

  Place ahead;  // of the copies
  const auto look_ahead = [&](int piece) {
    const int column = piece / kPagePieces;
    if (piece % kPagePieces == 0 && column % kWarpSize == 0) {
      const int last = begin + pieces / kPagePieces - 1;
      const int at = begin + column + lane;
      ahead = find_place(with, ends, at < last ? at : last);
    }
  };
  const auto start_copy = [&](int piece) {
    const int page = from_lane(ahead.page, piece / kPagePieces % kWarpSize);
    if (page >= 0 && lane == 0) {
      copy_to_shared(keys[warp][piece % kStages], piece_address(with, page, piece % kPagePieces * kPieceRows),
                     kPieceBytes, &arrived[warp][piece % kStages]);
    }
  };

  // The first pieces: those of history at once, the others when the predecessor has ended.
  const int early = pieces < kStages ? pieces : kStages;
  unsigned later = 0;
  for (int piece = 0; piece < early; ++piece) {
    look_ahead(piece);
    if (from_lane(ahead.history, piece / kPagePieces)) {
      start_copy(piece);
    } else {
      later |= 1u << piece;
    }
  }
  if (pieces <= kStages) release_dependents();
  wait_for_predecessor();
  for (int piece = 0; piece < early; ++piece) {
    if (later >> piece & 1) start_copy(piece);
  }

  WarpScorer<kGroups, 1> scorer;
  Best<kGroups> best;
  Place here = ahead;  // of the products
  int request = -1;
  int first_position = 0;
  unsigned parity = 0;  // bit i: of the copy that stage i waits for
  for (int piece = 0; piece < pieces; ++piece) {
    const int in_page = piece % kPagePieces;
    const int place = piece / kPagePieces % kWarpSize;
    if (in_page == 0) {
      if (place == 0) here = ahead;
      best.clear();
      const int its_request = from_lane(here.request, place);
      if (its_request != request) {
        request = its_request;
        first_position = sequence_length(with, request) - static_cast<int>(with.query_len);
        scorer.take(with, request, lane);
      }
    }
    const int column = from_lane(here.column, place);
    if (from_lane(here.page, place) >= 0) {
      const bool all_seen = from_lane(here.history, place);
      const int stage = piece % kStages;
      wait_for(&arrived[warp][stage], parity >> stage & 1);
      parity ^= 1u << stage;
      const Sight sight = {all_seen, column, in_page * kPieceRows, first_position, static_cast<int>(with.rank)};
      scorer.add(best, keys[warp][stage], sight, lane);
    }
    meet_warp();  // all lanes have read the stage
    const int next = piece + kStages;
    if (next < pieces) {
      look_ahead(next);
      start_copy(next);
      if (next == pieces - 1) release_dependents();
    }
    if (in_page == kPagePieces - 1) {
      best.combine();
      store_scores(with, best, request, column, lane);
    }
  }
}

// GROUPS times eight query rows, STAGES pieces of a warp in flight; RESIDENT CTAs are to share a multiprocessor.
extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT)
    decode_index_score_packed(const __grid_constant__ Arguments with) {
  score<GROUPS, STAGES>(with);
}
