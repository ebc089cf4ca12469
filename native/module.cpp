// lpr._native: the classes of lpr.core in C++, under the same names and with the same results.
#include "bindings.h"

namespace lpr {

template <typename T>
T get(const nb::dict& from, const char* name) {
  return nb::cast<T>(from[name]);
}

void set_constants(const nb::dict& from) {
  Constants& to = constants;
  to.weight = get<std::vector<double>>(from, "weight");
  to.novelty = get<std::vector<double>>(from, "novelty");
  to.recycled = get<std::vector<double>>(from, "recycled");
  to.shipped_frequencies = get<std::vector<std::vector<double>>>(from, "shipped_frequencies");
  to.shipped_trials = get<std::vector<std::vector<double>>>(from, "shipped_trials");
  to.levels = get<std::vector<int64_t>>(from, "levels");
  to.knots = get<std::vector<int64_t>>(from, "knots");
#define LPR_NUMBER(name) to.name = get<decltype(to.name)>(from, #name)
  LPR_NUMBER(num_header);
  LPR_NUMBER(num_tree_header);
  LPR_NUMBER(growth);
  LPR_NUMBER(shared_trust);
  LPR_NUMBER(replaced_trust);
  LPR_NUMBER(most);
  LPR_NUMBER(beside_trust);
  LPR_NUMBER(most_beside);
  LPR_NUMBER(pair_bits);
  LPR_NUMBER(delay);
  LPR_NUMBER(pool_match);
  LPR_NUMBER(root_places);
  LPR_NUMBER(node_places);
  LPR_NUMBER(max_match);
  LPR_NUMBER(recent_tokens);
  LPR_NUMBER(num_levels);
  LPR_NUMBER(num_kinds);
  LPR_NUMBER(num_buckets);
  LPR_NUMBER(middle);
  LPR_NUMBER(recent_stage);
  LPR_NUMBER(recent_kind);
  LPR_NUMBER(several);
  LPR_NUMBER(memory);
  LPR_NUMBER(least);
  LPR_NUMBER(window_memory);
  LPR_NUMBER(window_return);
  LPR_NUMBER(trusted_nodes);
  LPR_NUMBER(trust_memory);
  LPR_NUMBER(plain_memory);
  LPR_NUMBER(most_promised);
  LPR_NUMBER(long_memory);
  LPR_NUMBER(near_price);
  LPR_NUMBER(window_segment);
  LPR_NUMBER(quiet_steps);
  LPR_NUMBER(longest_pause);
  LPR_NUMBER(longest_far_pause);
  LPR_NUMBER(forgotten_after);
#undef LPR_NUMBER
}

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // what lives at the end of the process is no leak
  m.def("set_constants", &set_constants);
  bind_tree(m);
  bind_suffix_index(m);
  bind_evidence(m);
  bind_drafting(m);
  bind_budget(m);
  bind_partition(m);
  bind_state(m);
  bind_rows(m);
  bind_step(m);
  bind_sampling(m);
  bind_attention(m);
}

}  // namespace lpr
