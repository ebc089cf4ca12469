// The guesses of a model's prediction head, or of its low-bit copy. Specification: lpr/core/heads.py.
#pragma once

#include "constants.h"
#include "tree.h"

namespace lpr {

struct HeadDraft {
  Tokens tokens{-1}, parents{-1}, steps{0};
  bool is_copy = false;

  uint8_t source() const { return static_cast<uint8_t>(is_copy ? constants.copy_kind : constants.head_kind); }

  int child(int guess, int32_t token) const {
    for (size_t i = 1; i < tokens.size(); i++)
      if (parents[i] == guess && tokens[i] == token) return static_cast<int>(i);
    return -1;
  }

  double weight(size_t guess) const { return constants.head_weight / constants.probability_steps * steps[guess]; }
};

inline int64_t block_words(int64_t num_guesses) {
  return num_guesses ? constants.num_block_header + 2 * num_guesses : 0;
}

// The guesses of a block for a path that ended at node `end` with `bonus`; none if it is of another path or empty.
inline HeadDraft read_block(const int32_t* block, int64_t num_guesses, int32_t end, int32_t bonus) {
  HeadDraft draft;
  const int32_t count = block[2] & ((1 << constants.copy_bit) - 1);
  if (block[0] != end || block[1] != bonus || count <= 0 || count > num_guesses) return draft;
  draft.is_copy = block[2] >> constants.copy_bit & 1;
  const int32_t* pair = block + constants.num_block_header;
  for (int32_t i = 0; i < count; i++, pair += 2) {
    int32_t parent = pair[1] >> 16;
    if (pair[0] < 0 || parent < 0 || parent >= static_cast<int32_t>(draft.tokens.size())) return {};
    draft.tokens.push_back(pair[0]);
    draft.parents.push_back(parent);
    draft.steps.push_back(pair[1] & static_cast<int32_t>(constants.probability_steps));
  }
  return draft;
}

}  // namespace lpr
