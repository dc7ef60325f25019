// Scores pieces with the queries in shared memory, the four warps of a CTA as one warp group.
//
// More query rows than one matrix instruction takes would fill the registers as fragments; a warp group's products read
// them from shared memory.

#include "decode_score.cuh"
#include "ptx/products.cuh"

template <int kGroups>
struct GroupScorer {
  static constexpr bool kTogether = true;  // whether all warps must be there

  // For each step of 16 k two planes of 8 k, each a core of 8 rows a group.
  static constexpr int kCoreBytes = 128;
  static constexpr int kPlaneBytes = kGroups * kCoreBytes;
  static constexpr int kStepBytes = 2 * kPlaneBytes;

  const unsigned char* cores;
  const unsigned char* row;  // the lane's, of the group that its warp sees to; null where there is none

  // Before the predecessor has ended, and after.
  __device__ __forceinline__ void prepare(const Arguments& with, long long request, int lane) {
    static_assert(kGroups <= kWarps);
    const int rows = kHeads * static_cast<int>(with.query_len);
    const int own = threadIdx.x / kWarpSize * kGroup + lane / 4;
    row = own < rows ? with.index_q + (request * rows + own) * kDim + lane % 4 * 16 : nullptr;
    make_ready(row);
  }

  __device__ __forceinline__ void take() {
    alignas(128) __shared__ unsigned char queries[kSteps * kStepBytes];
    const int group = threadIdx.x / kWarpSize;
    if (group < kGroups) {
      QueryFragment fragment;
      fragment.take(row);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        unsigned char* to = queries + step * kStepBytes + group * kCoreBytes + threadIdx.x % kWarpSize * 4;
        store_shared(to, fragment.share[step][0]);
        store_shared(to + kPlaneBytes, fragment.share[step][1]);
      }
      publish_shared();
    }
    meet_cta();
    cores = queries;
  }

  __device__ __forceinline__ void add(Best<kGroups>& best, const unsigned char* keys, const Sight& sight, int lane) const {
#pragma unroll
    for (int rows = 0; rows < kPieceRows; rows += 16) {
      KeyFragment fragment;
      fragment.take(keys + rows * kDim, lane);
      unsigned a[kSteps][4];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) fragment.share(step, a[step]);
      float sums[4 * kGroups];
      begin_products();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        multiply_add_async(sums, a[step], describe(cores + step * kStepBytes, kPlaneBytes, kCoreBytes), step > 0);
      }
      end_products();
      wait_for_products(sums);
      best.add(sums, rows, sight, lane);
    }
  }
};
