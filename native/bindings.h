// What the bindings share: nanobind's casters, and how Python's objects become arguments.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "selection.h"
#include "step.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace lpr {

using Array = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A field of `config`, a TreeSizes.
inline int64_t size_of(const nb::object& config, const char* name) { return nb::cast<int64_t>(config.attr(name)); }

inline Sizes sizes_of(const nb::object& config) {
  return {size_of(config, "window_size"),    size_of(config, "ngram_size"),    size_of(config, "guess_set_size"),
          size_of(config, "trie_nodes"),     size_of(config, "branch_length"), size_of(config, "trie_capacity"),
          size_of(config, "num_recycled"), size_of(config, "num_guesses")};
}

// An array of the given shape that owns `values`.
template <typename T, int N>
nb::object owned_array(std::vector<T>&& values, std::initializer_list<size_t> shape) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* data) noexcept { delete static_cast<std::vector<T>*>(data); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<N>>(kept->data(), shape, owner));
}

// The state in its Python object (bind_step.cpp).
const SequenceState* state_of(nb::handle state);

void bind_drafting(nb::module_& m);
void bind_step(nb::module_& m);
void bind_chains(nb::module_& m);
void bind_rows(nb::module_& m);
void bind_sampling(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_elementwise(nb::module_& m);
void bind_parallel(nb::module_& m);
void bind_paged(nb::module_& m);
void bind_products(nb::module_& m);
void bind_layer(nb::module_& m);

}  // namespace lpr
