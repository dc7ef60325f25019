// Store new keys into this rank's rows of the shard; those of other ranks, and those without a place, are skipped.
//
// Eight threads a key, 16 bytes each. PAGE and WORLD are the layout's.
//
// Launch: CTAs (keys / kCtaKeys), kThreads threads.

#include "device/ptx/launch.cuh"
#include "device/ptx/memory.cuh"
#include "device/shard.cuh"

constexpr int kThreads = 256;
constexpr int kKeyThreads = kDim / sizeof(Words);
constexpr int kCtaKeys = kThreads / kKeyThreads;

struct Arguments {
  const unsigned char* keys;
  const int* positions;
  const int* request_index;
  const int* block_table;
  unsigned char* index_k;
  long long count;
  long long requests;
  long long table_columns;
  long long table_stride;
  long long pages;
  long long page_pitch;
  long long rank;
};

extern "C" __global__ void __launch_bounds__(kThreads) write_index_keys(const __grid_constant__ Arguments with) {
  wait_for_predecessor();
  using Layout = Shard<PAGE, WORLD>;
  const long long key = static_cast<long long>(blockIdx.x) * kCtaKeys + threadIdx.x / kKeyThreads;
  if (key >= with.count) return;
  const int position = load(with.positions + key);
  const long long request = load(with.request_index + key);
  const int row = position >= 0 ? Layout::row(position % PAGE, static_cast<int>(with.rank)) : -1;
  const int column = position / PAGE;
  if (row < 0 || column >= with.table_columns || request < 0 || request >= with.requests) return;
  const int page = load(with.block_table + request * with.table_stride + column);
  if (page < 0 || page >= with.pages) return;
  const int part = threadIdx.x % kKeyThreads * sizeof(Words);
  const unsigned char* from = with.keys + key * kDim + part;
  unsigned char* to = with.index_k + page * with.page_pitch + row * kDim + part;
  store(reinterpret_cast<Words*>(to), load(reinterpret_cast<const Words*>(from)));
}
