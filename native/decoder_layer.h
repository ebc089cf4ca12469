// A decoder layer of Llama's structure over the entries of a step, as one call: lpr.model.cpu.decoder_layer.
//
// Its parts are those of products.h, elementwise.h and paged_attention.h, in the order and with the roundings of the
// module. One call in place of ten saves the time between them, which is a third of a step of one token.
#pragma once

#include <vector>

#include "amx_products.h"
#include "elementwise.h"
#include "paged_step.h"
#include "workspace.h"

#ifdef LPR_HAS_TILES
namespace lpr {

constexpr int64_t kAloneValues = 1 << 13;    // up to which a part runs on the calling thread, a few us: others fall asleep
constexpr int64_t kRowsPerItem = 64;         // whose keys and values a thread writes
constexpr int64_t kAloneProducts = 1 << 18;  // multiplications up to which a product does

struct NormWeight {
  uintptr_t weight;
  float epsilon;
  Weighing weighing;
};

// What of a layer stays from step to step.
struct LayerParts {
  bool is_half;
  PackedWeight qkv, out, gate_up, down;
  std::vector<NormWeight> norms;  // before attention and before the MLP; then of queries' and of keys' heads, or none
  int heads, kv_heads, dim;
  Activation activation;
  float scale;
};

// What a step gives it; the entries are [batch, num_tokens].
struct LayerStates {
  uintptr_t hidden, result;     // [entries, inputs of qkv]; they may be the same
  uintptr_t added;              // the last part of the layer before, by which `hidden` is to grow first, or 0
  uintptr_t cosines, sines;     // [entries, dim]
  int64_t batch, num_tokens;
  uintptr_t keys, values;       // of the cache, [kv_heads, rows, dim]
  int64_t key_head, key_row, value_head, value_row;  // strides in elements
  const int64_t* write_rows;    // cache row of each entry
  KeyRule rule;
};

class LayerRun {
 public:
  LayerRun(const LayerParts& parts, const LayerStates& states, int num_threads)
      : parts_(parts), states_(states), rows_(states.batch * states.num_tokens), size_(parts.is_half ? 2 : 4),
        num_threads_(num_threads) {}

  // All but the layer's last sum, which belongs to the norm that comes next: returns what `result` is to grow by.
  uintptr_t run(PageReader& pages, bool exact) {
    int64_t width = parts_.qkv.inputs, joined = parts_.qkv.outputs, mixed_width = parts_.out.inputs;
    int64_t gated_width = parts_.down.inputs;
    static thread_local Workspace memory, kept;  // from layer to layer
    size_t needed = static_cast<size_t>(rows_ * size_ * (width + joined + mixed_width + 3 * gated_width)) + 6 * kCacheLine;
    next_ = reinterpret_cast<uintptr_t>(memory.at_least(needed));
    uintptr_t residual = reinterpret_cast<uintptr_t>(kept.at_least(static_cast<size_t>(rows_ * size_ * width)));
    uintptr_t normed = take(width), heads = take(joined), mixed = take(mixed_width);
    uintptr_t gates = take(2 * gated_width), gated = take(gated_width);

    norm(parts_.norms[0], states_.hidden, states_.added, normed);
    multiply(parts_.qkv, normed, heads);
    turn_heads(heads);
    keep_keys(heads);
    attend(pages, exact, heads, mixed);
    multiply(parts_.out, mixed, residual);
    norm(parts_.norms[1], residual, states_.hidden, normed);
    multiply(parts_.gate_up, normed, gates);
    run_part(Gate{gates, gated, {rows_, 1, gated_width}, parts_.activation}, parts_.is_half, threads(rows_ * gated_width));
    multiply(parts_.down, gated, states_.result);
    return residual;
  }

  // Adds what `run` has returned.
  void end(uintptr_t added) const {
    int64_t width = parts_.qkv.inputs;
    run_part(Sum{states_.result, added, {rows_, 1, width}}, parts_.is_half, threads(rows_ * width));
  }

 private:
  uintptr_t take(int64_t width) {
    uintptr_t begin = (next_ + 63) / 64 * 64;
    next_ = begin + static_cast<uintptr_t>(rows_ * width * size_);
    return begin;
  }

  int threads(int64_t values) const { return values <= kAloneValues ? 1 : num_threads_; }

  void norm(const NormWeight& by, uintptr_t states, uintptr_t added, uintptr_t out) const {
    int64_t width = parts_.qkv.inputs;
    run_part(Norm{states, added, by.weight, out, {rows_, 1, width}, width, width, by.epsilon, by.weighing}, parts_.is_half,
             threads(rows_ * width));
  }

  void multiply(const PackedWeight& weight, uintptr_t given, uintptr_t out) const {
    Product product = weight.times(given, out, rows_, parts_.is_half);
    bool is_small = rows_ * weight.outputs * weight.inputs <= kAloneProducts;
    lpr::multiply(product, is_small ? 1 : num_threads_);
  }

  // Norms of heads, if the layer has any, and the rotary embedding of queries and keys.
  void turn_heads(uintptr_t heads) const {
    int64_t dim = parts_.dim, stride = parts_.qkv.outputs, first = 0;
    int counts[2] = {parts_.heads, parts_.kv_heads};
    for (size_t side = 0; side + 2 < parts_.norms.size(); first += counts[side] * dim, side++) {
      const NormWeight& by = parts_.norms[2 + side];
      uintptr_t states = heads + static_cast<uintptr_t>(first * size_);
      run_part(Norm{states, 0, by.weight, states, {rows_, counts[side], dim}, stride, stride, by.epsilon, by.weighing},
               parts_.is_half, threads(rows_ * counts[side] * dim));
    }
    int together = parts_.heads + parts_.kv_heads;
    run_part(Rotation{heads, states_.cosines, states_.sines, {rows_, together, dim}, stride}, parts_.is_half,
             threads(rows_ * together * dim));
  }

  // Writes keys and values into the cache.
  void keep_keys(uintptr_t heads) const {
    int64_t items = (rows_ + kRowsPerItem - 1) / kRowsPerItem;
    parallel_for(items, num_threads_, [&](int64_t item, int) {
      for (int64_t i = item * kRowsPerItem; i < std::min(rows_, (item + 1) * kRowsPerItem); i++) keep_row(heads, i);
    });
  }

  void keep_row(uintptr_t heads, int64_t i) const {
    size_t bytes = static_cast<size_t>(parts_.dim * size_);
    const char* from = reinterpret_cast<const char*>(
        heads + static_cast<uintptr_t>((i * parts_.qkv.outputs + parts_.heads * int64_t{parts_.dim}) * size_));
    int64_t row = states_.write_rows[i];
    for (int head = 0; head < parts_.kv_heads; head++, from += bytes)
      std::memcpy(reinterpret_cast<char*>(states_.keys) + (head * states_.key_head + row * states_.key_row) * size_, from, bytes);
    for (int head = 0; head < parts_.kv_heads; head++, from += bytes)
      std::memcpy(reinterpret_cast<char*>(states_.values) + (head * states_.value_head + row * states_.value_row) * size_, from,
                  bytes);
  }

  void attend(PageReader& pages, bool exact, uintptr_t heads, uintptr_t mixed) const {
    std::memset(reinterpret_cast<void*>(mixed), 0, static_cast<size_t>(rows_ * parts_.out.inputs * size_));  // padding
    int64_t stride = parts_.qkv.outputs;
    LayerCall call{reinterpret_cast<const void*>(heads), reinterpret_cast<const void*>(states_.keys),
                   reinterpret_cast<const void*>(states_.values), reinterpret_cast<void*>(mixed), states_.num_tokens,
                   states_.num_tokens * stride, parts_.dim, stride,
                   states_.key_head, states_.key_row, states_.value_head, states_.value_row,
                   parts_.kv_heads, parts_.heads / parts_.kv_heads, parts_.dim, parts_.dim, parts_.is_half,
                   parts_.scale, 0.0f, states_.rule, nullptr};
    pages.attend(call, exact);
  }

  const LayerParts& parts_;
  const LayerStates& states_;
  int64_t rows_, size_;
  int num_threads_;
  uintptr_t next_ = 0;
};

}  // namespace lpr
#endif
