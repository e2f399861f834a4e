// The threads of one parallel region: how they share work and wait for one another.
#pragma once

#include <time.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace transfuse {

constexpr int kMaxThreads = 256;

// Of this clock of the system (CLOCK_MONOTONIC, CLOCK_THREAD_CPUTIME_ID).
inline int64_t clock_ns(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// What the threads of a region have in common. One region runs at a time.
struct TeamState {
  static constexpr int kSlots = 4;
  struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
  };
  Counter counter[kSlots][kMaxThreads];
  alignas(64) std::atomic<int32_t> arrived{0};
  alignas(64) std::atomic<uint32_t> generation{0};
  std::atomic<int32_t> num_asleep{0};
  std::atomic<int32_t> error{0};
  // How often a thread has lost its core to another process for long, in a region.
  std::atomic<int64_t> lost_cores{0};
};

// One thread's part in a region.
class Team {
 public:
  Team(TeamState& state, int thread, int num_threads) : thread(thread), num_threads(num_threads), state_(state) {}

  const int thread;
  const int num_threads;

  // Waits until every thread is here. Spins briefly, then sleeps, so that a thread that another process has put off its
  // core can come to a free one.
  void barrier();

  // Calls f(i) once for each i in [0, n), on any thread, then waits for all. A thread begins with a range of its own,
  // the same at every call, so that what it reads again lies in its caches; who is done helps the others.
  template <class F>
  void for_each(int64_t n, F&& f) {
    const int slot = phase_ % TeamState::kSlots;
    // Nobody is two phases ahead or behind, so this slot is free to be made ready.
    state_.counter[(phase_ + 2) % TeamState::kSlots][thread].next.store(0, std::memory_order_relaxed);
    phase_++;
    for (int i = 0; i < num_threads; i++) {
      const int64_t owner = (thread + i) % num_threads;
      const int64_t begin = n * owner / num_threads, end = n * (owner + 1) / num_threads;
      auto& next = state_.counter[slot][owner].next;
      for (;;) {
        const int64_t item = begin + next.fetch_add(1, std::memory_order_relaxed);
        if (item >= end) break;
        f(item);
      }
    }
    barrier();
  }

  // Memory of this thread alone, 64-byte aligned, kept until the process ends; each call may move it.
  char* scratch(size_t bytes);

  // Nanoseconds that this thread has slept in barriers.
  int64_t asleep_ns() const { return asleep_ns_; }

  // Remembers that an op met what it cannot compute; the program's run returns the code.
  void fail(int32_t code) { state_.error.store(code, std::memory_order_relaxed); }

 private:
  TeamState& state_;
  int64_t phase_ = 0;
  int64_t asleep_ns_ = 0;
};

}  // namespace transfuse
