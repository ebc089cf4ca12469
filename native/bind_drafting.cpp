// The classes by which programs draft without an engine, under the names of lpr.core.
#include "bindings.h"

namespace lpr {

// array("i") of a range of a history: what the Python core returns.
nb::object array_of(const SuffixIndex& index, int64_t from) {
  Tokens tokens;
  tokens.reserve(index.size() - from);
  for (int64_t at = from; at < index.size(); at++) tokens.push_back(index.token(at));
  nb::bytes raw(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(int32_t));
  return nb::module_::import_("array").attr("array")("i", raw);
}

std::shared_ptr<SuffixIndex> from_history(const Array& tokens, int64_t capacity) {
  return std::make_shared<SuffixIndex>(tokens.data(), static_cast<int64_t>(tokens.size()), capacity);
}

void bind_suffix_index(nb::module_& m) {
  nb::class_<SuffixIndex>(m, "SuffixIndex")
      .def(nb::init<int64_t>(), "capacity_tokens"_a)
      .def_static("from_history", &from_history, "tokens"_a, "capacity_tokens"_a)
      .def_ro("capacity_tokens", &SuffixIndex::capacity)
      .def_prop_ro("num_entries", &SuffixIndex::num_entries)
      .def("__len__", &SuffixIndex::num_held)
      .def("history", [](const SuffixIndex& index) { return array_of(index, index.start); })
      .def(
          "extend", [](SuffixIndex& index, const Tokens& tokens) { index.extend(tokens.data(), tokens.size()); },
          "tokens"_a)
      .def("end_document", &SuffixIndex::end_document)
      .def(
          "insert", [](SuffixIndex& index, Array history) { index.insert(history.data(), history.size()); },
          "history"_a);
}

// Candidates or scores [nodes, k], row after row.
template <typename T>
std::vector<T> flat(const std::vector<std::vector<T>>& rows, size_t num_rows, size_t k) {
  std::vector<T> all;
  for (const std::vector<T>& row : rows) all.insert(all.end(), row.begin(), row.end());
  if (rows.size() != num_rows || all.size() != num_rows * k)
    throw std::invalid_argument("candidates and scores are not as many for each node");
  return all;
}

using Scores = std::vector<std::vector<uint8_t>>;

size_t width_of(const std::vector<Tokens>& candidates) { return candidates.empty() ? 0 : candidates[0].size(); }

void update(CandidateTable& table, const Tokens& tokens, const std::vector<Tokens>& candidates, const Scores& scores) {
  size_t k = width_of(candidates);
  Tokens all = flat(candidates, tokens.size(), k);
  std::vector<uint8_t> weights = flat(scores, tokens.size(), k);
  for (size_t i = 0; i < tokens.size(); i++) table.update(tokens[i], &all[i * k], &weights[i * k], static_cast<int>(k));
}

void keep_candidates(Drafter& drafter, const TokenTree& tree, const Tokens& path, const std::vector<Tokens>& candidates,
                     const Scores& scores) {
  size_t k = width_of(candidates);
  Tokens all = flat(candidates, tree.size(), k);
  std::vector<uint8_t> weights = flat(scores, tree.size(), k);
  auto is_node = [&](int32_t node) { return node >= 0 && node < tree.size(); };
  if (path.empty() || !std::all_of(path.begin(), path.end(), is_node))
    throw std::invalid_argument("a path of a tree has nodes of it");
  drafter.keep_candidates(tree, path, all.data(), weights.data(), static_cast<int>(k));
}

void make_drafter(Drafter* self, const nb::object& config, std::shared_ptr<SuffixIndex> shared,
                  std::shared_ptr<CandidateTable> table, std::optional<uint64_t> seed, const Tokens& prediction,
                  int64_t num_prompt) {
  Sizes sizes = sizes_of(config);
  new (self) Drafter(sizes.trie_nodes, sizes.branch_length, sizes.trie_capacity,
                     sizes.window_size ? sizes.guess_set_size : 0, sizes.ngram_size, std::move(shared),
                     std::move(table), seed, prediction, num_prompt);
}

void bind_drafting(nb::module_& m) {
  nb::class_<TokenTree>(m, "TokenTree")
      .def(nb::init<int32_t>(), "root_token"_a)
      .def("__len__", &TokenTree::size)
      .def_ro("tokens", &TokenTree::tokens)
      .def_ro("parents", &TokenTree::parents)
      .def_ro("depths", &TokenTree::depths)
      .def_prop_ro("sources", [](const TokenTree& tree) { return Tokens(tree.sources.begin(), tree.sources.end()); })
      .def("add", &TokenTree::add, "parent"_a, "token"_a, "source"_a)
      .def(
          "add_chain",
          [](TokenTree& tree, int parent, const Tokens& tokens, int source) {
            for (int32_t token : tokens) parent = tree.add(parent, token, source);
            return parent;
          },
          "parent"_a, "tokens"_a, "source"_a)
      .def("find", &TokenTree::find, "parent"_a, "token"_a);
  bind_suffix_index(m);
  nb::class_<CandidateTable>(m, "CandidateTable")
      .def(nb::init<>())
      .def("update", &update, "tokens"_a, "candidates"_a, "scores"_a);
  nb::class_<Drafter>(m, "Drafter")
      .def("__init__", &make_drafter, "config"_a, "shared"_a.none() = nb::none(), "table"_a.none() = nb::none(),
           "seed"_a.none() = nb::none(), "prediction"_a = Tokens{}, "num_prompt"_a = 0)
      .def(
          "observe", [](Drafter& drafter, const Tokens& tokens) { drafter.observe(tokens.data(), tokens.size()); },
          "tokens"_a)
      .def(
          "draft",
          [](Drafter& drafter, TokenTree& tree, int64_t budget, std::optional<int64_t> max_depth) {
            return drafter.draft(tree, budget, max_depth, nullptr);
          },
          "tree"_a, "budget"_a, "max_depth"_a = nb::none())
      .def("continuation", &Drafter::continuation, "tokens"_a, "count"_a)
      .def("learn", &Drafter::learn, "tree"_a, "path"_a, "is_open"_a = false)
      .def("keep_candidates", &keep_candidates, "tree"_a, "path"_a, "candidates"_a, "scores"_a);
}

}  // namespace lpr
