// States, budgets and a step of a batch: one call drafts for all sequences, one advances all of them (lpr.core.step).
#include "bindings.h"

namespace lpr {

nb::object stacked(Columns&& columns) {
  size_t count = columns.first.size();
  std::vector<int64_t> all = std::move(columns.first);
  for (const auto* each : {&columns.second, &columns.third}) all.insert(all.end(), each->begin(), each->end());
  return owned_array<int64_t, 2>(std::move(all), {3, count});
}

// A state, and the request's own list of tokens.
struct BoundState : SequenceState {
  nb::list listed;
  size_t num_listed;

  BoundState(nb::list tokens, const nb::object& params, const nb::object& config, int64_t num_ranks,
             std::shared_ptr<SuffixIndex> shared, const std::optional<std::vector<int64_t>>& computed,
             std::optional<int64_t> longest, const nb::object& stop_ids,
             Tokens prediction, int64_t num_prompt)
      : SequenceState(nb::cast<Tokens>(tokens), nb::cast<std::string>(nb::repr(params)), sizes_of(config),
                      computed && !computed->empty() ? *computed : std::vector<int64_t>(num_ranks, 0),
                      std::move(shared), longest.value_or(std::numeric_limits<int64_t>::max()), each_of(stop_ids),
                      seed_of(params), std::move(prediction), num_prompt),
        listed(std::move(tokens)), num_listed(SequenceState::tokens.size()) {}

  // The list, with the tokens of all steps: they are added where one looks.
  nb::list& listed_now() {
    for (; num_listed < tokens.size(); num_listed++) listed.append(tokens[num_listed]);
    return listed;
  }

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
  nb::list listed;
  nb::object header, columns, entries;
  int64_t num_row_entries = 0, num_results = 0, longest = 0;

  BoundDraft(nb::list those, Budgets& budgets, size_t rank, Served served, int64_t capacity, int32_t num_candidates,
             int32_t num_command_bytes, const std::optional<std::vector<uint64_t>>& digests, int num_threads)
      : StepDraft(states_of(those), budgets, rank, std::move(served), capacity, num_candidates, num_threads),
        listed(std::move(those)) {
    add_rows();
    Tokens words = StepDraft::header(num_command_bytes, digests);
    size_t count = words.size();
    header = owned_array<int32_t, 1>(std::move(words), {count});
  }

  static std::vector<SequenceState*> states_of(const nb::list& those) {
    std::vector<SequenceState*> found;
    size_t count = those.size();
    found.reserve(count);
    for (size_t i = 0; i < count; i++) {
      if (i + 8 < count) __builtin_prefetch(nb::handle(those[i + 8]).ptr());
      found.push_back(nb::cast<BoundState*>(nb::handle(those[i])));
    }
    return found;
  }

 private:
  void add_rows() {
    size_t count = own_trees().size();
    std::vector<int64_t> found(3 * count);
    Tokens all;
    all.reserve(3 * count);
    const TokenTree none(0);  // in place of a tree that is only a root
    for (size_t row = 0; row < count; row++) {
      int64_t i = own_trees()[row], cached = states[i]->num_computed_tokens[rank];
      int64_t before = static_cast<int64_t>(all.size());
      add_row_entries(*states[i], trees[i] ? *trees[i] : none, own(i), rank, all);
      int64_t length = (static_cast<int64_t>(all.size()) - before) / 3;
      found[row] = cached;
      found[count + row] = static_cast<int64_t>(own(i).nodes.size());
      found[2 * count + row] = length;
      num_results += found[count + row];
      num_row_entries += length;
      longest = std::max(longest, cached + length);
    }
    columns = owned_array<int64_t, 2>(std::move(found), {3, count});
    size_t size = all.size();
    entries = owned_array<int32_t, 1>(std::move(all), {size});
  }
};

// The conclusions of a step, and the Python objects of its states.
struct BoundConcluded : Concluded {
  nb::list listed;
};

using Gathered = nb::ndarray<const int32_t, nb::ndim<2>, nb::device::cpu>;

nb::tuple conclude(BoundDraft& draft, const Gathered& payloads, int64_t width, Budgets& budgets,
                   int64_t num_guesses, const std::vector<int64_t>& drafting) {
  if (payloads.shape(1) && payloads.stride(1) != 1) throw std::invalid_argument("a payload's words are neighbours");
  Payloads all{payloads.data(), static_cast<int64_t>(payloads.shape(0)), payloads.stride(0),
               static_cast<int64_t>(payloads.shape(1)), draft.capacity, width, num_guesses};
  Columns moves;
  auto concluded = std::make_unique<BoundConcluded>(BoundConcluded{draft.conclude(all, budgets, moves, drafting), draft.listed});
  return nb::make_tuple(nb::cast(concluded.release(), nb::rv_policy::take_ownership), stacked(std::move(moves)));
}

// Steps, nodes and tokens since the last call, and drafted and accepted nodes by (source, depth); none without a step.
nb::object take_counts(BoundState& state) {
  StepCounts counts = std::move(state.counts);
  state.counts = {};
  if (!counts.num_steps) return nb::none();
  auto by_place = [&](const std::vector<int64_t>& all) {
    nb::dict found;
    found[nb::make_tuple(0, 0)] = counts.num_steps;
    for (size_t at = 0; at < all.size(); at++)
      if (all[at]) found[nb::make_tuple(at % kNumSources, at / kNumSources)] = all[at];
    return found;
  };
  return nb::make_tuple(counts.num_steps, counts.num_nodes, counts.num_tokens, by_place(counts.drafted),
                        by_place(counts.accepted));
}

// What is known of a step beforehand (lpr/core/step.py).
nb::tuple expectations(const nb::list& states, size_t num_ranks, double first_tokens, int64_t first_steps) {
  struct Known {
    int64_t count = 0, longest = 0;
    double expected = 0;
  };
  std::vector<std::pair<Homes, Known>> found;
  std::vector<int64_t> pending(num_ranks, 0);
  for (const SequenceState* state : BoundDraft::states_of(states)) {
    auto same = [&](const auto& each) { return each.first == state->homes(); };
    auto known = std::find_if(found.begin(), found.end(), same);
    if (known == found.end()) known = found.insert(found.end(), {state->homes(), {}});
    known->second.count++;
    known->second.longest = std::max<int64_t>(known->second.longest, state->tokens.size());
    known->second.expected += (first_tokens * first_steps + state->num_emitted) / (first_steps + state->num_steps);
    for (int64_t rank : state->homes()) pending[rank] += state->num_above(rank);
  }
  nb::dict groups;
  for (const auto& [homes, known] : found)
    groups[nb::tuple(nb::cast(homes))] = nb::make_tuple(known.count, known.longest, known.expected);
  return nb::make_tuple(groups, pending);
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
      .def_prop_ro("tokens", [](BoundState& state) -> nb::list { return state.listed_now(); })
      .def_rw("num_computed_tokens", &BoundState::num_computed_tokens)
      .def_prop_rw("homes", [](const BoundState& state) { return state.homes(); },
                   [](BoundState& state, std::vector<int64_t> ranks) { state.set_homes(std::move(ranks)); })
      .def(
          "continuation",
          [](const BoundState& state, const Tokens& tokens, int count) {
            return state.drafter ? state.drafter->continuation(tokens, count) : std::pair<Tokens, Numbers>();
          },
          "tokens"_a, "count"_a)
      .def_prop_ro("probabilities", &BoundState::last_probabilities)
      .def_rw("care_at", &BoundState::care_at)
      .def_rw("num_steps", &BoundState::num_steps)
      .def_rw("num_emitted", &BoundState::num_emitted)
      .def("take_counts", &take_counts)
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
  nb::class_<BoundConcluded>(m, "Concluded")
      .def("__len__", [](const BoundConcluded& step) { return step.size(); })
      .def(
          "__getitem__",
          [](BoundConcluded& step, int64_t index) -> const Conclusion& {
            int64_t count = static_cast<int64_t>(step.size());
            if (index < -count || index >= count) throw nb::index_error();
            return step.at(index < 0 ? index + count : index);
          },
          nb::rv_policy::reference_internal)
      .def_ro("ending", &BoundConcluded::ending)
      .def_ro("grown", &BoundConcluded::grown)
      .def_ro("with_nan", &BoundConcluded::with_nan)
      .def("publish", &BoundConcluded::publish);
  nb::class_<BoundDraft>(m, "StepDraft")
      .def_ro("states", &BoundDraft::listed)
      .def_prop_ro("trees",
                   [](BoundDraft& draft) {
                     for (size_t i = 0; i < draft.trees.size(); i++)
                       if (draft.roots[i] != kNoRoot) draft.tree(i);
                     return draft.trees;
                   })
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
      .def_ro("columns", &BoundDraft::columns)
      .def_ro("entries", &BoundDraft::entries)
      .def_prop_ro("totals",
                   [](const BoundDraft& draft) {
                     return nb::make_tuple(draft.num_row_entries, draft.num_results, draft.longest);
                   })
      .def_prop_ro("placement", [](BoundDraft& draft) { return stacked(draft.placement()); })
      .def_ro("header", &BoundDraft::header)
      .def_ro("num_entries", &BoundDraft::num_entries)
      .def("__len__", [](const BoundDraft& draft) { return draft.trees.size(); })
      .def("conclude", &conclude, "payloads"_a, "width"_a, "budgets"_a,
           "num_guesses"_a = 0, "drafting"_a = std::vector<int64_t>{});
  m.def("expectations", &expectations, "states"_a, "num_ranks"_a, "first_tokens"_a, "first_steps"_a);
  m.def(
      "draft_step",
      [](nb::list states, Budgets& budgets, size_t rank, Served served, int64_t capacity, int32_t num_candidates,
         int32_t num_command_bytes, const std::optional<std::vector<uint64_t>>& digests, int num_threads) {
        return new BoundDraft(std::move(states), budgets, rank, std::move(served), capacity, num_candidates,
                              num_command_bytes, digests, num_threads);
      },
      "states"_a, "budgets"_a, "rank"_a, "served"_a, "capacity"_a, "num_candidates"_a = 0, "num_command_bytes"_a = 0,
      "digests"_a.none() = nb::none(), "num_threads"_a = 1);
}

}  // namespace lpr
