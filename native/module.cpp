// lpr._native: the step of lpr.core in C++, under the same names and with the same results (lpr/native.py).
#include "bindings.h"

namespace lpr {

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // what lives at the end of the process is no leak
  m.def("set_constants", [](const nb::dict& from) {
#define LPR_READ(type, name) constants.name = nb::cast<type>(from[#name]);
    LPR_CONSTANTS(LPR_READ)
#undef LPR_READ
  });
  bind_drafting(m);
  bind_step(m);
  bind_chains(m);
  bind_rows(m);
  bind_sampling(m);
  bind_attention(m);
  bind_elementwise(m);
  bind_parallel(m);
  bind_paged(m);
  bind_layer(m);
  bind_products(m);
}

}  // namespace lpr
