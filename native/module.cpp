// lpr._native: the classes of lpr.core in C++, under the same names and with the same results.
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

template <typename T>
T get(const nb::dict& from, const char* name) {
  return nb::cast<T>(from[name]);
}

void set_constants(const nb::dict& from) {
  Constants& to = constants;
  to.weight = get<std::vector<double>>(from, "weight");
  to.novelty = get<std::vector<double>>(from, "novelty");
  to.recycled = get<std::vector<double>>(from, "recycled");
  to.recent_cells = get<std::vector<int64_t>>(from, "recent_cells");
  to.shipped_frequencies = get<std::vector<double>>(from, "shipped_frequencies");
  to.shipped_trials = get<std::vector<double>>(from, "shipped_trials");
  to.levels = get<std::vector<int64_t>>(from, "levels");
  to.knots = get<std::vector<int64_t>>(from, "knots");
#define LPR_NUMBER(name) to.name = get<decltype(to.name)>(from, #name)
  LPR_NUMBER(growth);
  LPR_NUMBER(shared_trust);
  LPR_NUMBER(replaced_trust);
  LPR_NUMBER(most);
  LPR_NUMBER(delay);
  LPR_NUMBER(pool_match);
  LPR_NUMBER(root_places);
  LPR_NUMBER(node_places);
  LPR_NUMBER(max_match);
  LPR_NUMBER(num_levels);
  LPR_NUMBER(num_kinds);
  LPR_NUMBER(num_buckets);
  LPR_NUMBER(middle);
  LPR_NUMBER(recent_stage);
  LPR_NUMBER(several);
  LPR_NUMBER(memory);
  LPR_NUMBER(least);
  LPR_NUMBER(window_memory);
  LPR_NUMBER(window_return);
  LPR_NUMBER(trusted_nodes);
  LPR_NUMBER(trust_memory);
  LPR_NUMBER(plain_memory);
  LPR_NUMBER(most_promised);
  LPR_NUMBER(long_memory);
  LPR_NUMBER(near_price);
  LPR_NUMBER(window_segment);
  LPR_NUMBER(quiet_steps);
  LPR_NUMBER(longest_pause);
  LPR_NUMBER(longest_far_pause);
#undef LPR_NUMBER
}

// The entries of `config`, a TreeSizes, by name.
int64_t size_of(const nb::object& config, const char* name) { return nb::cast<int64_t>(config.attr(name)); }

Sizes sizes_of(const nb::object& config) {
  return {size_of(config, "window_size"),    size_of(config, "ngram_size"),    size_of(config, "guess_set_size"),
          size_of(config, "trie_nodes"),     size_of(config, "branch_length"), size_of(config, "trie_capacity"),
          size_of(config, "num_recycled")};
}

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
             const std::vector<Tokens>& scores) {
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
      .def(nb::init<>())
      .def_ro("frequencies", &Calibration::frequencies)
      .def_ro("trials", &Calibration::trials)
      .def_prop_ro("digest", &Calibration::digest)
      .def("observe", &Calibration::observe, "tree"_a, "path"_a, "cells"_a);
  nb::class_<Drafter>(m, "Drafter")
      .def(
          "__init__",
          [](Drafter* self, const nb::object& config, std::shared_ptr<SuffixIndex> shared,
             std::shared_ptr<CandidateTable> table, std::shared_ptr<Calibration> calibration) {
            Sizes sizes = sizes_of(config);
            new (self) Drafter(sizes.trie_nodes, sizes.branch_length, sizes.trie_capacity,
                               sizes.window_size ? sizes.guess_set_size : 0, std::move(shared), std::move(table),
                               std::move(calibration));
          },
          "config"_a, "shared"_a.none() = nb::none(), "table"_a.none() = nb::none(),
          "calibration"_a.none() = nb::none())
      .def_ro("calibration", &Drafter::calibration)
      .def_ro("pool", &Drafter::pool)
      .def(
          "observe", [](Drafter& drafter, const Tokens& tokens) { drafter.observe(tokens.data(), tokens.size()); },
          "tokens"_a)
      .def("draft", &Drafter::draft, "tree"_a, "budget"_a, "max_depth"_a = nb::none(),
           "price"_a.none() = nb::none())
      .def("learn", &Drafter::learn, "tree"_a, "path"_a);
}

template <typename T>
std::vector<T*> pointers(const nb::sequence& items) {
  std::vector<T*> found;
  for (nb::handle item : items) found.push_back(nb::cast<T*>(item));
  return found;
}

template <typename Class>
void bind_steps(Class& bound) {
  bound.def("begin", &Budget::begin, "count"_a, "pending"_a, "kv"_a)
      .def("request", &Budget::request, "history"_a)
      .def(
          "cut",
          [](Budget& budget, const nb::sequence& drafts, const nb::sequence& histories) {
            auto these = pointers<Draft>(drafts);
            auto those = pointers<AcceptanceHistory>(histories);
            budget.cut(these, those);
          },
          "drafts"_a, "histories"_a)
      .def(
          "observe",
          [](Budget& budget, const nb::sequence& trees, const std::vector<Tokens>& paths,
             const nb::sequence& histories) {
            std::vector<const TokenTree*> those;
            for (TokenTree* tree : pointers<TokenTree>(trees)) those.push_back(tree);
            std::vector<const Tokens*> walked;
            for (const Tokens& path : paths) walked.push_back(&path);
            auto these = pointers<AcceptanceHistory>(histories);
            budget.observe(those, walked, these);
          },
          "trees"_a, "paths"_a, "histories"_a);
}

// An AdaptiveBudget and the Python table that it asks for rows.
class TableBudget : public AdaptiveBudget {
 public:
  TableBudget(const nb::object& config, nb::object cost, int64_t num_ranks)
      : AdaptiveBudget(size_of(config, "num_nodes") - 1, size_of(config, "num_window_nodes"),
                       size_of(config, "window_size"), num_ranks, rows_of(cost)),
        cost_(std::move(cost)) {}

  nb::object cost() const { return cost_; }

  void set_cost(nb::object cost) {
    row_of = rows_of(cost);
    cost_ = std::move(cost);
  }

 private:
  static std::function<StepRow(int64_t, int64_t)> rows_of(nb::object cost) {
    return [cost](int64_t batch, int64_t kv) { return nb::cast<StepRow>(cost.attr("row")(batch, kv)); };
  }

  nb::object cost_;
};

void bind_budget(nb::module_& m) {
  nb::class_<AcceptanceHistory>(m, "AcceptanceHistory")
      .def(nb::init<>())
      .def_rw("expected", &AcceptanceHistory::expected)
      .def_rw("accepted", &AcceptanceHistory::accepted)
      .def_rw("offered", &AcceptanceHistory::offered)
      .def_rw("quiet", &AcceptanceHistory::quiet)
      .def_rw("pause", &AcceptanceHistory::pause)
      .def("trust", &AcceptanceHistory::trust, "first"_a = 1.0)
      .def("record_step", &AcceptanceHistory::record_step, "offered"_a, "accepted"_a, "memory"_a)
      .def("count", &AcceptanceHistory::count, "drafted"_a, "is_far"_a);
  nb::class_<Price>(m, "Price").def_ro("floor", &Price::floor).def("take", &Price::take, "probability"_a);
  nb::class_<DraftRequest>(m, "DraftRequest")
      .def(
          "__init__",
          [](DraftRequest* self, int64_t nodes, const Price* price, bool window) {
            new (self) DraftRequest{nodes, price ? std::optional<Price>(*price) : std::nullopt, window};
          },
          "nodes"_a, "price"_a.none(), "window"_a)
      .def_ro("nodes", &DraftRequest::nodes)
      .def_prop_ro("price", [](DraftRequest& request) { return request.price ? &*request.price : nullptr; },
                   nb::rv_policy::reference_internal)
      .def_ro("window", &DraftRequest::window);
  nb::class_<Draft>(m, "Draft")
      .def(
          "__init__",
          [](Draft* self, std::shared_ptr<TokenTree> tree, std::vector<double> probabilities, int64_t num_window) {
            new (self) Draft{std::move(tree), std::move(probabilities), num_window};
          },
          "tree"_a, "probabilities"_a, "num_window"_a)
      .def_ro("tree", &Draft::tree)
      .def_ro("probabilities", &Draft::probabilities)
      .def_ro("num_window", &Draft::num_window);
  nb::class_<Budget>(m, "Budget");
  nb::class_<FixedBudget, Budget> fixed(m, "FixedBudget");
  fixed.def(
      "__init__",
      [](FixedBudget* self, const nb::object& config) {
        int64_t nodes = size_of(config, "num_guess_nodes") + size_of(config, "trie_nodes");
        new (self) FixedBudget(nodes, size_of(config, "window_size") > 0);
      },
      "config"_a);
  bind_steps(fixed);
  nb::class_<TableBudget, Budget> adaptive(m, "AdaptiveBudget");
  adaptive
      .def(nb::init<const nb::object&, nb::object, int64_t>(), "config"_a, "cost"_a, "num_ranks"_a = 1)
      .def_prop_rw("cost", &TableBudget::cost, &TableBudget::set_cost)
      .def_prop_ro("num_ranks", [](const TableBudget& budget) { return budget.num_ranks; })
      .def_prop_ro("window", [](const TableBudget& budget) { return budget.window; });
  bind_steps(adaptive);
}

void bind_partition(nb::module_& m) {
  nb::class_<Shard>(m, "Shard")
      .def(
          "__init__", [](Shard* self, Tokens nodes, Tokens owned) { new (self) Shard{std::move(nodes), std::move(owned)}; },
          "nodes"_a, "owned"_a)
      .def_ro("nodes", &Shard::nodes)
      .def_ro("owned", &Shard::owned);
  m.def("partition", &partition, "tree"_a, "num_ranks"_a, "pending"_a, "max_owned"_a = nb::none());
  m.def("depth_first", &depth_first, "tree"_a);
  m.def("accept", &accept, "tree"_a, "next_tokens"_a);
  m.def(
      "accept", [](const TokenTree& tree, const TreeResult& result) { return accept(tree, result.next_tokens); },
      "tree"_a, "result"_a);
}

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

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // what lives at the end of the process is no leak
  m.def("set_constants", &set_constants);
  bind_tree(m);
  bind_suffix_index(m);
  bind_evidence(m);
  bind_drafting(m);
  bind_budget(m);
  bind_partition(m);
  bind_state(m);
  bind_rows(m);
}

}  // namespace lpr
