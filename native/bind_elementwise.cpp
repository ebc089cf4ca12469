// Parts of a decoder layer on tensors that are given by address (lpr.model.cpu.elementwise): a torch tensor becomes an
// array of nanobind's in 2 us, which is longer than most of these parts take.
#include "bindings.h"
#include "elementwise.h"

namespace lpr {

void bind_elementwise(nb::module_& m) {
  m.def(
      "rms_norm",
      [](uintptr_t states, uintptr_t added, uintptr_t weight, uintptr_t out, int64_t rows, int64_t groups,
         int64_t width, int64_t stride, int64_t out_stride, float epsilon, int weighing, bool is_half, int threads) {
        Norm norm{states, added,   weight, out, {rows, groups, width}, stride, out_stride,
                  epsilon, static_cast<Weighing>(weighing)};
        run_part(norm, is_half, threads);
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "rotate",
      [](uintptr_t states, uintptr_t cosines, uintptr_t sines, int64_t rows, int64_t heads, int64_t width,
         int64_t stride, bool is_half, int threads) {
        run_part(Rotation{states, cosines, sines, {rows, heads, width}, stride}, is_half, threads);
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "gate",
      [](uintptr_t states, uintptr_t out, int64_t rows, int64_t width, int activation, bool is_half, int threads) {
        run_part(Gate{states, out, {rows, 1, width}, static_cast<Activation>(activation)}, is_half, threads);
      },
      nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace lpr
