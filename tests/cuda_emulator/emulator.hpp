// Runs a CUDA kernel of this project on a CPU, one CTA after another, so that its index arithmetic, masks and
// synchronization can be tested where there is no GPU. Timing, memory order and the matrix unit's rounding are
// not modelled; the headers of `ptx/` here stand in for those of `device/ptx/`.
//
// A thread is a fiber of the calling thread, so callers in several threads, as ranks, do not share anything. It runs
// until it meets others (a shuffle, a matrix product, a barrier), then the next
// one runs. What a real launch would hang on, or leave undefined, ends the run with a message: threads that meet
// in different places, a wait for a copy that nobody started, a copy that nobody waited for, a thread that ends
// without having waited for the predecessor.
#pragma once

#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <string>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static thread_local
#define __grid_constant__
#define __launch_bounds__(...)

struct Index {
  unsigned x, y, z;
};
static thread_local Index threadIdx, blockIdx, gridDim, blockDim;

namespace emulator {

constexpr int kLanes = 32;
constexpr int kMostThreads = 1024;
constexpr std::size_t kStack = 64 * 1024;

struct Failure {
  std::string what;
};

struct Fiber {
  ucontext_t start;
  jmp_buf here;
  bool started, ended, waited;
  std::vector<char> stack;
};

// Threads that meet: the last one to arrive lets all go on. Two generations of slots, because a thread may reach
// the next meeting while another still reads the slots of this one.
struct Meeting {
  const char* what;
  unsigned arrived, generation;
  unsigned char slot[2][kLanes][64];
};

struct Late {
  unsigned char *at, *after;
  std::size_t bytes;
};

static thread_local Fiber fibers[kMostThreads];
static thread_local unsigned threads, current;
static thread_local unsigned long long progress, cta_number;
static thread_local jmp_buf scheduler;
static thread_local Meeting warps[kMostThreads / kLanes], cta, predecessor;
static thread_local void (*body)(const void*);
static thread_local const void* arguments;
static thread_local std::string failure;
static thread_local std::vector<Late> late;  // memory that the predecessor writes last
static thread_local bool dependent;
static thread_local int copies_in_flight;
static thread_local const void* watched;  // a word whose polls are counted
static thread_local unsigned long long polls;

[[noreturn]] inline void fail(const std::string& what) {
  if (failure.empty()) failure = "thread " + std::to_string(current) + ": " + what;
  _longjmp(scheduler, 2);
}

inline void yield() {
  if (_setjmp(fibers[current].here) == 0) _longjmp(scheduler, 1);
}

inline unsigned lane() { return current % kLanes; }

inline unsigned meet(Meeting& meeting, const char* what, unsigned count) {
  if (meeting.arrived == 0) meeting.what = what;
  if (std::strcmp(meeting.what, what) != 0) fail(std::string("at ") + what + " where others are at " + meeting.what);
  const unsigned generation = meeting.generation;
  ++progress;
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    ++meeting.generation;
  }
  while (meeting.generation == generation) yield();
  return generation % 2;
}

// What every lane of the warp brings to a meeting.
template <class T>
struct Gathered {
  T of[kLanes];
};

template <class T>
inline Gathered<T> gather(const char* what, const T& mine) {
  static_assert(sizeof(T) <= 64);
  Meeting& warp = warps[current / kLanes];
  std::memcpy(warp.slot[warp.generation % 2][lane()], &mine, sizeof(T));
  const unsigned slots = meet(warp, what, kLanes);
  Gathered<T> all;
  for (int i = 0; i < kLanes; ++i) std::memcpy(&all.of[i], warp.slot[slots][i], sizeof(T));
  return all;
}

inline void meet_cta() { meet(cta, "a CTA barrier", threads); }

// All threads wait here together, so everything that comes before has seen the memory as it was before the
// predecessor's last writes.
inline void wait_for_predecessor() {
  fibers[current].waited = true;
  if (!dependent) return;
  const unsigned generation = predecessor.generation;
  if (generation != 0) return;
  if (predecessor.arrived + 1 == threads) {
    for (const Late& part : late) std::memcpy(part.at, part.after, part.bytes);
  }
  meet(predecessor, "the wait for the predecessor", threads);
}

static void run_fiber() {
  body(arguments);
  if (!fibers[current].waited) fail("ended without waiting for the predecessor");
  fibers[current].ended = true;
  ++progress;
  _longjmp(scheduler, 1);
}

inline void run_cta() {
  ++cta_number;
  cta.arrived = predecessor.arrived = predecessor.generation = 0;
  copies_in_flight = 0;
  for (Meeting& warp : warps) warp.arrived = 0;
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.started = fiber.ended = fiber.waited = false;
    fiber.stack.resize(kStack);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.data();
    fiber.start.uc_stack.ss_size = kStack;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, run_fiber, 0);
  }
  static thread_local std::vector<unsigned char> before;
  before.clear();
  for (const Late& part : late) {
    if (dependent) before.insert(before.end(), part.at, part.at + part.bytes);
  }
  unsigned alive = threads;
  while (alive > 0) {
    const unsigned long long seen = progress;
    for (current = 0; current < threads; ++current) {
      Fiber& fiber = fibers[current];
      if (fiber.ended) continue;
      threadIdx = {current, 0, 0};
      const int from = _setjmp(scheduler);
      if (from == 0) {
        if (fiber.started) _longjmp(fiber.here, 1);
        fiber.started = true;
        setcontext(&fiber.start);
      }
      if (from == 2) return;
      if (fibers[current].ended) --alive;
    }
    if (progress == seen && alive > 0) {
      failure = "nothing goes on: ";
      for (unsigned i = 0; i < threads && failure.size() < 200; ++i) {
        if (!fibers[i].ended) failure += std::to_string(i) + " ";
      }
      failure += "wait";
      return;
    }
  }
  if (copies_in_flight != 0) failure = "a copy that nobody waited for";
  std::size_t at = 0;
  for (const Late& part : late) {  // the next CTA finds the memory as this one did
    if (dependent) {
      std::memcpy(part.at, before.data() + at, part.bytes);
      at += part.bytes;
    }
  }
}

}  // namespace emulator

// Memory that a dependent launch may find as it is until it has waited for its predecessor; afterwards it holds
// what is at `after`.
extern "C" void emulate_late(unsigned char* at, unsigned char* after, unsigned long long bytes) {
  emulator::late.push_back({at, after, bytes});
}

extern "C" void emulate_nothing_late() { emulator::late.clear(); }

// From now on polls of this word are counted; how many there have been of the one before.
extern "C" unsigned long long emulate_watched(const void* word) {
  const unsigned long long before = emulator::polls;
  emulator::watched = word;
  emulator::polls = 0;
  return before;
}

// The message of a failure, or null.
extern "C" const char* emulate(const unsigned* grid, unsigned threads, bool dependent, const void* arguments);
