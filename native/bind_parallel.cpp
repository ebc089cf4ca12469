// The team of threads that native loops run in (lpr.model.threads).
#include "bindings.h"
#include "parallel.h"

namespace lpr {

void bind_parallel(nb::module_& m) {
  m.def(
      "use_team", [](uintptr_t address) { run_team = reinterpret_cast<RunTeam>(address); }, "gomp_parallel"_a);
  m.def(
      "share_of_workers",
      [](int64_t count, int num_threads) {
        std::vector<int64_t> items(std::max(num_threads, 1));
        parallel_for(count, num_threads, [&](int64_t, int worker) { items[worker]++; });
        return items;
      },
      "count"_a, "num_threads"_a, "Items of an empty loop that each worker took.", nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace lpr
