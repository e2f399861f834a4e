#include "team.h"

#include <cstdlib>
#include <new>

#include "vec.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace transfuse {

namespace {

// About 20 microseconds: longer than a barrier takes on a quiet machine, much shorter than a time slice.
constexpr int kSpins = 1000;

#if defined(__linux__)
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, kMaxThreads, nullptr, nullptr, 0);
}
#else
void sleep_while(std::atomic<uint32_t>&, uint32_t) {}
void wake_all(std::atomic<uint32_t>&) {}
#endif

struct Scratch {
  char* data = nullptr;
  size_t size = 0;
  ~Scratch() { std::free(data); }
};

}  // namespace

void Team::barrier() {
  if (num_threads == 1) return;
  const uint32_t generation = state_.generation.load(std::memory_order_acquire);
  if (state_.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
    state_.arrived.store(0, std::memory_order_relaxed);
    state_.generation.store(generation + 1, std::memory_order_seq_cst);
    if (state_.num_asleep.load(std::memory_order_seq_cst) > 0) wake_all(state_.generation);
    return;
  }
  for (int i = 0; i < kSpins; i++) {
    if (state_.generation.load(std::memory_order_acquire) != generation) return;
    pause();
  }
  state_.num_asleep.fetch_add(1, std::memory_order_seq_cst);
  const int64_t start = clock_ns(CLOCK_MONOTONIC);
  while (state_.generation.load(std::memory_order_seq_cst) == generation) sleep_while(state_.generation, generation);
  asleep_ns_ += clock_ns(CLOCK_MONOTONIC) - start;
  state_.num_asleep.fetch_sub(1, std::memory_order_relaxed);
}

char* Team::scratch(size_t bytes) {
  static thread_local Scratch kept;
  if (bytes > kept.size) {
    std::free(kept.data);
    kept.size = (bytes + 4095) / 4096 * 4096;
    kept.data = static_cast<char*>(std::aligned_alloc(64, kept.size));
    if (kept.data == nullptr) throw std::bad_alloc();
  }
  return kept.data;
}

}  // namespace transfuse
