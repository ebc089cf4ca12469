// Parts of a decoder layer on tensors that are given by address (lpr.model.cpu.elementwise): a torch tensor becomes an
// array of nanobind's in 2 us, which is longer than most of these parts take.
#include "bindings.h"
#include "elementwise.h"
#include "recurrence.h"

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
  m.def("walk_linear", [](uintptr_t query, uintptr_t key, uintptr_t value, uintptr_t decay, uintptr_t beta,
                          const Array& parents, uintptr_t state, uintptr_t out, int64_t heads, int64_t keys,
                          int64_t values, bool per_channel, int threads) {
    auto floats = [](uintptr_t at) { return reinterpret_cast<const float*>(at); };
    const int32_t* order = parents.data();
    LinearInputs in{floats(query), floats(key), floats(value), floats(decay), floats(beta),
                    static_cast<int64_t>(parents.size()), heads, keys, values, per_channel};
    nb::gil_scoped_release released;
    walk_linear(in, order, reinterpret_cast<float*>(state), reinterpret_cast<float*>(out), threads);
  });
}

}  // namespace lpr
