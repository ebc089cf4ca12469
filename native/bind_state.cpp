// States, and the two halves of a step on the host, under the names of lpr.core.
#include "bindings.h"

namespace lpr {

using Matrix = nb::ndarray<nb::numpy, int32_t, nb::ndim<2>>;
using Words = nb::ndarray<nb::numpy, uint64_t, nb::ndim<2>>;
using Payloads = nb::ndarray<const int32_t, nb::ndim<4>, nb::device::cpu>;

template <typename T, typename Result>
Result owned_array(std::vector<T>&& values, size_t rows, size_t columns) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* data) noexcept { delete static_cast<std::vector<T>*>(data); });
  return Result(kept->data(), {rows, columns}, owner);
}

// A state, and the Python objects that it was made of.
struct BoundState : SequenceState {
  nb::object params, config;
  nb::list listed;  // the request's own list of tokens, which grows with the state

  BoundState(nb::list tokens_, nb::object params_, nb::object config_, int64_t num_ranks,
             std::shared_ptr<SuffixIndex> shared, const nb::object& computed)
      : SequenceState(nb::cast<Tokens>(tokens_), nb::cast<std::string>(nb::repr(params_)), sizes_of(config_),
                      counts(computed, num_ranks), std::move(shared)),
        params(std::move(params_)), config(std::move(config_)), listed(std::move(tokens_)) {}

 private:
  static std::vector<int64_t> counts(const nb::object& computed, int64_t num_ranks) {
    if (!computed.is_none() && nb::len(computed)) return nb::cast<std::vector<int64_t>>(computed);
    return std::vector<int64_t>(num_ranks, 0);
  }
};

Tokens flat(const std::vector<Tokens>& rows) {
  Tokens all;
  for (const Tokens& row : rows) all.insert(all.end(), row.begin(), row.end());
  return all;
}

std::vector<Tokens> rows_of(const Tokens& flat, const TreeResult& all) {
  std::vector<Tokens> rows;
  for (size_t node = 0; node < all.next_tokens.size(); node++)
    rows.emplace_back(flat.begin() + node * all.k, flat.begin() + (node + 1) * all.k);
  return rows;
}

void bind_results(nb::class_<TreeResult>& bound) {
  bound.def_static(
      "from_payloads",
      [](Payloads payloads, size_t index, const nb::sequence& shards, int k) {
        std::vector<const Shard*> parts;
        for (Shard* shard : pointers<Shard>(shards)) parts.push_back(shard);
        int64_t strides[3] = {payloads.stride(0), payloads.stride(1), payloads.stride(2)};
        return results_of(payloads.data(), strides, index, parts, k);
      },
      "payloads"_a, "index"_a, "shards"_a, "k"_a);
}

void bind_rows(nb::module_& m) {
  m.def(
      "row_entries",
      [](const BoundState& state, const TokenTree& tree, const Shard& shard, size_t rank) {
        Tokens entries = row_entries(state, tree, shard, rank);
        size_t columns = entries.size() / 3;
        return owned_array<int32_t, Matrix>(std::move(entries), 3, columns);
      },
      "state"_a, "tree"_a, "shard"_a, "rank"_a);
  m.def(
      "ancestor_words",
      [](Array parents, size_t num_words) {
        Tokens those(parents.data(), parents.data() + parents.size());
        return owned_array<uint64_t, Words>(ancestor_words(those, num_words), those.size(), num_words);
      },
      "parents"_a, "num_words"_a);
  m.def(
      "ancestor_words",
      [](const Tokens& parents, size_t num_words) {
        return owned_array<uint64_t, Words>(ancestor_words(parents, num_words), parents.size(), num_words);
      },
      "parents"_a, "num_words"_a);
  m.def(
      "workload",
      [](const nb::sequence& states) {
        std::vector<const SequenceState*> those;
        for (BoundState* state : pointers<BoundState>(states)) those.push_back(state);
        auto [pending, kv] = workload(those);
        return nb::make_tuple(pending, kv);
      },
      "states"_a);
  m.def(
      "draft_step",
      [](const nb::sequence& states, const std::vector<int64_t>& depths, Budget& budget, int64_t num_ranks,
         int64_t max_owned) {
        std::vector<SequenceState*> those;
        for (BoundState* state : pointers<BoundState>(states)) those.push_back(state);
        auto [drafts, shards] = draft_step(those, depths, budget, num_ranks, max_owned);
        nb::list trees, parts;
        for (size_t i = 0; i < drafts.size(); i++) {
          trees.append(nb::cast(drafts[i].tree));
          nb::list mine;
          for (Shard& shard : shards[i]) mine.append(nb::cast(std::move(shard)));
          parts.append(mine);
        }
        return nb::make_tuple(trees, parts);
      },
      "states"_a, "depths"_a, "budget"_a, "num_ranks"_a, "max_owned"_a);
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
        return partition(tree, num_ranks, pending_of(state), max_owned);
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
             const std::vector<Tokens>& scores) {
            int k = candidates.empty() ? 0 : static_cast<int>(candidates[0].size());
            new (self) TreeResult{std::move(next_tokens), flat(candidates), flat(scores), k};
          },
          "next_tokens"_a, "candidates"_a, "scores"_a)
      .def_ro("next_tokens", &TreeResult::next_tokens)
      .def_prop_ro("candidates", [](const TreeResult& all) { return rows_of(all.candidates, all); })
      .def_prop_ro("scores", [](const TreeResult& all) { return rows_of(all.scores, all); });
  nb::class_<BoundState>(m, "SequenceState")
      .def(nb::init<nb::list, nb::object, nb::object, int64_t, std::shared_ptr<SuffixIndex>, const nb::object&>(),
           "tokens"_a, "params"_a, "config"_a, "num_ranks"_a = 1, "shared"_a.none() = nb::none(),
           "num_computed_tokens"_a.none() = nb::none())
      .def_ro("params", &BoundState::params)
      .def_ro("config", &BoundState::config)
      .def_ro("tokens", &BoundState::listed)
      .def_rw("num_computed_tokens", &BoundState::num_computed_tokens)
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
      .def("sign_tree", &BoundState::sign_tree, "tree"_a)
      .def(
          "advance",
          [](BoundState& state, const TokenTree& tree, const Tokens& path, const TreeResult& result,
             const nb::sequence& shards) {
            std::vector<const Shard*> parts;
            for (Shard* shard : pointers<Shard>(shards)) parts.push_back(shard);
            Tokens emitted = state.advance(tree, path, result, parts);
            for (int32_t token : emitted) state.listed.append(token);
            return emitted;
          },
          "tree"_a, "path"_a, "result"_a, "shards"_a);
  m.def(
      "conclude",
      [](BoundState& state, const TokenTree& tree, const Tokens& path, const TreeResult& result,
         const nb::sequence& shards, size_t rank) {
        std::vector<const Shard*> parts;
        for (Shard* shard : pointers<Shard>(shards)) parts.push_back(shard);
        nb::object kept = nb::none();
        if (!SequenceState::has_nan(*parts[rank], result)) kept = nb::cast(kept_entries(state, *parts[rank], path, rank));
        int32_t bonus = result.next_tokens[path.back()];
        Tokens emitted = state.advance(tree, path, result, parts);
        for (int32_t token : emitted) state.listed.append(token);
        return nb::make_tuple(emitted, kept, bonus < 0 ? nb::cast(bonus) : nb::none());
      },
      "state"_a, "tree"_a, "path"_a, "result"_a, "shards"_a, "rank"_a);
  m.def("has_nan_result", &SequenceState::has_nan, "shard"_a, "result"_a);
}

}  // namespace lpr
