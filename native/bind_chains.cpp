// Chains for another engine's batch: one call reads what its sequences emitted and drafts for all of them.
#include "bindings.h"
#include "chains.h"

namespace lpr {

static std::vector<ChainState*> states_of(const nb::list& listed) {
  std::vector<ChainState*> states;
  for (nb::handle each : listed) states.push_back(nb::cast<ChainState*>(each));
  return states;
}

static std::vector<Chains::Text> texts_of(const std::vector<Array>& arrays) {
  std::vector<Chains::Text> texts;
  for (const Array& each : arrays) texts.push_back({each.data(), each.size()});
  return texts;
}

std::vector<Tokens> draft_chains(Chains& chains, const nb::list& listed, const std::vector<Array>& arrays,
                                 const std::vector<int64_t>& depths) {
  return chains.draft(states_of(listed), texts_of(arrays), depths);
}

std::vector<std::pair<Tokens, Tokens>> draft_trees(Chains& chains, const nb::list& listed,
                                                   const std::vector<Array>& arrays, int64_t depth) {
  return chains.draft_trees(states_of(listed), texts_of(arrays), depth);
}

void bind_chains(nb::module_& m) {
  nb::class_<ChainState>(m, "ChainState")
      .def(
          "__init__",
          [](ChainState* self, const nb::object& config, std::shared_ptr<SuffixIndex> shared) {
            new (self) ChainState(sizes_of(config), std::move(shared));
          },
          "config"_a, "shared"_a.none() = nb::none())
      .def("__len__", [](const ChainState& state) { return state.tokens.size(); })
      .def(
          "continues_in",
          [](const ChainState& state, const Array& text) { return state.continues_in(text.data(), text.size()); },
          "text"_a)
      .def("text_from", &ChainState::text_from, "begin"_a);
  nb::class_<Chains>(m, "Chains")
      .def(nb::init<int64_t, StepRow>(), "num_nodes"_a, "times"_a)
      .def_rw("times", &Chains::times)
      .def_rw("plain_part", &Chains::plain_part)
      .def("draft", &draft_chains, "states"_a, "texts"_a, "depths"_a)
      .def("draft_trees", &draft_trees, "states"_a, "news"_a, "depth"_a);
}

}  // namespace lpr
