// Matrix products on tensors that are given by address (lpr.model.cpu.tiles), without the interpreter's lock.
#include "amx_products.h"
#include "bindings.h"
#include "low_rank.h"

namespace lpr {

void bind_products(nb::module_& m) {
#ifdef LPR_HAS_TILES
  m.def("can_tile", &can_tile);
  m.def("can_use_amx", &can_use_amx);
  m.def("use_narrow_vectors", [](bool narrow) { is_narrow = narrow; });
  m.def(
      "multiply_tiles",
      [](const GivenWeight& weight, uintptr_t given, uintptr_t out, int64_t rows, bool is_half, int threads) {
        multiply(weight_of(weight).times(given, out, rows, is_half), threads);
      },
      nb::call_guard<nb::gil_scoped_release>());
#endif
  m.def(
      "add_low_rank",
      [](uintptr_t given, uintptr_t out, int64_t rows, int64_t inputs, int64_t outputs, uintptr_t places,
         int64_t num_places, uintptr_t starts, uintptr_t pairs, bool is_half, int threads) {
        auto add = [&](auto* from, auto* to) {
          add_low_rank_rows(from, to, rows, inputs, outputs, reinterpret_cast<const int32_t*>(places), num_places,
                            reinterpret_cast<const int64_t*>(starts), reinterpret_cast<const LowRankPair*>(pairs), threads);
        };
        if (is_half) {
          add(reinterpret_cast<const BFloat*>(given), reinterpret_cast<BFloat*>(out));
        } else {
          add(reinterpret_cast<const float*>(given), reinterpret_cast<float*>(out));
        }
      },
      nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace lpr
