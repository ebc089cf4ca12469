// A parallel loop in torch's own team of threads.
//
// The OpenMP runtime is reached by the address of GOMP_parallel (lpr/model/threads.py finds it): to link a runtime would
// start a second team, whose waiting threads would spin on the cores of torch's. The extension needs no torch to build.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

namespace lpr {

// libgomp's entry point, which LLVM's and Intel's runtimes export too: run a function on each thread of a team.
using RunTeam = void (*)(void (*)(void*), void*, unsigned, unsigned);
inline std::atomic<RunTeam> run_team{nullptr};

// Calls `work(item, worker)` for items 0..count-1 on up to `num_threads` threads, each of which takes the next item when
// it is done; `worker` is below `num_threads`. Without a team all run here. The first exception that an item throws is
// thrown here when all threads have ended; items that no thread has taken by then are left out.
template <typename Work>
void parallel_for(int64_t count, int num_threads, const Work& work) {
  RunTeam run = run_team.load(std::memory_order_relaxed);
  int64_t workers = run ? std::min<int64_t>(num_threads, count) : 1;
  if (workers < 2) {
    for (int64_t item = 0; item < count; item++) work(item, 0);
    return;
  }
  struct Shared {
    const Work& work;
    int64_t count;
    std::atomic<int64_t> next;
    std::atomic<int> worker;
    std::atomic<bool> has_failed;
    std::exception_ptr failure;
  } shared{work, count, {0}, {0}, {false}, nullptr};
  // The whole team, although a small loop needs less of it: libgomp starts threads anew where the size changes.
  run(
      [](void* given) {
        Shared& loop = *static_cast<Shared*>(given);
        int worker = loop.worker.fetch_add(1, std::memory_order_relaxed);
        try {
          for (int64_t item; (item = loop.next.fetch_add(1, std::memory_order_relaxed)) < loop.count;)
            loop.work(item, worker);
        } catch (...) {  // which must not leave a thread of the team: the process would end
          loop.next.store(loop.count, std::memory_order_relaxed);
          if (!loop.has_failed.exchange(true)) loop.failure = std::current_exception();
        }
      },
      &shared, static_cast<unsigned>(num_threads), 0);
  if (shared.failure) std::rethrow_exception(shared.failure);
}

}  // namespace lpr
