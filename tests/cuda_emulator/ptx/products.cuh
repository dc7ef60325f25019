// Stands in for device/ptx/products.cuh. A product is computed when it is waited for: what is overwritten before that
// is seen.

constexpr int kGroupWarps = 4;

struct Descriptor {
  const unsigned char* cores;
  unsigned next_k, next_columns;

  Descriptor on(unsigned bytes) const { return {cores + bytes, next_k, next_columns}; }
};

inline Descriptor describe(const unsigned char* cores, unsigned next_k, unsigned next_columns) {
  return {cores, next_k, next_columns};
}

struct Product {
  float* sums;
  unsigned a[4];
  Descriptor b;
  bool add;
};

inline std::vector<Product>& products_in_flight() {
  static thread_local std::vector<Product> of_thread[emulator::kMostThreads];
  return of_thread[emulator::current];
}

// All four warps of a group must be here.
inline void meet_group(const char* what) {
  static thread_local emulator::Meeting groups[emulator::kMostThreads / (kGroupWarps * 32)];
  emulator::meet(groups[emulator::current / (kGroupWarps * 32)], what, kGroupWarps * 32);
}

inline void begin_products() { meet_group("the begin of products"); }

template <int kSums>
inline void multiply_add_async(float (&sums)[kSums], const unsigned (&a)[4], Descriptor b, bool add) {
  products_in_flight().push_back({sums, {a[0], a[1], a[2], a[3]}, b, add});
}

inline void end_products() { meet_group("the end of products"); }

template <int kSums>
inline void wait_for_products(float (&sums)[kSums]) {
  meet_group("the wait for products");
  for (const Product& product : products_in_flight()) {
    struct Registers {
      unsigned a[4];
    } mine;
    std::memcpy(mine.a, product.a, sizeof(mine.a));
    const auto all = emulator::gather("a group's product", mine);
    const int row = emulator::lane() / 4, column = emulator::lane() % 4 * 2;
    for (int i = 0; i < kSums; ++i) {
      const int n = i / 4 * 8 + column + i % 2;
      double sum = product.add ? product.sums[i] : 0.0;
      for (int k = 0; k < 16; ++k) {
        const unsigned left = all.of[row * 4 + k % 8 / 2].a[i / 2 % 2 + 2 * (k / 8)];
        const unsigned char* right =
            product.b.cores + k / 8 * product.b.next_k + n / 8 * product.b.next_columns + n % 8 * 16 + k % 8 * 2;
        unsigned short bits;
        std::memcpy(&bits, right, sizeof(bits));
        sum += static_cast<double>(half_of(left, k % 2)) * half_of(bits, 0);
      }
      product.sums[i] = static_cast<float>(sum);
    }
  }
  products_in_flight().clear();
}
