// Bounded waits and failure words of the exchange (contract, section 6).

#include "ptx/memory.cuh"
#include "ptx/system.cuh"
#include "ptx/warp.cuh"

struct Failures {
  int* words;
  long long count;

  // Polls until `there()` or `spin_limit` polls; whether it was. Where a wait has failed already one poll is all: a step
  // with a dead peer ends in one spin limit. What is there at once costs no look at the failures. With `Together` the
  // lanes of a warp poll together, else the caller is one lane.
  template <bool Together, class There>
  __device__ __forceinline__ bool wait(long long spin_limit, const There& there) const {
    if (there()) return true;
    int limit = peek(words) != 0 ? 1 : static_cast<int>(spin_limit);
    if constexpr (Together) limit = from_lane(limit, 0);
    for (int polls = 1; polls < limit; ++polls) {
      if (there()) return true;
    }
    return false;
  }

  // The first failure also says in which slot set, which ranks (a mask), which token.
  __device__ __forceinline__ void record(long long slot, int missing, long long token) const {
    if (add(words, 1) == 0 && count >= 4) {
      store(words + 1, static_cast<int>(slot) + 1);
      store(words + 2, missing);
      store(words + 3, static_cast<int>(token));
    }
  }
};
