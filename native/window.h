// The Jacobi window. Specification: lpr/core/window.py.
#pragma once

#include <algorithm>

#include "tree.h"

namespace lpr {

class JacobiWindow {
 public:
  int num_columns, num_levels;
  std::vector<Tokens> levels;

  JacobiWindow(int columns, int ngram_size, const Tokens& context) : num_columns(columns), num_levels(ngram_size - 1) {
    for (int level = 0; level < num_levels; level++) levels.push_back(fresh(columns, context));
  }

  void add_to(TokenTree& tree, int max_depth) {
    Tokens spine = {0};
    const Tokens& first = levels[0];
    for (int column = 1; column < static_cast<int>(first.size()) && column <= max_depth; column++)
      spine.push_back(tree.add(spine.back(), first[column], kWindow));
    nodes_.clear();
    for (int column = 0; column < static_cast<int>(spine.size()); column++) {
      Tokens chain = {spine[column]};
      for (int level = 1; level < std::min(num_levels, max_depth - column + 1); level++)
        chain.push_back(tree.add(chain.back(), levels[level][column], kWindow));
      nodes_.push_back(std::move(chain));
    }
  }

  // Move the window by the model's choice after each node of the tree; returns the columns' n-grams.
  std::vector<Tokens> advance(const TokenTree& tree, const Tokens& next_tokens, size_t num_committed,
                              const Tokens& context) {
    std::vector<Tokens> ngrams;
    Tokens guesses;
    for (const Tokens& chain : nodes_) {
      if (static_cast<int>(chain.size()) != num_levels) continue;
      guesses.push_back(next_tokens[chain.back()]);
      Tokens ngram;
      for (int node : chain) ngram.push_back(tree.tokens[node]);
      ngram.push_back(guesses.back());
      ngrams.push_back(std::move(ngram));
    }
    levels.erase(levels.begin());
    for (Tokens& level : levels) level.resize(std::min(level.size(), guesses.size()));
    levels.push_back(std::move(guesses));
    for (Tokens& level : levels) {
      level.erase(level.begin(), level.begin() + std::min(level.size(), num_committed - 1));
      Tokens more = fresh(num_columns - static_cast<int>(level.size()), context);
      level.insert(level.end(), more.begin(), more.end());
    }
    nodes_.clear();
    return ngrams;
  }

 private:
  // Tokens of the last 256 of `context`, by a fixed stride that no short cycle shares.
  Tokens fresh(int count, const Tokens& context) {
    size_t size = std::min<size_t>(256, context.size());
    const int32_t* recent = context.data() + context.size() - size;
    Tokens tokens;
    for (int i = 0; i < count; i++) tokens.push_back(recent[(fill_ + i) * 101 % size]);
    fill_ += count;
    return tokens;
  }

  int64_t fill_ = 0;
  std::vector<Tokens> nodes_;
};

}  // namespace lpr
