// Budgets and shards, under the names of lpr.core.
#include "bindings.h"

namespace lpr {

template <typename Class>
void bind_steps(Class& bound) {
  bound.def("begin", &Budget::begin, "count"_a, "pending"_a, "kv"_a, "num_homes"_a.none() = nb::none())
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

// The limits of trees that 1, 2, ... or all of `num_ranks` ranks evaluate, of `config`, a TreeSizes.
std::vector<TreeLimits> limits_of(const nb::object& config, int64_t num_ranks) {
  std::vector<TreeLimits> found;
  for (int64_t some = 1; some <= num_ranks; some++) {
    nb::object sizes = config.attr("of_ranks")(some, num_ranks);
    found.push_back({size_of(sizes, "num_nodes"), size_of(sizes, "num_guess_nodes") + size_of(sizes, "trie_nodes"),
                     size_of(sizes, "num_window_nodes"), size_of(sizes, "window_size")});
  }
  return found;
}

// An AdaptiveBudget and the Python table that it asks for rows.
class TableBudget : public AdaptiveBudget {
 public:
  TableBudget(const nb::object& config, nb::object cost, int64_t num_ranks)
      : AdaptiveBudget(limits_of(config, num_ranks), rows_of(cost)), cost_(std::move(cost)) {}

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

// Budgets of one configuration, whose table is None where sizes are fixed.
class TableBudgets : public Budgets {
 public:
  TableBudgets(nb::object config, int64_t num_ranks, nb::object cost)
      : Budgets([this] { return make(); }), config_(std::move(config)), num_ranks_(num_ranks), cost_(std::move(cost)) {}
  TableBudgets(const TableBudgets&) = delete;

  nb::object cost() const { return cost_; }

  void set_cost(nb::object cost) {
    cost_ = cost;
    for (auto& [homes, entry] : by_homes_)
      if (auto* budget = dynamic_cast<TableBudget*>(entry.budget.get())) budget->set_cost(cost);
  }

 private:
  std::unique_ptr<Budget> make() const {
    if (cost_.is_none()) return std::make_unique<FixedBudget>(limits_of(config_, num_ranks_));
    return std::make_unique<TableBudget>(config_, cost_, num_ranks_);
  }

  nb::object config_;
  int64_t num_ranks_;
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
          [](DraftRequest* self, int64_t nodes, const Price* price, int64_t window) {
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
      [](FixedBudget* self, const nb::object& config, int64_t num_ranks) {
        new (self) FixedBudget(limits_of(config, num_ranks));
      },
      "config"_a, "num_ranks"_a = 1);
  bind_steps(fixed);
  nb::class_<TableBudget, Budget> adaptive(m, "AdaptiveBudget");
  adaptive
      .def(nb::init<const nb::object&, nb::object, int64_t>(), "config"_a, "cost"_a, "num_ranks"_a = 1)
      .def_prop_rw("cost", &TableBudget::cost, &TableBudget::set_cost)
      .def_prop_rw("beside", [](const TableBudget& budget) { return budget.beside; },
                   [](TableBudget& budget, double tokens) { budget.beside = tokens; })
      .def_prop_ro("num_ranks", [](const TableBudget& budget) { return budget.num_ranks; })
      .def_prop_ro("window", [](const TableBudget& budget) { return budget.window; });
  bind_steps(adaptive);
  nb::class_<Budgets>(m, "AnyBudgets");
  nb::class_<TableBudgets, Budgets>(m, "Budgets")
      .def(nb::init<nb::object, int64_t, nb::object>(), "config"_a, "num_ranks"_a = 1, "cost"_a = nb::none())
      .def_prop_rw("cost", &TableBudgets::cost, &TableBudgets::set_cost)
      .def("begin_step", &TableBudgets::begin_step)
      .def("of", [](TableBudgets& budgets, const std::vector<int64_t>& homes) { return &budgets.of(homes); },
           nb::rv_policy::reference_internal, "homes"_a)
      .def("__len__", &TableBudgets::size);
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

}  // namespace lpr
