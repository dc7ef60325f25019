// Bounded waits and failure words of the exchange (contract, section 6).

#include "ptx/memory.cuh"
#include "ptx/system.cuh"

struct Failures {
  int* words;
  long long count;

  // One where a wait has failed already: a step with a dead peer ends in one spin limit.
  __device__ __forceinline__ long long polls_allowed(long long spin_limit) const {
    return add(words, 0) != 0 ? 1 : spin_limit;
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
