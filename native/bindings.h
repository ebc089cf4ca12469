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

#include "selection.h"
#include "step.h"

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

// An array of the given shape that owns `values`.
template <typename Result, typename T>
Result owned_array(std::vector<T>&& values, std::initializer_list<size_t> shape) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* data) noexcept { delete static_cast<std::vector<T>*>(data); });
  return Result(kept->data(), shape, owner);
}

using Matrix = nb::ndarray<nb::numpy, int32_t, nb::ndim<2>>;
using Words = nb::ndarray<nb::numpy, uint64_t, nb::ndim<2>>;
using Values = nb::ndarray<const int32_t, nb::ndim<4>, nb::device::cpu>;

// A state, and the Python objects that it was made of.
struct BoundState : SequenceState {
  nb::object params, config;
  nb::list listed;  // the request's own list of tokens, which grows with the state

  BoundState(nb::list tokens_, nb::object params_, nb::object config_, int64_t num_ranks,
             std::shared_ptr<SuffixIndex> shared, const nb::object& computed, std::optional<int64_t> longest,
             const nb::object& stop_ids)
      : SequenceState(nb::cast<Tokens>(tokens_), nb::cast<std::string>(nb::repr(params_)), sizes_of(config_),
                      counts(computed, num_ranks), std::move(shared),
                      longest.value_or(std::numeric_limits<int64_t>::max()), each_of(stop_ids), seed_of(params_)),
        params(std::move(params_)), config(std::move(config_)), listed(std::move(tokens_)) {}

  void append(const Tokens& emitted) {
    for (int32_t token : emitted) listed.append(token);
  }

 private:
  static std::vector<int64_t> counts(const nb::object& computed, int64_t num_ranks) {
    if (!computed.is_none() && nb::len(computed)) return nb::cast<std::vector<int64_t>>(computed);
    return std::vector<int64_t>(num_ranks, 0);
  }

  // Of a request that samples.
  static std::optional<uint64_t> seed_of(const nb::object& params) {
    if (nb::cast<double>(params.attr("temperature")) <= 0) return std::nullopt;
    return nb::cast<uint64_t>(params.attr("seed").attr("__and__")(~uint64_t{0}));
  }

  static Tokens each_of(const nb::object& ids) {
    Tokens all;
    for (nb::handle id : ids) all.push_back(nb::cast<int32_t>(id));
    return all;
  }
};

void bind_tree(nb::module_& m);
void bind_suffix_index(nb::module_& m);
void bind_evidence(nb::module_& m);
void bind_drafting(nb::module_& m);
void bind_budget(nb::module_& m);
void bind_partition(nb::module_& m);
void bind_state(nb::module_& m);
void bind_rows(nb::module_& m);
void bind_step(nb::module_& m);
void bind_sampling(nb::module_& m);
void bind_attention(nb::module_& m);

}  // namespace lpr
