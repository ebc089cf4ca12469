// Linear attention with decay, and the gated delta rule, entry by entry from the state of its parent, each head by itself
// (lpr.model.recurrent.in_order).
//
// Values are lanes of their own: sums go over the keys one after the other, and nothing is fused. So the bits of an entry
// depend neither on the entries beside it nor on the machine's vectors.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "lanes.h"
#include "parallel.h"

namespace lpr {

// Rows of entries [n, H, K] and [n, H, V]; `decay` are logarithms [n, H], or [n, H, K] with `per_channel`. Without `beta`
// [n, H] values are written as they are.
struct LinearInputs {
  const float *query, *key, *value, *decay, *beta;
  int64_t count, heads, keys, values;
  bool per_channel;
};

// Advance a head's state [K, V] by one entry; `written` and `out` have V values.
LPR_CLONES inline void enter_head(const LinearInputs& in, int64_t entry, int64_t head, float* __restrict state,
                                  float* __restrict written, float* __restrict out) {
  int64_t at = entry * in.heads + head, size = in.values;
  const float *query = in.query + at * in.keys, *key = in.key + at * in.keys, *value = in.value + at * size;
  const float* decay = in.decay + (in.per_channel ? at * in.keys : at);
  float factor = in.per_channel ? 0.0f : std::exp(*decay);
  std::fill(written, written + size, 0.0f);
  for (int64_t k = 0; k < in.keys; k++) {
    float* row = state + k * size;
    if (in.per_channel) factor = std::exp(decay[k]);
    if (in.beta) {
      for (int64_t v = 0; v < size; v++) {
        row[v] *= factor;
        written[v] += row[v] * key[k];
      }
    } else {
      for (int64_t v = 0; v < size; v++) row[v] *= factor;
    }
  }
  if (in.beta)
    for (int64_t v = 0; v < size; v++) written[v] = in.beta[at] * (value[v] - written[v]);
  else
    std::copy(value, value + size, written);
  std::fill(out, out + size, 0.0f);
  for (int64_t k = 0; k < in.keys; k++) {
    float* row = state + k * size;
    for (int64_t v = 0; v < size; v++) {
      row[v] += key[k] * written[v];
      out[v] += row[v] * query[k];
    }
  }
}

// Outputs [n, H, V] of one row's entries. `state` [H, K, V] is that before them, and becomes that behind the last one;
// parents stand before their children, -1 for an entry that follows the state.
inline void walk_linear(const LinearInputs& in, const int32_t* parents, float* state, float* out, int threads) {
  std::vector<int32_t> last(in.count + 1, -1);  // the child that takes a state over, the state before the tree first
  for (int64_t entry = 0; entry < in.count; entry++) last[parents[entry] + 1] = static_cast<int32_t>(entry);
  int64_t size = in.keys * in.values;
  parallel_for(in.heads, threads, [&](int64_t head, int) {
    std::vector<std::vector<float>> held(in.count + 1);
    std::vector<float> written(in.values);
    float* own = state + head * size;
    held[0].assign(own, own + size);
    for (int64_t entry = 0; entry < in.count; entry++) {
      std::vector<float>&from = held[parents[entry] + 1], &to = held[entry + 1];
      if (last[parents[entry] + 1] == entry)
        to.swap(from);
      else
        to = from;
      enter_head(in, entry, head, to.data(), written.data(), out + (entry * in.heads + head) * in.values);
      if (entry == in.count - 1)
        std::copy(to.begin(), to.end(), own);
      else if (last[entry + 1] < 0)
        std::vector<float>().swap(to);
    }
  });
}

}  // namespace lpr
