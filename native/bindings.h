// What the bindings share: nanobind's casters, and how Python's objects become arguments.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "rows.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace lpr {

using Array = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The entries of `config`, a TreeSizes, by name.
inline int64_t size_of(const nb::object& config, const char* name) { return nb::cast<int64_t>(config.attr(name)); }

inline Sizes sizes_of(const nb::object& config) {
  return {size_of(config, "window_size"),    size_of(config, "ngram_size"),    size_of(config, "guess_set_size"),
          size_of(config, "trie_nodes"),     size_of(config, "branch_length"), size_of(config, "trie_capacity"),
          size_of(config, "num_recycled")};
}

template <typename T>
std::vector<T*> pointers(const nb::sequence& items) {
  std::vector<T*> found;
  for (nb::handle item : items) found.push_back(nb::cast<T*>(item));
  return found;
}

void bind_tree(nb::module_& m);
void bind_suffix_index(nb::module_& m);
void bind_evidence(nb::module_& m);
void bind_drafting(nb::module_& m);
void bind_budget(nb::module_& m);
void bind_partition(nb::module_& m);
void bind_state(nb::module_& m);
void bind_rows(nb::module_& m);

}  // namespace lpr
