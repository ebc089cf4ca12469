// States, and the two halves of a step on the host, under the names of lpr.core.
#include "bindings.h"

namespace lpr {

std::vector<Shard> copies(const nb::sequence& shards) {
  std::vector<Shard> found;
  for (Shard* shard : pointers<Shard>(shards)) found.push_back(*shard);
  return found;
}

template <typename T>
std::vector<T> flat(const std::vector<std::vector<T>>& rows) {
  std::vector<T> all;
  for (const std::vector<T>& row : rows) all.insert(all.end(), row.begin(), row.end());
  return all;
}

template <typename T>
std::vector<Tokens> rows_of(const std::vector<T>& flat, const TreeResult& all) {
  std::vector<Tokens> rows;
  for (size_t node = 0; node < all.next_tokens.size(); node++)
    rows.emplace_back(flat.begin() + node * all.k, flat.begin() + (node + 1) * all.k);
  return rows;
}

void bind_results(nb::class_<TreeResult>& bound) {
  bound.def_static(
      "from_payloads",
      [](Values payloads, const nb::object& index, const nb::sequence& shards, int k) {
        int64_t strides[3] = {payloads.stride(0), payloads.stride(1), payloads.stride(2)};
        std::vector<Shard> those = copies(shards);
        std::vector<int64_t> places;
        if (nb::isinstance<nb::int_>(index))
          places.assign(those.size(), nb::cast<int64_t>(index));
        else
          places = nb::cast<std::vector<int64_t>>(index);
        return results_of(payloads.data(), strides, places, those, k);
      },
      "payloads"_a, "index"_a, "shards"_a, "k"_a);
}

void bind_rows(nb::module_& m) {
  m.def(
      "row_entries",
      [](const BoundState& state, const TokenTree& tree, const Shard& shard, size_t rank) {
        Tokens entries = row_entries(state, tree, shard, rank);
        size_t columns = entries.size() / 3;
        return owned_array<Matrix>(std::move(entries), {3, columns});
      },
      "state"_a, "tree"_a, "shard"_a, "rank"_a);
  m.def(
      "ancestor_words",
      [](Array parents, size_t num_words) {
        Tokens those(parents.data(), parents.data() + parents.size());
        return owned_array<Words>(ancestor_words(those, num_words), {those.size(), num_words});
      },
      "parents"_a, "num_words"_a);
  m.def(
      "ancestor_words",
      [](const Tokens& parents, size_t num_words) {
        return owned_array<Words>(ancestor_words(parents, num_words), {parents.size(), num_words});
      },
      "parents"_a, "num_words"_a);
  m.def(
      "workload",
      [](const nb::sequence& states, std::optional<std::vector<int64_t>> homes, std::optional<Served> served) {
        std::vector<const SequenceState*> those;
        for (BoundState* state : pointers<BoundState>(states)) those.push_back(state);
        if (!homes) {
          homes.emplace(those.empty() ? 0 : those[0]->num_computed_tokens.size());
          std::iota(homes->begin(), homes->end(), 0);
        }
        auto [pending, kv] = workload(those, *homes, served ? &*served : nullptr);
        return nb::make_tuple(pending, kv);
      },
      "states"_a, "homes"_a.none() = nb::none(), "served"_a.none() = nb::none());
  m.def(
      "place_rows",
      [](nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> words, size_t batch, size_t num_entries,
         const std::vector<int64_t>& slots, int64_t rows_per_slot, const std::vector<int64_t>& num_cached,
         const std::vector<nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>>& entries) {
        RowWords to(words.data(), batch, num_entries);
        if (words.size() < to.size()) throw std::invalid_argument("the words do not hold the rows");
        for (size_t i = 0; i < batch; i++) {
          size_t count = i < entries.size() ? entries[i].shape(1) : 0;
          if (count > num_entries) throw std::invalid_argument("a row is longer than its place");
          to.place(i, slots[i], rows_per_slot, i < entries.size() ? num_cached[i] : 0,
                   i < entries.size() ? entries[i].data() : nullptr, count);
        }
      },
      "words"_a, "batch"_a, "num_entries"_a, "slots"_a, "rows_per_slot"_a, "num_cached"_a, "entries"_a);
  m.def(
      "split",
      [](const BoundState& state, const TokenTree& tree, int64_t num_ranks, std::optional<int64_t> max_owned) {
        return split(state, tree, num_ranks, max_owned);
      },
      "state"_a, "tree"_a, "num_ranks"_a, "max_owned"_a.none());
}

void bind_state(nb::module_& m) {
  nb::class_<TreeResult> result(m, "TreeResult");
  bind_results(result);
  result
      .def(
          "__init__",
          [](TreeResult* self, Tokens next_tokens, const std::vector<Tokens>& candidates,
             const std::vector<std::vector<uint8_t>>& scores) {
            int k = candidates.empty() ? 0 : static_cast<int>(candidates[0].size());
            new (self) TreeResult{std::move(next_tokens), flat(candidates), flat(scores), k};
          },
          "next_tokens"_a, "candidates"_a, "scores"_a)
      .def_ro("next_tokens", &TreeResult::next_tokens)
      .def_prop_ro("candidates", [](const TreeResult& all) { return rows_of(all.candidates, all); })
      .def_prop_ro("scores", [](const TreeResult& all) { return rows_of(all.scores, all); });
  nb::class_<BoundState>(m, "SequenceState")
      .def(nb::init<nb::list, nb::object, nb::object, int64_t, std::shared_ptr<SuffixIndex>, const nb::object&,
                    std::optional<int64_t>, const nb::object&>(),
           "tokens"_a, "params"_a, "config"_a, "num_ranks"_a = 1, "shared"_a.none() = nb::none(),
           "num_computed_tokens"_a.none() = nb::none(), "longest"_a.none() = nb::none(), "stop_ids"_a = nb::tuple())
      .def_ro("params", &BoundState::params)
      .def_ro("config", &BoundState::config)
      .def_ro("tokens", &BoundState::listed)
      .def_rw("num_computed_tokens", &BoundState::num_computed_tokens)
      .def_prop_rw("homes", [](const BoundState& state) { return state.homes(); },
                   [](BoundState& state, std::vector<int64_t> ranks) { state.set_homes(std::move(ranks)); })
      .def("forget_drafts", &BoundState::forget_drafts)
      .def_ro("table", &BoundState::table)
      .def_ro("drafter", &BoundState::drafter)
      .def_ro("window", &BoundState::window)
      .def_prop_ro("acceptance", [](BoundState& state) { return &state.acceptance; },
                   nb::rv_policy::reference_internal)
      .def_rw("is_suspect", &BoundState::is_suspect)
      .def_ro("probabilities", &BoundState::probabilities)
      .def_prop_ro("num_pending", &BoundState::num_pending)
      .def_prop_ro("digest", &BoundState::digest)
      .def("build", &BoundState::build, "max_depth"_a, "request"_a)
      .def("may_end", &BoundState::may_end, "emitted"_a)
      .def("sign_tree", &BoundState::sign_tree, "tree"_a)
      .def(
          "advance",
          [](BoundState& state, const TokenTree& tree, const Tokens& path, const TreeResult& result,
             const nb::sequence& shards) {
            Tokens emitted = state.advance(tree, path, result, copies(shards));
            state.append(emitted);
            return emitted;
          },
          "tree"_a, "path"_a, "result"_a, "shards"_a);
  m.def("has_nan_result", &SequenceState::has_nan, "shard"_a, "result"_a);
}

}  // namespace lpr
