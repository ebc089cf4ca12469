// Matrix products on tensors that are given by address (lpr.model.cpu.tiles), without the interpreter's lock.
#include "amx_products.h"
#include "bindings.h"

namespace lpr {

void bind_products(nb::module_& m) {
#ifdef LPR_HAS_TILES
  m.def("can_tile", &can_tile);
  m.def("can_use_amx", &can_use_amx);
  m.def(
      "multiply_tiles",
      [](uintptr_t packed, uintptr_t bias, uintptr_t given, uintptr_t out, int64_t rows, int64_t outputs,
         int64_t inputs, bool has_half_weights, bool has_half_rows, int threads) {
        Product product{reinterpret_cast<const char*>(packed), reinterpret_cast<const float*>(bias),
                        reinterpret_cast<const char*>(given), reinterpret_cast<char*>(out), rows, outputs, inputs,
                        has_half_weights, has_half_rows};
        multiply(product, threads);
      },
      nb::call_guard<nb::gil_scoped_release>());
#endif
}

}  // namespace lpr
