// Best-first drafting. Specification: lpr/core/drafting.py. Evidence, tokens that need no second trial and heap payloads
// lie in arenas that are kept from draft to draft.
#pragma once

#include <algorithm>

#include "alignment.h"
#include "budget.h"
#include "calibration.h"
#include "evaluated.h"
#include "heads.h"
#include "pool.h"
#include "recycle.h"
#include "suffix_index.h"
#include "tree.h"

namespace lpr {

// Evidence: a place in known text, of a suffix index or of a pooled n-gram; a recycled candidate has neither.
struct Place {
  double weight;
  const SuffixIndex* suffixes;
  const Tokens* ngram;
  int64_t index;  // into the text; a candidate's token
  uint8_t source;
  int from = 0;  // of a candidate: the offset at which it is read

  // The token `offset` places on; negative where the text has ended.
  int32_t token(int offset) const {
    if (suffixes) return index + offset < suffixes->size() ? suffixes->token(index + offset) : -1;
    if (ngram) return index + offset < static_cast<int64_t>(ngram->size()) ? (*ngram)[index + offset] : -1;
    return offset == from ? static_cast<int32_t>(index) : -1;
  }
};

struct Span {
  uint32_t begin = 0, count = 0;
};

class Drafter {
 public:
  const std::optional<uint64_t> seed;  // of a request that samples
  Calibration calibration;
  NGramPool pool;
  HeadDraft head;  // the guesses of the model's head for the next draft

  Drafter(int64_t trie_nodes, int64_t branch_length, int64_t trie_capacity, int64_t guess_set_size, int64_t ngram_size,
          std::shared_ptr<SuffixIndex> shared, std::shared_ptr<CandidateTable> table, std::optional<uint64_t> seed,
          const Tokens& prediction = {}, int64_t num_prompt = 0)
      : seed(seed), calibration(seed.has_value()), pool(guess_set_size), own_(trie_capacity), shared_(std::move(shared)),
        table_(std::move(table)), branch_length_(branch_length), ngram_size_(ngram_size), tries_on_(trie_nodes > 0) {
    if (tries_on_ && !prediction.empty()) prediction_ = std::make_unique<Prediction>(prediction, num_prompt);
  }

  Drafter(const Drafter&) = delete;

  void observe(const int32_t* tokens, size_t count) {
    if (tries_on_) {
      own_.extend(tokens, count);
      for (size_t i = 0; i < count; i++) remember(tokens[i]);
    } else if (pool.guess_set_size) {  // a suffix index holds them
      pool.add_text(tail_, tokens, count, ngram_size_);
    }
    if (prediction_) prediction_->observe(tail_, tokens, count);
    num_observed_ += count;
    tail_.insert(tail_.end(), tokens, tokens + count);
    size_t longest = constants.max_match;
    if (tail_.size() > longest) tail_.erase(tail_.begin(), tail_.end() - longest);
  }

  // Add up to `budget` nodes to the tree, best first; returns each node's calibrated path probability, which counts
  // `trusts` times by band of depths.
  std::vector<double> draft(TokenTree& tree, int64_t budget, std::optional<int64_t> max_depth, Price* price,
                            const Numbers* trusts = nullptr);

  // The likeliest text behind the last observed token and `tokens`: up to `count` tokens, and the share of each.
  std::pair<Tokens, Numbers> continuation(const Tokens& tokens, int count) const {
    Tokens found, context = tail_;
    Numbers shares;
    if (!tries_on_) return {found, shares};
    context.insert(context.end(), tokens.begin(), tokens.end());
    if (static_cast<int>(context.size()) > constants.max_match)
      context.erase(context.begin(), context.end() - constants.max_match);
    std::vector<Place> places;
    auto look = [&](const SuffixIndex& trie, double trust) {
      trie.match(context.data(), context.size(), constants.node_places, [&](int64_t index, int length) {
        places.push_back({trust * constants.weights[length], &trie, nullptr, index, kTrie});
      });
    };
    look(own_, 1.0);
    if (shared_) look(*shared_, constants.shared_trust);
    while (static_cast<int>(found.size()) < count && !places.empty()) {
      int offset = static_cast<int>(found.size());
      double total = 0.0;
      std::vector<std::pair<int32_t, double>> weights;
      for (const Place& place : places) {
        int32_t token = place.token(offset);
        if (token < 0) continue;
        total += place.weight;
        auto same = [&](const auto& each) { return each.first == token; };
        auto known = std::find_if(weights.begin(), weights.end(), same);
        if (known == weights.end()) known = weights.insert(known, {token, 0.0});
        known->second += place.weight;
      }
      if (weights.empty()) break;
      auto less = [](const auto& one, const auto& other) { return one.second < other.second; };
      auto [best, weight] = *std::max_element(weights.begin(), weights.end(), less);  // of equals the first
      found.push_back(best);
      shares.push_back(weight / (total + constants.novelties[std::min(offset, constants.max_match)]));
      auto leaves = [&, token = best](const Place& place) { return place.token(offset) != token; };
      places.erase(std::remove_if(places.begin(), places.end(), leaves), places.end());
    }
    return {found, shares};
  }

  void learn(const TokenTree& tree, const Tokens& path, bool is_open = false) {
    calibration.observe(tree, path, cells_, is_open);
  }

  // Of the last draft's nodes, -1 where no source of the search proposed one.
  const Tokens& cells() const { return cells_; }

  // Keep the candidates of the tree's nodes, rows of k per node; before `observe`.
  void keep_candidates(const TokenTree& tree, const Tokens& path, const int32_t* candidates, const uint8_t* scores,
                       int k) {
    if (!tries_on_) return;
    int32_t before = tail_.size() > 1 ? tail_[tail_.size() - 2] : -1;
    evaluated_.keep(tree, path, num_observed_, before, candidates, scores, k);
  }

 private:
  friend class Search;
  // Keep the latest tokens, each once, the newest first.
  void remember(int32_t token) {
    auto found = std::find(recent_.begin(), recent_.end(), token);
    if (found == recent_.end()) {
      if (static_cast<int>(recent_.size()) < constants.recent_tokens) recent_.push_back(token);
      found = recent_.end() - 1;
    }
    std::move_backward(recent_.begin(), found, found + 1);
    recent_.front() = token;
  }

  int num_sources() const { return tries_on_ ? 3 : 1; }

  SuffixIndex own_;
  std::shared_ptr<SuffixIndex> shared_;
  std::shared_ptr<CandidateTable> table_;
  std::unique_ptr<Prediction> prediction_;
  int64_t branch_length_, ngram_size_;
  bool tries_on_;
  int64_t num_observed_ = 0;
  Tokens tail_, cells_, recent_;
  EvaluatedNodes evaluated_;
};

}  // namespace lpr

#include "search.h"
