// Merge the ranks' candidates into the final Top16 (contract, section 6).
//
// A CTA a (token, owned head), with a warp a rank, WORLD of them: the warp waits for its rank's row and reads it.
// FORM is LEGACY, TAGGED or PREFILL.
//
// Candidates are ranked as if no block came twice. If the best 16 then are 16 blocks, they are right: of a block that came
// twice the better one is among them, or none. Else what came twice is sorted out, and the rest is ranked again.
//
// Launch: CTAs (tokens, heads a rank), kThreads threads.

#include "device/ptx/launch.cuh"
#include "device/ranking.cuh"
#include "device/rows.cuh"
#include "device/waiting.cuh"

constexpr int kLegacy = 0;
constexpr int kTagged = 1;
constexpr int kPrefill = 2;
constexpr int kThreads = WORLD * kWarpSize;
constexpr int kCandidates = WORLD * kTop;
constexpr int kSharers = kWarpSize / kTop;  // threads a candidate
constexpr int kShare = kCandidates / kSharers;
constexpr int kFromBits = 6;  // who sent it: makes all keys different
constexpr int kLate = 1 << WORLD;
static_assert(kCandidates <= 1 << kFromBits);
static_assert(WORLD == 2 || WORLD == 4);

struct Arguments {
  void* rows;
  const int* num_valid_pages;
  int* output;
  int* errors;
  int* expected_generations;
  long long rank_stride;
  long long head_stride;
  long long row_stride;
  long long token_stride;
  long long out_head_stride;
  long long capacity;
  long long error_words;
  long long slot;
  long long init_blocks;
  long long local_blocks;
  long long spin_limit;
};

// The warp's row: lane i gets word i. Returns whether it has arrived; `there` also for a row that is not the one that
// is waited for but shows that its rank has been here.
__device__ __forceinline__ bool take_row(const Arguments& with, long long offset, int wanted, int& word, bool& there) {
  const int lane = threadIdx.x % kWarpSize;
  const Failures failures = {with.errors, with.error_words};
  if constexpr (FORM == kTagged) {
    const long long* from = static_cast<const long long*>(with.rows) + offset + lane;
    // What is merged is the very copy whose tags matched: no later write of a fast rank mixes into it.
    int ahead = -1;
    const bool arrived = failures.wait<true>(with.spin_limit, [&] {
      const long long tagged = poll_tagged(from);
      word = static_cast<int>(tagged);
      ahead = static_cast<int>(static_cast<unsigned>(tagged >> 32) - static_cast<unsigned>(wanted));
      return true_for_all(ahead == 0);
    });
    // A rank whose whole row is ahead has been here and went on: it is not the one that was missing.
    there = arrived || true_for_all(ahead > 0);
    return arrived;
  } else {
    const int* from = static_cast<const int*>(with.rows) + offset;
    int ready = kReady;
    if constexpr (FORM == kLegacy) {
      if (lane == 0) {
        failures.wait<false>(with.spin_limit, [&] { return (ready = poll(from + kReadyWord)) == kReady; });
      }
      ready = from_lane(ready, 0);
      meet_warp();  // what lane 0 acquired is for all of them
    }
    word = load(from + lane);
    there = ready == kReady;
    return there;
  }
}

// A candidate's key, with its number in the last bits, or 0.
__device__ __forceinline__ Key numbered(Key key, int number) {
  return key != 0 ? key << kFromBits | static_cast<unsigned>(number) : 0;
}

__device__ __forceinline__ int sent_block(Key numbered) {
  return block_of(numbered >> kFromBits);
}

// What the threads of a CTA share.
struct alignas(16) Shared {
  Key keys[kCandidates];
  unsigned distinct[WORLD];  // bit i: candidate i of the rank's row is the best of its block
  Selected selected;
  int states[WORLD];  // of the ranks' rows: 0, or kLate, and then with the rank's bit if it has not been here
};

// Bit i: the key is better than the own one, or of the same block, of `kShare` others.
struct Comparison {
  unsigned better;
  unsigned same;

  __device__ __forceinline__ void take(const Key* others, Key own) {
    unsigned larger[4] = {}, of_block[4] = {};  // so that no bit waits for the one before
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      if (others[i] > own) larger[i % 4] |= 1u << i;
      if (sent_block(others[i]) == sent_block(own)) of_block[i % 4] |= 1u << i;
    }
    better = larger[0] | larger[1] | (larger[2] | larger[3]);
    same = of_block[0] | of_block[1] | (of_block[2] | of_block[3]);
  }
};

// The bits of `Shared::distinct` for the candidates of a share.
__device__ __forceinline__ unsigned distinct_of_share(const unsigned (&distinct)[WORLD], int share) {
  if constexpr (kShare == kTop) return distinct[share];
  return distinct[2 * share] | distinct[2 * share + 1] << kTop;
}

extern "C" __global__ void __launch_bounds__(kThreads) merge_candidates(const __grid_constant__ Arguments with) {
  __shared__ Shared shared;
  const long long token = blockIdx.x;
  const long long head = blockIdx.y;
  const int rank = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;

  // Before the wait: where everything is.
  long long offset = rank * with.rank_stride + head * with.head_stride + token * with.row_stride;
  int* counter = with.expected_generations + head * with.capacity + token;
  const int* count = with.num_valid_pages + token;
  int* output = with.output + token * with.token_stride + head * with.out_head_stride;
  make_ready(offset);
  make_ready(counter);
  make_ready(count);
  make_ready(output);
  if (threadIdx.x < kTop) shared.selected.clear(threadIdx.x);
  wait_for_predecessor();
  release_dependents();

  const int num_valid = load(count);
  const int wanted = FORM == kTagged ? static_cast<int>(static_cast<unsigned>(load(counter)) + 1u) : 0;
  int word = 0;
  bool there = false;
  const bool arrived = take_row(with, offset, wanted, word, there);
  if (lane == 0) shared.states[rank] = arrived ? 0 : there ? kLate : kLate | 1 << rank;
  // Lanes i and i + 16 have the row's candidate i: each compares it with a part of the others.
  const int candidate = rank * kTop + lane % kTop;
  const float score = float_of(from_lane(word, lane % kTop));
  const int id = from_lane(word, kTop + lane % kTop);
  const Key key = ranking_key(score, id, num_valid, static_cast<int>(with.init_blocks),
                              static_cast<int>(with.local_blocks));
  const Key own = numbered(key, candidate);
  if (lane < kTop) shared.keys[candidate] = own;
  meet_cta();

  int state = 0;
#pragma unroll
  for (int i = 0; i < WORLD; ++i) state |= shared.states[i];
  const bool complete = state == 0;
  if constexpr (FORM == kLegacy) {
    if (complete && lane == 0) signal(static_cast<int*>(with.rows) + offset + kReadyWord, 0);
  }
  if (FORM != kPrefill && threadIdx.x == 0) {
    if (!complete) {
      const Failures failures = {with.errors, with.error_words};
      failures.record(with.slot, state & (kLate - 1), token);
    }
    if (FORM == kTagged) store(counter, wanted);
  }

  const int share = lane / kTop;
  Comparison others;
  others.take(shared.keys + share * kShare, own);
  int repeated = (others.better & others.same) != 0;
  repeated |= from_lane_across(repeated, kTop);
  const unsigned best_of_block = lanes_where(!repeated) & ((1u << kTop) - 1);
  if (lane == 0) shared.distinct[rank] = best_of_block;
  meet_cta();
  int larger = number_of_ones(others.better & distinct_of_share(shared.distinct, share));
  larger += from_lane_across(larger, kTop);
  if (complete && own != 0 && !repeated && larger < kTop && lane < kTop) {
    shared.selected.order[larger] = sent_block(own);
  }
  meet_cta();

  if (threadIdx.x >= kWarpSize) return;
  const int place = shared.selected.place(lane % kTop);
  if (lane < kTop) {
    int block = shared.selected.id(lane);
    // A padding token of a prefill window attends to block 0, which always exists.
    if (FORM == kPrefill && num_valid <= 0 && place == 0) block = 0;
    store(output + place, block);
  }
}
