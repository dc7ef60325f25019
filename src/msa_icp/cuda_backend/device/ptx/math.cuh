// Numbers: e4m3 to fp16, matrix products with FP32 sums, maxima.

// Four e4m3 values, the low byte first, as two pairs of fp16 values. Exact for all 256 bytes; NaN stays NaN.
__device__ __forceinline__ void e4m3x4_to_fp16x4(unsigned bytes, unsigned& low, unsigned& high) {
  // Taken apart in here the upper half costs no shift.
  asm("{\n"
      ".reg .b16 first, second;\n"
      "mov.b32 {first, second}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\n"
      "cvt.rn.f16x2.e4m3x2 %1, second;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(bytes));
}

// sums += a * b: a is 16 x 16, b is 16 x 8, the four sums are 16 x 8. With g = lane / 4 and t = lane % 4 a lane holds
//   a[0], a[1]: rows g and g + 8, k = 2 t and 2 t + 1;  a[2], a[3]: the same rows, k = 2 t + 8 and 2 t + 9
//   b[0], b[1]: column g, k = 2 t and 2 t + 1, k = 2 t + 8 and 2 t + 9
//   sums[0], sums[1]: row g, columns 2 t and 2 t + 1;   sums[2], sums[3]: row g + 8, the same columns
__device__ __forceinline__ void multiply_add(float* sums, const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The larger one, or the one that is a number.
__device__ __forceinline__ float larger(float a, float b) {
  float result;
  asm("max.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// The upper 64 bits of a product.
__device__ __forceinline__ unsigned long long upper_product(unsigned long long a, unsigned long long b) {
  return __umul64hi(a, b);
}

__device__ __forceinline__ float minus_infinity() {
  return __int_as_float(0xff800000);
}

__device__ __forceinline__ int bits_of(float value) {
  return __float_as_int(value);
}

__device__ __forceinline__ float float_of(int bits) {
  return __int_as_float(bits);
}
