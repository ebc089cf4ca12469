// A step of a batch, under the names of lpr.core.rows: one call drafts for all sequences, one advances all of them.
#include "bindings.h"

namespace lpr {

using Row = nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>;
using Moves = nb::ndarray<nb::numpy, int64_t, nb::ndim<2>>;

Moves stacked(std::vector<int64_t>&& first, std::initializer_list<const std::vector<int64_t>*> others) {
  size_t count = first.size();
  for (const std::vector<int64_t>* each : others) first.insert(first.end(), each->begin(), each->end());
  return owned_array<Moves>(std::move(first), {1 + others.size(), count});
}

// A step's draft, and the Python objects of its states, which must live as long.
struct BoundDraft : StepDraft {
  nb::list listed;

  BoundDraft(const nb::sequence& those, const std::vector<int64_t>& depths, Budgets& budgets, int64_t num_ranks,
             int64_t max_owned, size_t mine, std::optional<Served> rows)
      : StepDraft(states_of(those), depths, budgets, num_ranks, max_owned, mine, std::move(rows)) {
    for (nb::handle state : those) listed.append(state);
  }

  BoundState& state(size_t index) { return *static_cast<BoundState*>(states[index]); }

 private:
  static std::vector<SequenceState*> states_of(const nb::sequence& those) {
    std::vector<SequenceState*> found;
    for (BoundState* state : pointers<BoundState>(those)) found.push_back(state);
    return found;
  }
};

nb::list rows_of(BoundDraft& draft) {
  nb::list rows;
  for (int64_t i : draft.own_trees()) {
    Tokens entries = row_entries(*draft.states[i], *draft.trees[i], draft.own(i), draft.rank);
    size_t columns = entries.size() / 3;
    rows.append(nb::make_tuple(draft.states[i]->num_computed_tokens[draft.rank], draft.own(i).nodes.size(),
                               owned_array<Matrix>(std::move(entries), {3, columns})));
  }
  return rows;
}

// Of every node that this rank owns, its place among the rows' nodes, its place among those of all trees, and its words.
Moves placement(const BoundDraft& draft, int64_t capacity) {
  std::vector<int64_t> sources, targets, words;
  int64_t start = 0;
  for (size_t row = 0; row < draft.own_trees().size(); row++) {
    size_t tree = draft.own_trees()[row];
    const Shard& shard = draft.own(tree);
    auto from = shard.nodes.begin();
    for (size_t place = 0; place < shard.owned.size(); place++) {
      from = std::lower_bound(from, shard.nodes.end(), shard.owned[place]);
      sources.push_back(start + (from - shard.nodes.begin()));
      targets.push_back(static_cast<int64_t>(row) * capacity + static_cast<int64_t>(place));
      words.push_back(node_word(*draft.trees[tree], shard.owned[place]));
    }
    start += static_cast<int64_t>(shard.nodes.size());
  }
  return stacked(std::move(sources), {&targets, &words});
}

using Said = nb::ndarray<const int32_t, nb::ndim<2>, nb::device::cpu>;

// The headers that `num_ranks` ranks or more have sent, of so many trees each.
Headers headers_of(const Said& said, size_t num_ranks, size_t most) {
  if (said.shape(0) < num_ranks || (said.shape(0) && said.stride(1) != 1) ||
      static_cast<int64_t>(said.shape(1)) < constants.num_header + static_cast<int64_t>(most) * constants.num_tree_header)
    throw std::invalid_argument("the headers are not those of all ranks");
  return {said.data(), static_cast<int64_t>(said.shape(0)), said.stride(0)};
}

size_t most_served(const BoundDraft& draft) {
  size_t most = 0;
  for (const auto& trees : draft.served) most = std::max(most, trees.size());
  return most;
}

nb::list conclude(BoundDraft& draft, Values values, Said said, Budgets& budgets) {
  size_t most = most_served(draft), num_ranks = draft.served.size();
  Headers headers = headers_of(said, num_ranks, most);
  int64_t k = 0, owned = 0;
  for (size_t rank = 0; rank < num_ranks; rank++) {
    k = std::max<int64_t>(k, headers.num_candidates(rank));
    for (size_t place = 0; place < draft.served[rank].size(); place++)
      owned = std::max<int64_t>(owned, static_cast<uint32_t>(headers.num_owned(rank, place)));
  }
  if (static_cast<int64_t>(values.shape(2)) < owned || values.shape(0) < (most ? num_ranks : 0) || values.shape(1) < most ||
      static_cast<int64_t>(values.shape(3)) < 1 + k + (k + 3) / 4)
    throw std::invalid_argument("the values do not hold the results of all trees");
  int64_t strides[3] = {values.stride(0), values.stride(1), values.stride(2)}, width = values.shape(3);
  nb::list all;
  std::vector<Conclusion> concluded = draft.conclude(values.data(), strides, width, headers, budgets);
  for (size_t i = 0; i < concluded.size(); i++) {
    draft.state(i).append(concluded[i].emitted);
    all.append(nb::cast(std::move(concluded[i])));
  }
  return all;
}

void bind_step(nb::module_& m) {
  nb::class_<Conclusion>(m, "Conclusion")
      .def_ro("tree", &Conclusion::tree)
      .def_prop_ro("shards", [](const Conclusion& each) { return *each.shards; })
      .def_ro("next_tokens", &Conclusion::next_tokens)
      .def_ro("path", &Conclusion::path)
      .def_ro("emitted", &Conclusion::emitted)
      .def_ro("kept", &Conclusion::kept)
      .def_ro("failure", &Conclusion::failure)
      .def_ro("may_end", &Conclusion::may_end)
      .def_prop_ro("is_spoilt", [](const Conclusion& each) { return !each.kept.has_value(); });
  nb::class_<BoundDraft>(m, "StepDraft")
      .def_ro("states", &BoundDraft::listed)
      .def_ro("trees", &BoundDraft::trees)
      .def_prop_ro("shards",
                   [](const BoundDraft& draft) {
                     nb::list all;
                     for (const auto& split : draft.shards) all.append(split ? nb::cast(*split) : nb::none());
                     return all;
                   })
      .def_ro("rank", &BoundDraft::rank)
      .def_ro("served", &BoundDraft::served)
      .def_prop_ro("mine", [](const BoundDraft& draft) { return draft.own_trees(); })
      .def_ro("num_entries", &BoundDraft::num_entries)
      .def("__len__", [](const BoundDraft& draft) { return draft.trees.size(); })
      .def_prop_ro("has_nodes",
                   [](const BoundDraft& draft) {
                     const auto& mine = draft.own_trees();
                     return std::any_of(mine.begin(), mine.end(),
                                        [&](int64_t tree) { return draft.trees[tree]->size() > 1; });
                   })
      .def("rows", &rows_of)
      .def("placement", &placement, "capacity"_a)
      .def(
          "headers",
          [](const BoundDraft& draft, uint64_t digest, int32_t num_command_bytes, int32_t num_candidates,
             bool is_compared) {
            Tokens words = draft.headers(digest, num_command_bytes, num_candidates, is_compared);
            size_t count = words.size();
            return owned_array<Row>(std::move(words), {count});
          },
          "digest"_a, "num_command_bytes"_a, "num_candidates"_a, "is_compared"_a)
      .def(
          "agrees",
          [](const BoundDraft& draft, Said said) {
            return draft.agrees(headers_of(said, draft.served.size(), most_served(draft)));
          },
          "said"_a)
      .def("conclude", &conclude, "values"_a, "said"_a, "budgets"_a);
  m.def(
      "draft_step",
      [](const nb::sequence& states, const std::vector<int64_t>& depths, Budgets& budgets, int64_t num_ranks,
         int64_t max_owned, size_t rank, std::optional<Served> served) {
        return new BoundDraft(states, depths, budgets, num_ranks, max_owned, rank, std::move(served));
      },
      "states"_a, "depths"_a, "budgets"_a, "num_ranks"_a, "max_owned"_a, "rank"_a, "served"_a.none() = nb::none());
  m.def(
      "selection_words",
      [](const nb::sequence& choices, const std::vector<Array>& positions) {
        std::vector<Choice> those;
        for (nb::handle each : choices)
          those.push_back({nb::cast<uint64_t>(each[0]), nb::cast<float>(each[1]), nb::cast<int32_t>(each[2]),
                           nb::cast<float>(each[3]), nb::cast<float>(each[4])});
        if (those.size() != positions.size()) throw std::invalid_argument("positions for each choice");
        std::vector<Positions> places;
        for (const Array& each : positions) places.push_back({each.data(), each.size()});
        std::vector<int32_t> words = selection_words(those, places);
        size_t count = words.size();
        return owned_array<Row>(std::move(words), {count});
      },
      "choices"_a, "positions"_a);
  m.def(
      "cache_moves",
      [](const nb::sequence& concluded, const std::vector<int64_t>& first_rows) {
        std::vector<const Conclusion*> those;
        for (Conclusion* each : pointers<Conclusion>(concluded)) those.push_back(each);
        if (those.size() != first_rows.size()) throw std::invalid_argument("a first row for each conclusion");
        auto [sources, targets] = cache_moves(those, first_rows);
        return stacked(std::move(sources), {&targets});
      },
      "concluded"_a, "first_rows"_a);
}

}  // namespace lpr
