// The numbers of lpr/core/constants.py and lpr/core/wire.py, which lpr.native hands over once, when it loads the module.
#pragma once

#include <cstdint>
#include <vector>

namespace lpr {

using Numbers = std::vector<double>;

#define LPR_CONSTANTS(X)                                                                                              \
  X(int, num_header) X(int, num_tree_header) X(int, num_node_words) X(int, node_bits)                                 \
  X(int, max_match) X(double, growth) X(double, shared_trust) X(double, replaced_trust) X(int, pool_match)            \
  X(double, sibling_trust) X(int, most_siblings) X(int, pair_bits) X(double, most_known) X(double, delay)             \
  X(int, root_places) X(int, node_places) X(int, recent_tokens) X(Numbers, weights) X(Numbers, novelties)             \
  X(Numbers, candidate_weights) X(double, prediction_trust) X(int, first_strength)                                    \
  X(int, replaced_cost) X(int, inserted_cost) X(int, near_before) X(int, near_after) X(int, near_places)              \
  X(int, near_bonus) X(int, sure_strength) X(int, lost_after) X(int, lost_match) X(int, most_cursors)                 \
  X(int, recent_stage) X(int, recent_kind) X(int, several) X(int, num_block_header) X(int, from_root) X(double, probability_steps) X(double, head_weight) X(int, head_kind) X(int, copy_kind) X(int, copy_bit)                                                            \
  X(std::vector<int64_t>, levels) X(int, num_levels) X(int, num_kinds) X(int, num_buckets) X(int, middle_bucket)      \
  X(double, cell_memory) X(double, least_frequency) X(std::vector<int64_t>, knots)                                    \
  X(double, first_window_yield) X(double, pool_yield) X(int, window_segment) X(double, window_memory)                 \
  X(double, window_return) X(int, quiet_steps) X(int, longest_pause) X(int, longest_far_pause) X(double, near_price)  \
  X(double, least_gain)                                                                                               \
  X(int, num_bands) X(double, trusted_nodes) X(double, trust_memory) X(double, plain_memory) X(double, long_memory)   \
  X(double, most_promised) X(int, longest_catch_up) X(int, forgotten_after)                                           \
  X(std::vector<Numbers>, shipped_frequencies) X(std::vector<Numbers>, shipped_trials)

struct Constants {
#define LPR_FIELD(type, name) type name;
  LPR_CONSTANTS(LPR_FIELD)
#undef LPR_FIELD
};

inline Constants constants;

}  // namespace lpr
