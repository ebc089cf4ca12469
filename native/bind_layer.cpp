// Whole decoder layers on tensors that are given by address (lpr.model.cpu.decoder_layer), without the interpreter's lock.
#include "bindings.h"
#include "decoder_layer.h"

namespace lpr {

#ifdef LPR_HAS_TILES
using GivenNorm = std::tuple<uintptr_t, float, int>;  // weight, epsilon, weighing
using Strides = std::pair<int64_t, int64_t>;          // of a head, of a row
using Rule = std::pair<int32_t, int32_t>;             // window, chunk
using Entries = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;  // tokens, positions, cache rows
using Panels = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// Of each layer where keys and values lie.
using GivenCache = std::tuple<std::vector<uintptr_t>, Strides, std::vector<uintptr_t>, Strides>;

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
          [](const LayersInOrder& self, uintptr_t reader, uintptr_t embeddings, const GivenNorm& norm, const GivenWeight& head,
             uintptr_t cosines, uintptr_t sines, const Entries& entries, const GivenCache& cache, Rule rule, uintptr_t logits,
             const Panels& panels, int threads) {
            self.check(cache);
            nb::gil_scoped_release released;
            const LayerParts& parts = self.layers[0];
            int64_t count = static_cast<int64_t>(entries.shape(1)), width = parts.qkv.inputs;
            int64_t bytes = width * (parts.is_half ? 2 : 4);
            static thread_local Workspace memory;
            char* hidden = memory.at_least(static_cast<size_t>(count * bytes));
            for (int64_t i = 0; i < count; i++)
              std::memcpy(hidden + i * bytes, reinterpret_cast<const char*>(embeddings) + entries.data()[i] * bytes,
                          static_cast<size_t>(bytes));
            uintptr_t place = reinterpret_cast<uintptr_t>(hidden);
            LayerStates states{place, place, 0, cosines, sines, 1, count, 0, 0, 0, 0, 0, 0, entries.data() + 2 * count,
                               {rule.first, rule.second}};
            self.run(*reinterpret_cast<PageReader*>(reader), false, states, cache, threads);
            auto [weight, epsilon, weighing] = norm;
            run_part(Norm{place, 0, weight, place, {count, 1, width}, width, width, epsilon, static_cast<Weighing>(weighing)},
                     parts.is_half, 1);
            Product product = weight_of(head).times(place, logits, count, parts.is_half);
            product.panels = panels.data();
            product.num_panels = static_cast<int64_t>(panels.shape(0));
            multiply(product, threads);
          });
#endif
}

}  // namespace lpr
