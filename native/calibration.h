// Calibration of drafts: from a child's score to the frequency with which it was right. Specification:
// lpr/core/calibration.py.
#pragma once

#include <cstring>

#include "constants.h"
#include "digest.h"
#include "tree.h"

namespace lpr {

inline int stage_size() { return constants.num_levels * constants.num_kinds * constants.num_buckets; }

inline int first_cell(int stage, int depth) {
  int level = depth < static_cast<int>(constants.levels.size()) ? constants.levels[depth] : constants.num_levels - 1;
  return (stage * constants.num_levels + level) * constants.num_kinds * constants.num_buckets;
}

// The exponent that frexp gives, without its call: of a number that is not negative and not denormal.
inline int octave_of(double odds) {
  uint64_t bits;
  std::memcpy(&bits, &odds, sizeof bits);
  return bits ? static_cast<int>(bits >> 52) - 1022 : 0;
}

// The cell of odds that are raised by so many octaves.
inline int cell_within(int kind, double odds, int octaves) {
  int octave = odds == 0.0 ? 0 : octave_of(odds) + octaves;
  return kind * constants.num_buckets + std::min(std::max(octave + constants.middle_bucket, 0), constants.num_buckets - 1);
}

class Calibration {
 public:
  std::vector<double> frequencies, trials;

  explicit Calibration(bool is_sampled = false)
      : frequencies(constants.shipped_frequencies.at(is_sampled)), trials(constants.shipped_trials.at(is_sampled)) {}

  uint64_t digest() const { return digest_.value; }

  void observe(const TokenTree& tree, const Tokens& path, const Tokens& cells, bool is_open = false) {
    int all = static_cast<int>(frequencies.size());
    for (size_t i = 0; i + is_open < path.size(); i++) {
      int right = i + 1 < path.size() ? path[i + 1] : -1;
      // A right child that no source of the search proposed was wrong for all of them.
      int end = right >= 0 && cells[right] >= 0 ? (cells[right] / stage_size() + 1) * stage_size() : all;
      for (int child = tree.first_child[path[i]]; child >= 0; child = tree.next_sibling[child]) {
        if (0 <= cells[child] && cells[child] < end) {
          double changed = count(cells[child], child == right);
          uint64_t bits;
          std::memcpy(&bits, &changed, sizeof bits);
          digest_.add(bits);
        }
      }
    }
  }

 private:
  double count(int cell, bool right) {
    double total = trials[cell] + 1.0;
    double frequency = frequencies[cell];
    frequency = std::max(constants.least_frequency, frequency + (right - frequency) / total);
    frequencies[cell] = frequency;
    trials[cell] = std::min(total, constants.cell_memory);
    return frequency;
  }

  Digest digest_;
};

}  // namespace lpr
