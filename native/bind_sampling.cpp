// Choosing tokens on a CPU (lpr.model.sampling.in_cpp): rows of logits in, ids out, without the interpreter's lock.
#include "bindings.h"
#include "sampling.h"

namespace lpr {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Chosen = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Writes the token of every row, NONE or DOUBT; `logits` have neighbouring elements in the last axis.
void choose_rows(const Logits& logits, const Column<float>& temperature, const Column<uint32_t>& keys,
                 const Column<int64_t>& top_k, const Column<float>& top_p, const Column<float>& min_p,
                 uint32_t first_token, Chosen chosen) {
  Scores scores;
  for (size_t row = 0; row < logits.shape(0); row++) {
    Chooser choice{temperature.data()[row], top_p.data()[row], min_p.data()[row],
                   keys.data()[row],        top_k.data()[row], first_token};
    const float* at = logits.data() + static_cast<int64_t>(row) * logits.stride(0);
    chosen.data()[row] = choose_row(at, static_cast<int64_t>(logits.shape(1)), choice, scores);
  }
}

void bind_sampling(nb::module_& m) {
  m.def("choose_rows", &choose_rows, "logits"_a, "temperature"_a, "keys"_a, "top_k"_a, "top_p"_a, "min_p"_a,
        "first_token"_a, "chosen"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace lpr
