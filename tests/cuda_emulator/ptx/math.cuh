// Stands in for device/ptx/math.cuh.

#include <cmath>
#include <limits>

inline unsigned short e4m3_to_fp16(unsigned char value) {
  const unsigned sign = (value & 0x80u) << 8;
  const unsigned magnitude = value & 0x7fu;
  if (magnitude == 0x7f) return static_cast<unsigned short>(sign | 0x7fff);
  if (magnitude >= 8) return static_cast<unsigned short>(sign | ((magnitude << 7) + (8u << 10)));
  // Subnormal: `magnitude` times 2**-9, normal as fp16.
  static const unsigned short small[8] = {0, 0x1800, 0x1c00, 0x1e00, 0x2000, 0x2100, 0x2200, 0x2300};
  return static_cast<unsigned short>(sign | small[magnitude]);
}

inline void e4m3x4_to_fp16x4(unsigned bytes, unsigned& low, unsigned& high) {
  const auto half = [&](int i) { return static_cast<unsigned>(e4m3_to_fp16(bytes >> 8 * i & 0xff)); };
  low = half(0) | half(1) << 16;
  high = half(2) | half(3) << 16;
}

inline float half_of(unsigned pair, int which) {
  const unsigned half = which ? pair >> 16 : pair & 0xffff;
  const float sign = half & 0x8000 ? -1.0f : 1.0f;
  const int exponent = half >> 10 & 31;
  const float fraction = half & 1023;
  if (exponent == 31) return fraction ? std::numeric_limits<float>::quiet_NaN() : sign * INFINITY;
  return exponent ? sign * std::ldexp(1024.0f + fraction, exponent - 25) : sign * std::ldexp(fraction, -24);
}

inline void multiply_add(float* sums, const unsigned (&a)[4], const unsigned (&b)[2]) {
  struct Registers {
    unsigned a[4], b[2];
  } mine;
  std::memcpy(mine.a, a, sizeof(a));
  std::memcpy(mine.b, b, sizeof(b));
  const auto all = emulator::gather("a matrix product", mine);
  const int row = emulator::lane() / 4, column = emulator::lane() % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    double sum = sums[i];
    for (int k = 0; k < 16; ++k) {
      const int holder = k % 8 / 2, upper = k / 8;
      const unsigned left = all.of[row * 4 + holder].a[i / 2 + 2 * upper];
      const unsigned right = all.of[(column + i % 2) * 4 + holder].b[upper];
      sum += static_cast<double>(half_of(left, k % 2)) * half_of(right, k % 2);
    }
    sums[i] = static_cast<float>(sum);
  }
}

// A NaN of either kind is none; fmax takes only quiet ones so.
inline float larger(float a, float b) { return a != a ? b : b != b ? a : std::fmax(a, b); }

inline unsigned long long upper_product(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}

inline float minus_infinity() { return -INFINITY; }

inline int bits_of(float value) {
  int bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_of(int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
