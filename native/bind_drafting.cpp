// The classes that drafts are made of, under the names of lpr.core.
#include "bindings.h"

namespace lpr {

// array("i") of a range of a history: what the Python core returns.
nb::object array_of(const SuffixIndex& trie, int64_t from) {
  Tokens tokens;
  tokens.reserve(trie.size() - from);
  for (int64_t index = from; index < trie.size(); index++) tokens.push_back(trie.token(index));
  nb::bytes raw(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(int32_t));
  return nb::module_::import_("array").attr("array")("i", raw);
}

nb::list children_of(const TokenTree& tree) {
  nb::list all;
  for (int node = 0; node < tree.size(); node++) {
    nb::dict mine;
    for (int child = tree.first_child[node]; child >= 0; child = tree.next_sibling[child])
      mine[nb::int_(tree.tokens[child])] = child;
    all.append(mine);
  }
  return all;
}

void bind_tree(nb::module_& m) {
  nb::class_<TokenTree>(m, "TokenTree")
      .def(nb::init<int32_t>(), "root_token"_a)
      .def("__len__", &TokenTree::size)
      .def_ro("tokens", &TokenTree::tokens)
      .def_ro("parents", &TokenTree::parents)
      .def_ro("depths", &TokenTree::depths)
      .def_prop_ro("sources", [](const TokenTree& tree) { return Tokens(tree.sources.begin(), tree.sources.end()); })
      .def_prop_ro("children", &children_of)
      .def("add", &TokenTree::add, "parent"_a, "token"_a, "source"_a)
      .def(
          "add_chain",
          [](TokenTree& tree, int parent, const Tokens& tokens, int source) {
            for (int32_t token : tokens) parent = tree.add(parent, token, source);
            return parent;
          },
          "parent"_a, "tokens"_a, "source"_a)
      .def("find", &TokenTree::find, "parent"_a, "token"_a)
      .def("truncate", &TokenTree::truncate, "count"_a)
      .def("path_to", &TokenTree::path_to, "node"_a);
}

void bind_suffix_index(nb::module_& m) {
  nb::class_<SuffixIndex>(m, "SuffixIndex")
      .def(nb::init<int64_t>(), "capacity_tokens"_a)
      .def_static(
          "from_history",
          [](Array tokens, int64_t capacity) {
            return std::make_shared<SuffixIndex>(tokens.data(), static_cast<int64_t>(tokens.size()), capacity);
          },
          "tokens"_a, "capacity_tokens"_a)
      .def_static(
          "from_history",
          [](const Tokens& tokens, int64_t capacity) {
            return std::make_shared<SuffixIndex>(tokens.data(), static_cast<int64_t>(tokens.size()), capacity);
          },
          "tokens"_a, "capacity_tokens"_a)
      .def_ro("capacity_tokens", &SuffixIndex::capacity)
      .def_ro("base", &SuffixIndex::base)
      .def_ro("start", &SuffixIndex::start)
      .def_prop_ro("num_entries", [](const SuffixIndex& trie) {
        return 3 * trie.size() + static_cast<int64_t>(trie.num_pairs() + trie.num_singles());
      })
      .def_prop_ro("tokens", [](const SuffixIndex& trie) { return array_of(trie, 0); })
      .def("__len__", &SuffixIndex::num_held)
      .def("history", [](const SuffixIndex& trie) { return array_of(trie, trie.start); })
      .def(
          "extend", [](SuffixIndex& trie, const Tokens& tokens) { trie.extend(tokens.data(), tokens.size()); },
          "tokens"_a)
      .def("end_document", &SuffixIndex::end_document)
      .def(
          "insert", [](SuffixIndex& trie, Array history) { trie.insert(history.data(), history.size()); }, "history"_a)
      .def(
          "match",
          [](const SuffixIndex& trie, const Tokens& suffix, int limit) {
            nb::list found;
            trie.match(suffix.data(), suffix.size(), limit,
                       [&](int64_t index, int length) { found.append(nb::make_tuple(index, length)); });
            return found;
          },
          "suffix"_a, "limit"_a = 64)
      .def(
          "match_last",
          [](const SuffixIndex& trie, int32_t token, int limit) {
            std::vector<int64_t> found;
            trie.match_last(token, limit, [&](int64_t index) { found.push_back(index); });
            return found;
          },
          "token"_a, "limit"_a = 16)
      .def(
          "continuation",
          [](const SuffixIndex& trie, int64_t index, int64_t length) {
            Tokens found;
            for (int64_t end = std::min(index + length, trie.size()); index < end && trie.token(index) != kEnd; index++)
              found.push_back(trie.token(index));
            return found;
          },
          "index"_a, "length"_a);
}

void bind_evidence(nb::module_& m) {
  nb::class_<NGramPool>(m, "NGramPool")
      .def(nb::init<int64_t, int64_t>(), "guess_set_size"_a, "max_keys"_a = 4096)
      .def_ro("guess_set_size", &NGramPool::guess_set_size)
      .def_ro("max_keys", &NGramPool::max_keys)
      .def("__len__", &NGramPool::size)
      .def("add", &NGramPool::add, "ngram"_a)
      .def(
          "get",
          [](NGramPool& pool, int32_t token) {
            nb::list found;
            if (const auto* ngrams = pool.get(token))
              for (auto ngram = ngrams->rbegin(); ngram != ngrams->rend(); ++ngram)
                found.append(nb::tuple(nb::cast(*ngram)));
            return found;
          },
          "token"_a);
  nb::class_<CandidateTable>(m, "CandidateTable")
      .def(nb::init<>())
      .def("__len__", &CandidateTable::size)
      .def(
          "update",
          [](CandidateTable& table, const Tokens& tokens, const std::vector<Tokens>& candidates,
             const std::vector<std::vector<uint8_t>>& scores) {
            if (tokens.size() != candidates.size() || tokens.size() != scores.size())
              throw std::invalid_argument("tokens, candidates and scores of unequal length");
            for (size_t i = 0; i < tokens.size(); i++)
              table.update(tokens[i], candidates[i].data(), scores[i].data(), static_cast<int>(candidates[i].size()));
          },
          "tokens"_a, "candidates"_a, "scores"_a)
      .def(
          "get",
          [](const CandidateTable& table, int32_t token) {
            nb::list found;
            CandidateTable::Row row = table.get(token);
            for (int i = 0; i < row.size; i++) found.append(nb::make_tuple(row.tokens[i], row.scores[i]));
            return nb::iter(found);
          },
          "token"_a);
  nb::class_<JacobiWindow>(m, "JacobiWindow")
      .def(nb::init<int, int, const Tokens&>(), "num_columns"_a, "ngram_size"_a, "context"_a)
      .def_ro("num_columns", &JacobiWindow::num_columns)
      .def_ro("num_levels", &JacobiWindow::num_levels)
      .def_rw("levels", &JacobiWindow::levels)
      .def("add_to", &JacobiWindow::add_to, "tree"_a, "max_depth"_a)
      .def(
          "advance",
          [](JacobiWindow& window, const TokenTree& tree, const Tokens& next_tokens, const Tokens& committed,
             const Tokens& context) {
            nb::list ngrams;
            for (const Tokens& ngram : window.advance(tree, next_tokens, committed.size(), context))
              ngrams.append(nb::tuple(nb::cast(ngram)));
            return ngrams;
          },
          "tree"_a, "next_tokens"_a, "committed"_a, "context"_a);
}

void bind_drafting(nb::module_& m) {
  nb::class_<Calibration>(m, "Calibration")
      .def(nb::init<bool>(), "is_sampled"_a = false)
      .def_ro("frequencies", &Calibration::frequencies)
      .def_ro("trials", &Calibration::trials)
      .def_prop_ro("digest", &Calibration::digest)
      .def("observe", &Calibration::observe, "tree"_a, "path"_a, "cells"_a);
  nb::class_<Drafter>(m, "Drafter")
      .def(
          "__init__",
          [](Drafter* self, const nb::object& config, std::shared_ptr<SuffixIndex> shared,
             std::shared_ptr<CandidateTable> table, std::shared_ptr<Calibration> calibration,
             std::optional<uint64_t> seed) {
            Sizes sizes = sizes_of(config);
            new (self) Drafter(sizes.trie_nodes, sizes.branch_length, sizes.trie_capacity,
                               sizes.window_size ? sizes.guess_set_size : 0, sizes.ngram_size, std::move(shared),
                               std::move(table), std::move(calibration), seed);
          },
          "config"_a, "shared"_a.none() = nb::none(), "table"_a.none() = nb::none(),
          "calibration"_a.none() = nb::none(), "seed"_a.none() = nb::none())
      .def_ro("seed", &Drafter::seed)
      .def_ro("calibration", &Drafter::calibration)
      .def_ro("pool", &Drafter::pool)
      .def(
          "observe", [](Drafter& drafter, const Tokens& tokens) { drafter.observe(tokens.data(), tokens.size()); },
          "tokens"_a)
      .def("draft", &Drafter::draft, "tree"_a, "budget"_a, "max_depth"_a = nb::none(),
           "price"_a.none() = nb::none())
      .def("learn", &Drafter::learn, "tree"_a, "path"_a)
      .def(
          "keep_candidates",
          [](Drafter& drafter, const TokenTree& tree, const Tokens& path, const std::vector<Tokens>& candidates,
             const std::vector<std::vector<uint8_t>>& scores) {
            int k = candidates.empty() ? 0 : static_cast<int>(candidates[0].size());
            Tokens tokens;
            std::vector<uint8_t> says;
            for (const Tokens& row : candidates) tokens.insert(tokens.end(), row.begin(), row.end());
            for (const std::vector<uint8_t>& row : scores) says.insert(says.end(), row.begin(), row.end());
            auto is_node = [&](int32_t node) { return node >= 0 && node < tree.size(); };
            if (static_cast<int>(candidates.size()) != tree.size() || tokens.size() != k * candidates.size() ||
                says.size() != tokens.size() || path.empty() || !std::all_of(path.begin(), path.end(), is_node))
              throw std::invalid_argument("a node of the tree has no candidates and scores, or the path none in it");
            drafter.keep_candidates(tree, path, tokens.data(), says.data(), k);
          },
          "tree"_a, "path"_a, "candidates"_a, "scores"_a);
}

}  // namespace lpr
