// Merge the ranks' candidates into the final Top16 (contract, section 6).
//
// A CTA a (token, owned head), with a warp a rank, WORLD of them: the warp waits for its rank's row and reads it.
// FORM is LEGACY, TAGGED or PREFILL.
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
constexpr int kSharers = kThreads / kCandidates;  // threads a candidate

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

extern "C" __global__ void __launch_bounds__(kThreads) merge_candidates(const __grid_constant__ Arguments with) {
  __shared__ int words[WORLD][kWarpSize];
  __shared__ int missing[WORLD];
  __shared__ bool late[WORLD];
  __shared__ Key keys[kCandidates];
  __shared__ Key distinct[kCandidates];
  __shared__ Key best[kTop];
  wait_for_predecessor();
  release_dependents();

  const long long token = blockIdx.x;
  const long long head = blockIdx.y;
  const int rank = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const long long offset = rank * with.rank_stride + head * with.head_stride + token * with.row_stride;
  int* const counter = with.expected_generations + head * with.capacity + token;
  const int num_valid = load(with.num_valid_pages + token);
  const int wanted = FORM == kTagged ? static_cast<int>(static_cast<unsigned>(load(counter)) + 1u) : 0;
  int word = 0;
  bool there = false;
  const bool arrived = take_row(with, offset, wanted, word, there);
  words[rank][lane] = word;
  if (lane == 0) {
    late[rank] = !arrived;
    missing[rank] = there ? 0 : 1 << rank;
  }
  if (threadIdx.x < kTop) best[threadIdx.x] = 0;
  meet_cta();

  bool complete = true;
#pragma unroll
  for (int i = 0; i < WORLD; ++i) complete = complete && !late[i];
  if constexpr (FORM == kLegacy) {
    if (complete && lane == 0) signal(static_cast<int*>(with.rows) + offset + kReadyWord, 0);
  }
  if (FORM != kPrefill && threadIdx.x == 0) {
    if (!complete) {
      int mask = 0;
#pragma unroll
      for (int i = 0; i < WORLD; ++i) mask |= missing[i];
      const Failures failures = {with.errors, with.error_words};
      failures.record(with.slot, mask, token);
    }
    if (FORM == kTagged) store(counter, wanted);
  }

  // Several threads share a candidate: each compares it with a part of the others.
  const int candidate = threadIdx.x / kSharers;
  const int share = threadIdx.x % kSharers * (kCandidates / kSharers);
  const int* its_row = words[candidate / kTop];
  Key own = 0;
  if (complete) {
    own = ranking_key(float_of(its_row[candidate % kTop]), its_row[kTop + candidate % kTop], num_valid,
                      static_cast<int>(with.init_blocks), static_cast<int>(with.local_blocks));
  }
  keys[candidate] = own;
  meet_cta();
  // A block that several ranks sent keeps its first key, which has its largest score.
  int repeated = 0;
#pragma unroll 8
  for (int i = share; i < share + kCandidates / kSharers; ++i) {
    const bool same = (keys[i] != 0) & (block_of(keys[i]) == block_of(own));
    repeated |= same & ((keys[i] > own) | ((keys[i] == own) & (i < candidate)));
  }
#pragma unroll
  for (int distance = 1; distance < kSharers; distance *= 2) repeated |= from_lane_across(repeated, distance);
  if (repeated) own = 0;
  distinct[candidate] = own;
  meet_cta();
  int larger = larger_keys(distinct + share, kCandidates / kSharers, own);
#pragma unroll
  for (int distance = 1; distance < kSharers; distance *= 2) larger += from_lane_across(larger, distance);
  if (own != 0 && larger < kTop && threadIdx.x % kSharers == 0) best[larger] = own;
  meet_cta();

  if (threadIdx.x < kTop) {
    Placed placed = place_ascending(best, threadIdx.x);
    // A padding token of a prefill window attends to block 0, which always exists.
    if (FORM == kPrefill && num_valid <= 0 && placed.place == 0) placed.id = 0;
    store(with.output + token * with.token_stride + head * with.out_head_stride + placed.place, placed.id);
  }
}
