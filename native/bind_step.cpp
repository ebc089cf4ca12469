// States, budgets and a step of a batch: one call drafts for all sequences, one advances all of them (lpr.core.step).
#include "bindings.h"

namespace lpr {

nb::object stacked(Columns&& columns) {
  size_t count = columns.first.size();
  std::vector<int64_t> all = std::move(columns.first);
  for (const auto* each : {&columns.second, &columns.third}) all.insert(all.end(), each->begin(), each->end());
  return owned_array<int64_t, 2>(std::move(all), {3, count});
}

// A state, and the request's own list of tokens, which grows with it.
struct BoundState : SequenceState {
  nb::list listed;

  BoundState(nb::list tokens, const nb::object& params, const nb::object& config, int64_t num_ranks,
             std::shared_ptr<SuffixIndex> shared, const std::optional<std::vector<int64_t>>& computed,
             std::optional<int64_t> longest, const nb::object& stop_ids,
             Tokens prediction, int64_t num_prompt)
      : SequenceState(nb::cast<Tokens>(tokens), nb::cast<std::string>(nb::repr(params)), sizes_of(config),
                      computed && !computed->empty() ? *computed : std::vector<int64_t>(num_ranks, 0),
                      std::move(shared), longest.value_or(std::numeric_limits<int64_t>::max()), each_of(stop_ids),
                      seed_of(params), std::move(prediction), num_prompt),
        listed(std::move(tokens)) {}

 private:
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

const SequenceState* state_of(nb::handle state) { return nb::cast<BoundState*>(state); }

// A step's draft, the Python objects of its states, which must live as long, and its arrays for Python.
struct BoundDraft : StepDraft {
  nb::list listed, rows;
  nb::object header;

  BoundDraft(nb::list those, Budgets& budgets, size_t rank, Served served, int64_t capacity, int32_t num_candidates,
             int32_t num_command_bytes, const std::optional<std::vector<uint64_t>>& digests)
      : StepDraft(states_of(those), budgets, rank, std::move(served), capacity, num_candidates),
        listed(std::move(those)) {
    add_rows();
    Tokens words = StepDraft::header(num_command_bytes, digests);
    size_t count = words.size();
    header = owned_array<int32_t, 1>(std::move(words), {count});
  }

 private:
  // Rows of equal length are views of one array, which is made faster than an array for each.
  void add_rows() {
    Tokens all;
    std::vector<size_t> ends;
    for (int64_t i : own_trees()) {
      Tokens entries = row_entries(*states[i], *trees[i], own(i), rank);
      all.insert(all.end(), entries.begin(), entries.end());
      ends.push_back(all.size());
    }
    auto add = [&](int64_t i, nb::handle entries) {
      rows.append(nb::make_tuple(states[i]->num_computed_tokens[rank], own(i).nodes.size(), entries));
    };
    size_t count = ends.size(), length = count ? ends[0] : 0, place = 0;
    bool even = count > 1 && all.size() == count * length;
    for (size_t each = 0; each < count; each++) even = even && ends[each] == (each + 1) * length;
    if (even) {
      for (nb::handle entries : owned_array<int32_t, 3>(std::move(all), {count, 3, length / 3}))
        add(own_trees()[place++], entries);
      return;
    }
    size_t begin = 0;
    for (size_t end : ends) {
      Tokens entries(all.begin() + begin, all.begin() + end);
      add(own_trees()[place++], owned_array<int32_t, 2>(std::move(entries), {3, (end - begin) / 3}));
      begin = end;
    }
  }

  static std::vector<SequenceState*> states_of(const nb::list& those) {
    std::vector<SequenceState*> found;
    for (nb::handle state : those) found.push_back(nb::cast<BoundState*>(state));
    return found;
  }
};

using Gathered = nb::ndarray<const int32_t, nb::ndim<2>, nb::device::cpu>;

nb::tuple conclude(BoundDraft& draft, const Gathered& payloads, int64_t width, Budgets& budgets,
                   int64_t num_guesses, const std::vector<int64_t>& drafting) {
  if (payloads.shape(1) && payloads.stride(1) != 1) throw std::invalid_argument("a payload's words are neighbours");
  Payloads all{payloads.data(), static_cast<int64_t>(payloads.shape(0)), payloads.stride(0),
               static_cast<int64_t>(payloads.shape(1)), draft.capacity, width, num_guesses};
  Columns moves;
  nb::list found;
  for (Conclusion& each : draft.conclude(all, budgets, moves, drafting)) {
    nb::list& tokens = static_cast<BoundState*>(draft.states[found.size()])->listed;
    for (int32_t token : each.emitted) tokens.append(token);
    found.append(nb::cast(std::move(each)));
  }
  return nb::make_tuple(found, stacked(std::move(moves)));
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

void begin_step(Budgets& budgets, const nb::dict& prices) {
  budgets.begin_step();
  for (auto [homes, price] : prices)
    budgets.set_price(nb::cast<Homes>(homes), nb::cast<StepRow>(price[0]), nb::cast<double>(price[1]));
}

void bind_step(nb::module_& m) {
  nb::class_<Budgets>(m, "Budgets")
      .def(
          "__init__",
          [](Budgets* self, const nb::object& config, int64_t num_ranks, std::optional<StepRow> first_times) {
            new (self) Budgets(limits_of(config, num_ranks), std::move(first_times));
          },
          "config"_a, "num_ranks"_a = 1, "first_times"_a.none() = nb::none())
      .def_rw("first_times", &Budgets::first_times)
      .def("begin_step", &begin_step, "prices"_a)
      .def("__len__", &Budgets::size);
  nb::class_<Shard>(m, "Shard").def_ro("nodes", &Shard::nodes).def_ro("owned", &Shard::owned);
  nb::class_<BoundState>(m, "SequenceState")
      .def(nb::init<nb::list, const nb::object&, const nb::object&, int64_t, std::shared_ptr<SuffixIndex>,
                    const std::optional<std::vector<int64_t>>&, std::optional<int64_t>, const nb::object&, Tokens, int64_t>(),
           "tokens"_a, "params"_a, "config"_a, "num_ranks"_a = 1, "shared"_a.none() = nb::none(),
           "num_computed_tokens"_a.none() = nb::none(), "longest"_a.none() = nb::none(), "stop_ids"_a = nb::tuple(),
           "prediction"_a = Tokens{}, "num_prompt"_a = 0)
      .def_ro("tokens", &BoundState::listed)
      .def_rw("num_computed_tokens", &BoundState::num_computed_tokens)
      .def_prop_rw("homes", [](const BoundState& state) { return state.homes(); },
                   [](BoundState& state, std::vector<int64_t> ranks) { state.set_homes(std::move(ranks)); })
      .def(
          "continuation",
          [](const BoundState& state, const Tokens& tokens, int count) {
            return state.drafter ? state.drafter->continuation(tokens, count) : std::pair<Tokens, Numbers>();
          },
          "tokens"_a, "count"_a)
      .def_ro("probabilities", &BoundState::probabilities)
      .def_prop_ro("num_pending", &BoundState::num_pending)
      .def_prop_ro("digest", &BoundState::digest);
  nb::class_<Conclusion>(m, "Conclusion")
      .def_ro("tree", &Conclusion::tree)
      .def_prop_ro("shards", [](const Conclusion& each) { return *each.shards; })
      .def_ro("next_tokens", &Conclusion::next_tokens)
      .def_ro("path", &Conclusion::path)
      .def_ro("emitted", &Conclusion::emitted)
      .def_ro("has_nan", &Conclusion::has_nan)
      .def_ro("failure", &Conclusion::failure)
      .def_ro("may_end", &Conclusion::may_end);
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
      .def_ro("capacity", &BoundDraft::capacity)
      .def_prop_ro("mine", &BoundDraft::own_trees)
      .def_ro("num_candidates", &BoundDraft::num_candidates)
      .def_ro("rows", &BoundDraft::rows)
      .def_prop_ro("placement", [](const BoundDraft& draft) { return stacked(draft.placement()); })
      .def_ro("header", &BoundDraft::header)
      .def_ro("num_entries", &BoundDraft::num_entries)
      .def("__len__", [](const BoundDraft& draft) { return draft.trees.size(); })
      .def("conclude", &conclude, "payloads"_a, "width"_a, "budgets"_a,
           "num_guesses"_a = 0, "drafting"_a = std::vector<int64_t>{});
  m.def(
      "draft_step",
      [](nb::list states, Budgets& budgets, size_t rank, Served served, int64_t capacity, int32_t num_candidates,
         int32_t num_command_bytes, const std::optional<std::vector<uint64_t>>& digests) {
        return new BoundDraft(std::move(states), budgets, rank, std::move(served), capacity, num_candidates,
                              num_command_bytes, digests);
      },
      "states"_a, "budgets"_a, "rank"_a, "served"_a, "capacity"_a, "num_candidates"_a = 0, "num_command_bytes"_a = 0,
      "digests"_a.none() = nb::none());
}

}  // namespace lpr
