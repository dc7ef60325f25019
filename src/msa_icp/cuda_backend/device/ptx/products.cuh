// Matrix products of a warp group, four warps, that run on while the warps do something else.

constexpr int kGroupWarps = 4;

// Where the second factor lies in shared memory: fp16, in cores of 8 columns (16 bytes each, along k) that are 128
// contiguous bytes; `next_k` and `next_columns` bytes lead to the core of the next 8 k and of the next 8 columns.
struct Descriptor {
  unsigned low, high;

  // The same `bytes` further on, a multiple of 16.
  __device__ __forceinline__ Descriptor on(unsigned bytes) const { return {low + (bytes >> 4), high}; }
};

__device__ __forceinline__ Descriptor describe(const unsigned char* cores, unsigned next_k, unsigned next_columns) {
  return {(shared_address(cores) & 0x3ffff) >> 4 | next_k >> 4 << 16, next_columns >> 4};
}

// Before the first product after registers of it were written.
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// sums = (add ? sums : 0) + a * b: a is 64 x 16 in registers, 16 rows a warp, each as `multiply_add` has them; b is 16 x N
// in shared memory, with N / 2 sums a thread; sums[4 i ... 4 i + 3] are what `multiply_add` has for columns 8 i ... 8 i + 7.
// Until `wait_for_products` neither may be touched.
__device__ __forceinline__ void multiply_add_async(float (&sums)[4], const unsigned (&a)[4], Descriptor b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      ".reg .b64 cores;\n"
      "setp.ne.b32 add, %10, 0;\n"
      "mov.b64 cores, {%8, %9};\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {"
      "%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, cores, add, 1, 1, 0;\n"
      "}"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "r"(b.high), "r"(static_cast<int>(add)));
}

__device__ __forceinline__ void multiply_add_async(float (&sums)[8], const unsigned (&a)[4], Descriptor b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      ".reg .b64 cores;\n"
      "setp.ne.b32 add, %14, 0;\n"
      "mov.b64 cores, {%12, %13};\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, cores, add, 1, 1, 0;\n"
      "}"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]),
        "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "r"(b.high), "r"(static_cast<int>(add)));
}

__device__ __forceinline__ void multiply_add_async(float (&sums)[16], const unsigned (&a)[4], Descriptor b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      ".reg .b64 cores;\n"
      "setp.ne.b32 add, %22, 0;\n"
      "mov.b64 cores, {%20, %21};\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, cores, add, 1, 1, 0;\n"
      "}"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]),
        "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]),
        "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),
        "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "r"(b.high), "r"(static_cast<int>(add)));
}

__device__ __forceinline__ void multiply_add_async(float (&sums)[64], const unsigned (&a)[4], Descriptor b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      ".reg .b64 cores;\n"
      "setp.ne.b32 add, %70, 0;\n"
      "mov.b64 cores, {%68, %69};\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, cores, add, 1, 1, 0;\n"
      "}"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]),
        "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]),
        "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),
        "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]),
        "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]),
        "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]),
        "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]),
        "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]),
        "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]),
        "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]),
        "+f"(sums[40]), "+f"(sums[41]), "+f"(sums[42]), "+f"(sums[43]),
        "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]),
        "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]),
        "+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]), "+f"(sums[55]),
        "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]),
        "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "r"(b.high), "r"(static_cast<int>(add)));
}

// What was started since the last call is one batch.
__device__ __forceinline__ void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// The sums are operands so that the compiler reads none before.
__device__ __forceinline__ void wait_for_products(float (&sums)[4]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      :
      : "memory");
}

__device__ __forceinline__ void wait_for_products(float (&sums)[8]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]),
        "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7])
      :
      : "memory");
}

__device__ __forceinline__ void wait_for_products(float (&sums)[16]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]),
        "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]),
        "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),
        "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15])
      :
      : "memory");
}

__device__ __forceinline__ void wait_for_products(float (&sums)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]),
        "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]),
        "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),
        "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]),
        "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]),
        "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]),
        "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]),
        "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]),
        "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]),
        "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]),
        "+f"(sums[40]), "+f"(sums[41]), "+f"(sums[42]), "+f"(sums[43]),
        "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]),
        "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]),
        "+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]), "+f"(sums[55]),
        "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]),
        "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63])
      :
      : "memory");
}
