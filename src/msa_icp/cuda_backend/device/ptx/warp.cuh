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

__device__ __forceinline__ bool true_for_all(bool value) {
  return __all_sync(0xffffffff, value);
}

__device__ __forceinline__ unsigned lanes_where(bool value) {
  return __ballot_sync(0xffffffff, value);
}

__device__ __forceinline__ int number_of_ones(unsigned bits) {
  return __popc(bits);
}

// What one thread has read or written before is before what the others read or write after.
__device__ __forceinline__ void meet_warp() {
  __syncwarp();
}

__device__ __forceinline__ void meet_cta() {
  __syncthreads();
}
