// Stands in for device/ptx/warp.cuh.

constexpr int kWarpSize = 32;

inline int from_lane(int value, int lane) { return emulator::gather("a shuffle from a lane", value).of[lane]; }

inline float from_lane_across(float value, int distance) {
  return emulator::gather("a shuffle across", value).of[emulator::lane() ^ distance];
}

inline int from_lane_across(int value, int distance) {
  return emulator::gather("a shuffle across", value).of[emulator::lane() ^ distance];
}

inline int from_lane_before(int value, int distance) {
  const int lane = emulator::lane();
  return emulator::gather("a shuffle from before", value).of[lane < distance ? lane : lane - distance];
}

inline unsigned smallest_of_warp(unsigned value) {
  for (const unsigned other : emulator::gather("a smallest value", value).of) value = other < value ? other : value;
  return value;
}

inline bool true_for_all(bool value) {
  const auto all = emulator::gather("a vote", value);
  for (const bool one : all.of) {
    if (!one) return false;
  }
  return true;
}

inline unsigned lanes_where(bool value) {
  const auto all = emulator::gather("a ballot", value);
  unsigned bits = 0;
  for (int i = 0; i < kWarpSize; ++i) bits |= static_cast<unsigned>(all.of[i]) << i;
  return bits;
}

inline int number_of_ones(unsigned bits) { return __builtin_popcount(bits); }

inline int lowest_one(unsigned bits) { return __builtin_ctz(bits); }

inline void meet_warp() { emulator::gather("a warp barrier", 0); }

inline void meet_cta() { emulator::meet_cta(); }
