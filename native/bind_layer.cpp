// Whole decoder layers on tensors that are given by address (lpr.model.cpu.decoder_layer), without the interpreter's lock.
#include "bindings.h"
#include "decoder_layer.h"

namespace lpr {

#ifdef LPR_HAS_TILES
using GivenNorm = std::tuple<uintptr_t, float, int>;  // weight, epsilon, weighing
using Strides = std::pair<int64_t, int64_t>;          // of a head, of a row

struct LayersInOrder {
  std::vector<LayerParts> layers;
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
             uintptr_t sines, int64_t batch, int64_t num_tokens, const std::vector<uintptr_t>& keys, Strides key_strides,
             const std::vector<uintptr_t>& values, Strides value_strides, uintptr_t write_rows, int32_t window,
             int32_t chunk, int threads) {
            size_t count = self.layers.size();
            if (keys.size() != count || values.size() != count) throw std::invalid_argument("keys of each layer");
            nb::gil_scoped_release released;
            uintptr_t added = 0;
            for (size_t i = 0; i < count; i++) {
              LayerStates states{i ? result : hidden, result, added, cosines, sines, batch, num_tokens, keys[i], values[i],
                                 key_strides.first, key_strides.second, value_strides.first, value_strides.second,
                                 reinterpret_cast<const int64_t*>(write_rows), {window, chunk}};
              LayerRun layer(self.layers[i], states, threads);
              added = layer.run(*reinterpret_cast<PageReader*>(reader), exact);
              if (i + 1 == count) layer.end(added);
            }
          });
#endif
}

}  // namespace lpr
