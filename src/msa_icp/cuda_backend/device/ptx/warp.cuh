// What the threads of a warp or a CTA do together.

constexpr int kWarpSize = 32;

__device__ __forceinline__ int from_lane(int value, int lane) {
  return __shfl_sync(0xffffffff, value, lane);
}

__device__ __forceinline__ float from_lane_across(float value, int distance) {
  return __shfl_xor_sync(0xffffffff, value, distance);
}

__device__ __forceinline__ int from_lane_across(int value, int distance) {
  return __shfl_xor_sync(0xffffffff, value, distance);
}

// From the lane that is `distance` before; the own value where there is none.
__device__ __forceinline__ int from_lane_before(int value, int distance) {
  return __shfl_up_sync(0xffffffff, value, distance);
}

__device__ __forceinline__ unsigned smallest_of_warp(unsigned value) {
  return __reduce_min_sync(0xffffffff, value);
}

__device__ __forceinline__ bool true_for_all(bool value) {
  return __all_sync(0xffffffff, value);
}

__device__ __forceinline__ unsigned lanes_where(bool value) {
  return __ballot_sync(0xffffffff, value);
}

__device__ __forceinline__ int number_of_ones(unsigned bits) {
  return __popc(bits);
}

// Which bit is the lowest one of those that are set, of which there is one.
__device__ __forceinline__ int lowest_one(unsigned bits) {
  return __ffs(bits) - 1;
}

// What one thread has read or written before is before what the others read or write after.
__device__ __forceinline__ void meet_warp() {
  __syncwarp();
}

__device__ __forceinline__ void meet_cta() {
  __syncthreads();
}
