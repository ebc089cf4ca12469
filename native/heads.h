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

  int add(int parent, int32_t token, int32_t step) {
    tokens.push_back(token);
    parents.push_back(parent);
    steps.push_back(step);
    return static_cast<int>(tokens.size()) - 1;
  }

  // Add what another draft guesses behind one of its guesses, which is the last committed token here.
  void merge(const HeadDraft& other, int from) {
    std::vector<int> place(other.tokens.size(), -1);
    place[from] = 0;
    for (size_t i = from + 1; i < other.tokens.size(); i++) {
      int parent = other.parents[i] < 0 ? -1 : place[other.parents[i]];
      if (parent < 0) continue;
      int known = child(parent, other.tokens[i]);
      place[i] = known >= 0 ? known : add(parent, other.tokens[i], other.steps[i]);
    }
  }
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
    draft.add(parent, pair[0], pair[1] & static_cast<int32_t>(constants.probability_steps));
  }
  return draft;
}

// Add to `draft` what a block of a rank that only drafts has behind the tokens that a step has emitted.
inline void read_ahead(const int32_t* block, int64_t num_guesses, const Tokens& emitted, HeadDraft& draft) {
  HeadDraft found = read_block(block, num_guesses, constants.from_root, 0);
  int guess = 0;
  for (int32_t token : emitted)
    if ((guess = found.child(guess, token)) < 0) return;
  draft.merge(found, guess);
  draft.is_copy = true;
}

}  // namespace lpr
