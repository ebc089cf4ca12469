// Acceptance: follow the target model's own choices down the tree. Specification: lpr/core/accept.py.
#pragma once

#include "tree.h"

namespace lpr {

constexpr int32_t kNotANumber = -1;
constexpr int32_t kProcessorFailed = -2;

// A token to draft from: the chosen one, the guess, or 0 after a failure.
inline int32_t likely(int32_t code) { return code >= 0 ? code : std::max(0, -3 - code); }

inline Tokens accept(const TokenTree& tree, const Tokens& next_tokens) {
  Tokens path = {0};
  while (true) {
    int32_t next = next_tokens[path.back()];
    int node = next >= 0 ? tree.find(path.back(), next) : -1;
    if (node < 0 || next_tokens[node] < kProcessorFailed) return path;
    path.push_back(node);
  }
}

}  // namespace lpr
