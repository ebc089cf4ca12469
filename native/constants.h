// The numbers that the Python core defines, handed over once when the module is loaded: each is said in one place.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace lpr {

struct Constants {
  // lpr.config
  int num_header, num_tree_header;
  // lpr.core.drafting
  std::vector<double> weight, novelty, recycled;
  double growth, shared_trust, replaced_trust, beside_trust, most, delay;
  int most_beside, pair_bits;  // lpr.core.evaluated
  int pool_match, root_places, node_places, max_match, recent_tokens;
  // lpr.core.calibration
  std::vector<std::vector<double>> shipped_frequencies, shipped_trials;  // greedy, sampled
  std::vector<int64_t> levels;
  int num_levels, num_kinds, num_buckets, middle, recent_stage, recent_kind, several;
  double memory, least;
  // lpr.core.budget and step_times
  std::vector<int64_t> knots;
  double window_memory, window_return, trusted_nodes, trust_memory, plain_memory, most_promised, long_memory, near_price;
  int window_segment, quiet_steps, longest_pause, longest_far_pause, forgotten_after;
};

inline Constants constants;

}  // namespace lpr
