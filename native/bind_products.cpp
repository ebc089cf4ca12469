// Matrix products on tensors that are given by address (lpr.model.cpu.tiles), without the interpreter's lock.
#include "amx_products.h"
#include "bindings.h"

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
}

}  // namespace lpr
