// Whole decoder layers on tensors that are given by address (lpr.model.cpu.decoder_layer), without the interpreter's lock.
#include "bindings.h"
#include "decoder_layer.h"
#include "draft_passes.h"

namespace lpr {

#ifdef LPR_HAS_TILES
using GivenNorm = std::tuple<uintptr_t, float, int>;  // weight, epsilon, weighing
using Strides = std::pair<int64_t, int64_t>;          // of a head, of a row
using Rule = std::pair<int32_t, int32_t>;             // window, chunk
using Entries = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;  // tokens, positions, cache rows
using Panels = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// Of each layer where keys and values lie.
using GivenCache = std::tuple<std::vector<uintptr_t>, Strides, std::vector<uintptr_t>, Strides>;
// What stands around the layers: embeddings, the last norm and the head.
using GivenEnds = std::tuple<uintptr_t, GivenNorm, GivenWeight>;

using Tables = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using GivenPlace = std::tuple<int64_t, int64_t, int64_t, int64_t, int32_t>;   // slot, page size, cached, most, last token
using GivenText = std::tuple<nb::object, Tokens, Tokens, Tokens, Numbers>;    // state, emitted, ends, text, its shares
using GivenChoice = std::tuple<uint64_t, float, int32_t, float, float>;        // of Choice
using GivenRules = std::tuple<Numbers, Numbers, Numbers, Numbers, double, int64_t>;  // of PassRules

struct LayersInOrder {
  std::vector<LayerParts> layers;

  void check(const GivenCache& cache) const {
    if (std::get<0>(cache).size() != layers.size() || std::get<2>(cache).size() != layers.size())
      throw std::invalid_argument("keys of each layer");
  }

  void run(PageReader& reader, bool exact, LayerStates states, const GivenCache& cache, int threads) const {
    const auto& [keys, key_strides, values, value_strides] = cache;
    std::tie(states.key_head, states.key_row) = key_strides;
    std::tie(states.value_head, states.value_row) = value_strides;
    for (size_t i = 0; i < layers.size(); i++) {
      states.keys = keys[i];
      states.values = values[i];
      LayerRun layer(layers[i], states, threads);
      states.added = layer.run(reader, exact);
      states.hidden = states.result;
      if (i + 1 == layers.size()) LayerRun(layers[i], states, threads).end(states.added);
    }
  }

  // Writes the logits of `tokens`, for the outputs of `panels`; `states` lack their hidden states.
  void run_model(PageReader& reader, const GivenEnds& ends, const int64_t* tokens, LayerStates states, const GivenCache& cache,
                 uintptr_t logits, const int32_t* panels, int64_t num_panels, int threads) const {
    const auto& [embeddings, norm, head] = ends;
    const auto& [weight, epsilon, weighing] = norm;
    bool is_half = layers[0].is_half;
    int64_t count = states.num_tokens, width = layers[0].qkv.inputs, bytes = width * (is_half ? 2 : 4);
    static thread_local Workspace memory;
    char* hidden = memory.at_least(static_cast<size_t>(count * bytes));
    for (int64_t i = 0; i < count; i++)
      std::memcpy(hidden + i * bytes, reinterpret_cast<const char*>(embeddings) + tokens[i] * bytes, static_cast<size_t>(bytes));
    uintptr_t place = states.hidden = states.result = reinterpret_cast<uintptr_t>(hidden);
    run(reader, false, states, cache, threads);
    run_part(Norm{place, 0, weight, place, {count, 1, width}, width, width, epsilon, static_cast<Weighing>(weighing)}, is_half, 1);
    Product product = weight_of(head).times(place, logits, count, is_half);
    product.panels = panels;
    product.num_panels = num_panels;
    multiply(product, threads);
  }
};
#endif

void bind_layer(nb::module_& m) {
#ifdef LPR_HAS_TILES
  nb::class_<LayerParts>(m, "DecoderLayer")
      .def(
          "__init__",
          [](LayerParts* self, bool is_half, const GivenWeight& qkv, const GivenWeight& out, const GivenWeight& gate_up,
             const GivenWeight& down, const std::vector<GivenNorm>& given, int heads, int kv_heads, int dim,
             int activation, float scale) {
            std::vector<NormWeight> norms;
            for (const auto& [weight, epsilon, weighing] : given)
              norms.push_back({weight, epsilon, static_cast<Weighing>(weighing)});
            if (norms.size() != 2 && norms.size() != 4) throw std::invalid_argument("a layer has two norms or four");
            new (self) LayerParts{is_half, weight_of(qkv), weight_of(out), weight_of(gate_up), weight_of(down),
                                  norms, heads, kv_heads, dim, static_cast<Activation>(activation), scale};
          },
          "is_half"_a, "qkv"_a, "out"_a, "gate_up"_a, "down"_a, "norms"_a, "heads"_a, "kv_heads"_a, "dim"_a,
          "activation"_a, "scale"_a);
  nb::class_<LayersInOrder>(m, "DecoderLayers")
      .def("__init__",
           [](LayersInOrder* self, const std::vector<const LayerParts*>& layers) {
             new (self) LayersInOrder;
             for (const LayerParts* each : layers) self->layers.push_back(*each);
           })
      .def(
          "run",
          [](const LayersInOrder& self, uintptr_t reader, bool exact, uintptr_t hidden, uintptr_t result, uintptr_t cosines,
             uintptr_t sines, int64_t batch, int64_t num_tokens, const GivenCache& cache, uintptr_t write_rows, Rule rule,
             int threads) {
            self.check(cache);
            nb::gil_scoped_release released;
            LayerStates states{hidden, result, 0, cosines, sines, batch, num_tokens, 0, 0, 0, 0, 0, 0,
                               reinterpret_cast<const int64_t*>(write_rows), {rule.first, rule.second}};
            self.run(*reinterpret_cast<PageReader*>(reader), exact, states, cache, threads);
          })
      .def(
          "run_model",
          [](const LayersInOrder& self, uintptr_t reader, const GivenEnds& ends, uintptr_t cosines, uintptr_t sines,
             const Entries& entries, const GivenCache& cache, Rule rule, uintptr_t logits, const Panels& panels, int threads) {
            self.check(cache);
            nb::gil_scoped_release released;
            int64_t count = static_cast<int64_t>(entries.shape(1));
            LayerStates states{0, 0, 0, cosines, sines, 1, count, 0, 0, 0, 0, 0, 0, entries.data() + 2 * count,
                               {rule.first, rule.second}};
            self.run_model(*reinterpret_cast<PageReader*>(reader), ends, entries.data(), states, cache, logits, panels.data(),
                           static_cast<int64_t>(panels.shape(0)), threads);
          })
      .def(
          "make_passes",
          [](const LayersInOrder& self, const GivenEnds& ends, const Tables& tables, const GivenPlace& place,
             const GivenText& text, const GivenChoice& chosen, const GivenRules& given_rules, uintptr_t cosines,
             uintptr_t sines, const GivenCache& cache, Rule rule, const Panels& given, int threads) {
            self.check(cache);
            auto [slot, page_size, num_cached, most, token] = place;
            Choice choice = std::apply([](auto... each) { return Choice{each...}; }, chosen);
            PassRules rules = std::apply([](auto... each) { return PassRules{each...}; }, given_rules);
            int64_t columns = static_cast<int64_t>(tables.shape(1));
            if (slot < 0 || slot >= static_cast<int64_t>(tables.shape(0))) throw std::invalid_argument("no table of this slot");
            if (num_cached + most > columns * page_size)
              throw std::invalid_argument("a sequence is longer than its table");
            auto [state, emitted, stops, first, shares] = text;
            PassStart start{state.is_none() ? nullptr : state_of(state), emitted, tables.data() + slot * columns, page_size,
                            num_cached, most, token, stops, first, shares};
            std::vector<int32_t> panels(given.data(), given.data() + given.shape(0));
            nb::gil_scoped_release released;
            const LayerParts& parts = self.layers[0];
            PackedWeight head = weight_of(std::get<2>(ends));
            size_t row_bytes = static_cast<size_t>(head.outputs * (parts.is_half ? 2 : 4)), num_filled = 0;
            static thread_local Workspace memory;
            char* logits = memory.at_least(rules.by_entries.size() * row_bytes);
            auto compute = [&](PageReader& reader, const int32_t* tokens, const std::vector<int64_t>& rows, int64_t offset) {
              size_t count = rows.size();
              for (; num_filled < count; num_filled++) {  // with -inf
                if (parts.is_half) std::fill_n(reinterpret_cast<uint16_t*>(logits + num_filled * row_bytes), head.outputs, 0xff80);
                else std::fill_n(reinterpret_cast<float*>(logits + num_filled * row_bytes), head.outputs, -INFINITY);
              }
              for (size_t i = 1; i < count; i++) {
                int32_t panel = static_cast<int32_t>(tokens[i] / kPanel);
                auto at = std::lower_bound(panels.begin(), panels.end(), panel);
                if (at == panels.end() || *at != panel) panels.insert(at, panel);
              }
              std::vector<int64_t> wide(tokens, tokens + count);
              uintptr_t turned = static_cast<uintptr_t>(offset * parts.dim * (parts.is_half ? 2 : 4));
              LayerStates states{0, 0, 0, cosines + turned, sines + turned, 1, static_cast<int64_t>(count), 0, 0, 0, 0, 0, 0,
                                 rows.data(), {rule.first, rule.second}};
              self.run_model(reader, ends, wide.data(), states, cache, reinterpret_cast<uintptr_t>(logits), panels.data(),
                             static_cast<int64_t>(panels.size()), threads);
              return reinterpret_cast<uintptr_t>(logits);
            };
            std::vector<MadePass> made = make_passes(std::move(start), rules, choice, head.outputs, parts.is_half, threads, compute);
            nb::gil_scoped_acquire held;
            nb::list found;
            for (MadePass& each : made) found.append(nb::make_tuple(each.text, each.shares, each.tokens, each.odds, each.ms));
            return found;
          });
#endif
}

}  // namespace lpr
