// Replays a program: fills in the sizes of this step, then runs its ops one after the other in one parallel region.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#include "kernels.h"
#include "op.h"
#include "team.h"

// Torch's OpenMP library, which is loaded before this one, has the pool of threads; every OpenMP library on Linux knows
// these names. Without pragmas no compiler asks for a library, and so for a second pool, of its own.
extern "C" void GOMP_parallel(void (*run)(void*), void* data, unsigned num_threads, unsigned flags);
extern "C" int omp_get_thread_num();
extern "C" int omp_get_num_threads();

namespace transfuse {

namespace {

constexpr int kNumSymbols = 5;  // 1, T tokens, S logit rows, R requests, B blocks in a row of the block table

// A view whose sizes are indices into the program's table of expressions.
struct ViewDesc {
  int32_t buffer;  // -1: absent
  int32_t dtype;
  int32_t dims;
  int32_t offset;
  int32_t size[kMaxDims];
  int32_t stride[kMaxDims];
};

struct OpDesc {
  int32_t kind;
  int32_t num_tensors;
  ViewDesc view[kMaxTensors];
  int64_t ints[kMaxInts];
  double floats[kMaxFloats];
};

// symbol values times these give a size
struct Expression {
  int64_t factor[kNumSymbols];
};

struct Program {
  std::vector<OpDesc> descs;
  std::vector<Expression> expressions;
  std::vector<int64_t> values;
  std::vector<char*> buffers;
  std::vector<Op> ops;
  int64_t symbols[kNumSymbols] = {};
};

void resolve(Program& program, const int64_t* symbols, char* const* buffers) {
  const bool same = !program.ops.empty() && std::equal(symbols, symbols + kNumSymbols, program.symbols) &&
                    std::equal(program.buffers.begin(), program.buffers.end(), buffers);
  if (same) return;
  std::copy(symbols, symbols + kNumSymbols, program.symbols);
  std::copy(buffers, buffers + program.buffers.size(), program.buffers.begin());
  for (size_t i = 0; i < program.expressions.size(); i++) {
    int64_t value = 0;
    for (int s = 0; s < kNumSymbols; s++) value += program.expressions[i].factor[s] * symbols[s];
    program.values[i] = value;
  }
  program.ops.resize(program.descs.size());
  for (size_t i = 0; i < program.descs.size(); i++) {
    const OpDesc& desc = program.descs[i];
    Op& op = program.ops[i];
    op.kind = desc.kind;
    op.num_tensors = desc.num_tensors;
    std::copy(desc.ints, desc.ints + kMaxInts, op.ints);
    std::copy(desc.floats, desc.floats + kMaxFloats, op.floats);
    for (int t = 0; t < kMaxTensors; t++) {
      const ViewDesc& view = desc.view[t];
      Tensor& tensor = op.tensor[t];
      tensor = Tensor{};
      if (t >= desc.num_tensors || view.buffer < 0) continue;
      tensor.dtype = view.dtype;
      tensor.dims = view.dims;
      const int64_t offset = program.values[view.offset] * static_cast<int64_t>(item_size(view.dtype));
      tensor.data = program.buffers[view.buffer] + offset;
      for (int d = 0; d < view.dims; d++) {
        tensor.size[d] = program.values[view.size[d]];
        tensor.stride[d] = program.values[view.stride[d]];
      }
    }
  }
}

int64_t now_ns() { return clock_ns(CLOCK_MONOTONIC); }

// A thread that neither computed nor slept for this long, and for this share of a region, did not have its core: shorter
// than a time slice, and less than what is left of a core beside one other process. A virtual machine's host takes some
// thousandths of any long region, which is no reason to do with fewer threads.
constexpr int64_t kLostNs = 500 * 1000;
constexpr int64_t kLostShare = 8;

std::mutex region_mutex;
TeamState team_state;
int64_t executions[256] = {};

// What one call of transfuse_program_run is about.
struct Region {
  const Program& program;
  int64_t first;
  int64_t last;
  volatile uint64_t* progress;
  int64_t* times;
};

// One thread's part in it.
void run_region(void* data) {
  const Region& region = *static_cast<const Region*>(data);
  Team team(team_state, omp_get_thread_num(), omp_get_num_threads());
  const int64_t start = now_ns(), start_computed = clock_ns(CLOCK_THREAD_CPUTIME_ID);
  for (int64_t i = region.first; i < region.last; i++) {
    if (region.times != nullptr && team.thread == 0) region.times[i - region.first] = now_ns();
    const Op& op = region.program.ops[i];
    kernels[op.kind].run(op, team);
    if (team.thread == 0) {
      executions[op.kind]++;
      if (region.progress != nullptr) *region.progress = *region.progress + 1;
    }
  }
  const int64_t passed = now_ns() - start, computed = clock_ns(CLOCK_THREAD_CPUTIME_ID) - start_computed;
  const int64_t lost = passed - computed - team.asleep_ns();
  if (lost > kLostNs && lost * kLostShare > passed) team_state.lost_cores.fetch_add(1);
}

}  // namespace

}  // namespace transfuse

using namespace transfuse;

#define TF_EXPORT extern "C" __attribute__((visibility("default")))

// Number of a kernel, or -1 where this build has none of that name.
TF_EXPORT int32_t transfuse_kernel(const char* name) {
  for (int i = 0; i < num_kernels; i++)
    if (std::strcmp(kernels[i].name, name) == 0) return i;
  return -1;
}

TF_EXPORT int64_t transfuse_executions(int32_t kind) { return executions[kind]; }

TF_EXPORT void* transfuse_program_create(const void* descs, int64_t num_ops, const int64_t* expressions,
                                         int64_t num_expressions, int64_t num_buffers) try {
  auto* program = new Program;
  const auto* first = static_cast<const OpDesc*>(descs);
  program->descs.assign(first, first + num_ops);
  const auto* first_expression = reinterpret_cast<const Expression*>(expressions);
  program->expressions.assign(first_expression, first_expression + num_expressions);
  program->values.resize(num_expressions);
  program->buffers.resize(num_buffers);
  return program;
} catch (const std::bad_alloc&) {
  return nullptr;
}

TF_EXPORT void transfuse_program_destroy(void* handle) { delete static_cast<Program*>(handle); }

// Runs ops [first, last). `progress`, if given, is counted up after each op. `times`, if given, gets the start of each
// op and the end of the last, in nanoseconds of the monotonic clock. Returns 0, or what an op said went wrong.
TF_EXPORT int32_t transfuse_program_run(void* handle, int64_t first, int64_t last, const int64_t* symbols,
                                        char* const* buffers, int32_t num_threads, volatile uint64_t* progress,
                                        int64_t* times) {
  const std::lock_guard<std::mutex> one_at_a_time(region_mutex);
  Program& program = *static_cast<Program*>(handle);
  resolve(program, symbols, buffers);
  team_state.error.store(0);
  num_threads = std::min<int32_t>(num_threads, kMaxThreads);
  for (auto& slot : team_state.counter)
    for (int i = 0; i < num_threads; i++) slot[i].next.store(0, std::memory_order_relaxed);
  Region region{program, first, last, progress, times};
  GOMP_parallel(run_region, &region, num_threads, 0);
  if (times != nullptr) times[last - first] = now_ns();
  return team_state.error.load();
}

// How often a thread has lost its core to another process for long, since the library was loaded.
TF_EXPORT int64_t transfuse_lost_cores() { return team_state.lost_cores.load(); }

// Sizes that the caller's descriptors must agree with.
TF_EXPORT int64_t transfuse_descriptor_bytes() { return sizeof(OpDesc); }
