// Section 2 of the contract for one layout: which key a local row of a page is.

constexpr int kHeads = 4;
constexpr int kDim = 128;  // and bytes, of a key or a query

template <int kPage, int kWorld>
struct Shard {
  static constexpr int kRows = kPage / kWorld;
  static constexpr bool kInterleaved = kPage == 128;

  // Position of local row `row` of page column `column`; `rank` is this rank.
  static __device__ __forceinline__ int position(int column, int row, int rank) {
    if constexpr (kInterleaved) return kPage * column + row * kWorld + rank;
    return kPage * column + kRows * rank + row;
  }

  // How many local rows of page column `column` are at positions up to `last`; more than kRows behind the page.
  static __device__ __forceinline__ int rows_up_to(int column, int last, int rank) {
    const int first = position(column, 0, rank);
    constexpr int kStep = kInterleaved ? kWorld : 1;
    return last < first ? 0 : (last - first) / kStep + 1;
  }

  // Local row of the key at `within` of its page, or -1 where another rank holds it.
  static __device__ __forceinline__ int row(int within, int rank) {
    if constexpr (kInterleaved) return within % kWorld == rank ? within / kWorld : -1;
    return within / kRows == rank ? within % kRows : -1;
  }
};
