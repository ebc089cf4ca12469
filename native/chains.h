// Drafts for another engine: one chain of tokens per sequence, or one tree. Specification: lpr/core/chains.py.
#pragma once

#include "budget.h"
#include "drafting.h"
#include "state.h"

namespace lpr {

// What the sequences of a server have shown together: a new one starts from it.
struct ChainRecord {
  Calibration calibration;
  Promises acceptance;
};

class ChainState {
 public:
  Tokens tokens;

  ChainState(const Sizes& sizes, std::shared_ptr<SuffixIndex> shared)
      : drafter_(sizes.trie_nodes, sizes.branch_length, sizes.trie_capacity, 0, sizes.ngram_size, std::move(shared),
                 nullptr, std::nullopt) {}

  ChainState(const ChainState&) = delete;

  bool continues_in(const int32_t* text, size_t count) const {
    return tokens.size() <= count && std::equal(tokens.begin(), tokens.end(), text);
  }

  Tokens text_from(size_t begin) const {
    if (!is_readable_ || begin >= tokens.size()) return {};
    return {tokens.begin() + static_cast<ptrdiff_t>(begin), tokens.end()};
  }

  void read(const int32_t* text, size_t count, ChainRecord& record) {
    if (count > tokens.size()) extend(text + tokens.size(), count - tokens.size(), record);
  }

  void extend(const int32_t* news, size_t num_news, ChainRecord& record) {
    if (num_news == 0) return;
    if (tokens.empty()) drafter_.calibration = record.calibration;
    tokens.insert(tokens.end(), news, news + num_news);
    is_readable_ = is_readable_ && *std::min_element(news, news + num_news) >= 0;
    if (!is_readable_) return;
    if (tree_) learn(news, num_news, record);
    tree_.reset();
    drafter_.observe(news, num_news);
  }

  std::vector<double> draft(int64_t depth, int64_t num_nodes, double floor, double first_trust) {
    chain_.clear();
    probabilities_.clear();
    if (depth < 1 || !is_readable_ || tokens.empty()) return {};
    double trust = acceptance_.trust(first_trust);
    tree_.emplace(tokens.back());
    Price price(floor / trust);
    std::vector<double> all = drafter_.draft(*tree_, num_nodes, depth, &price);
    Tokens best(all.size(), -1);
    std::vector<double> gains(all.size(), 0.0);
    for (int node = tree_->size() - 1; node > 0; node--) {
      double gain = std::min(1.0, trust * all[node]) - floor;
      if (best[node] >= 0) gain += gains[best[node]];
      gains[node] = gain;
      int parent = tree_->parents[node];
      if (gain > 0.0 && (best[parent] < 0 || gain >= gains[best[parent]])) best[parent] = node;
    }
    std::vector<double> found;
    for (int node = best[0]; node >= 0; node = best[node]) {
      chain_.push_back(tree_->tokens[node]);
      probabilities_.push_back(all[node]);
      found.push_back(std::min(1.0, trust * all[node]));
    }
    return found;
  }

  std::pair<Tokens, Tokens> draft_tree(int64_t depth, int64_t num_nodes) {
    chain_.clear();
    probabilities_.clear();
    if (tokens.empty()) throw std::invalid_argument("a sequence without tokens has no root");
    TokenTree bare(tokens.back());
    if (depth < 1 || !is_readable_) return {bare.tokens, bare.parents};
    tree_.emplace(tokens.back());
    Price price(0.0);
    drafter_.draft(*tree_, num_nodes, depth, &price);
    return {tree_->tokens, tree_->parents};
  }

  const Tokens& keep(size_t count) {
    chain_.resize(std::min(count, chain_.size()));
    probabilities_.resize(chain_.size());
    return chain_;
  }

 private:
  void learn(const int32_t* news, size_t num_news, ChainRecord& record) {
    Tokens path{0};
    for (size_t i = 0; i < num_news; i++) {
      int node = tree_->find(path.back(), news[i]);
      if (node < 0) break;
      path.push_back(node);
    }
    bool is_open = path.size() > num_news;
    drafter_.learn(*tree_, path, is_open);
    record.calibration.observe(*tree_, path, drafter_.cells(), is_open);
    size_t accepted = 0;
    while (accepted < std::min(chain_.size(), num_news) && chain_[accepted] == news[accepted]) accepted++;
    size_t num_verified = accepted == num_news ? accepted : chain_.size();
    double offered = 0.0;
    for (size_t i = 0; i < num_verified; i++) offered += probabilities_[i];
    acceptance_.record_step(offered, static_cast<int64_t>(accepted), constants.trust_memory, constants.plain_memory);
    record.acceptance.record_step(offered, static_cast<int64_t>(accepted), constants.long_memory, constants.plain_memory);
  }

  Drafter drafter_;
  Promises acceptance_;
  bool is_readable_ = true;
  std::optional<TokenTree> tree_;
  Tokens chain_;
  std::vector<double> probabilities_;
};

class Chains {
 public:
  struct Text {
    const int32_t* tokens;
    size_t count;
  };

  StepRow times;            // of a step at the knots, in any unit; set before a draft
  double plain_part = 1.0;  // of that time for as many tokens, which a step without drafts takes

  Chains(int64_t num_nodes, StepRow first_times) : times(std::move(first_times)), num_nodes_(num_nodes) {
    if (num_nodes < 1 || times.size() != constants.knots.size())
      throw std::invalid_argument("num_nodes=" + std::to_string(num_nodes) + " must be at least 1, times must be " +
                                  std::to_string(constants.knots.size()));
  }

  std::vector<Tokens> draft(const std::vector<ChainState*>& states, const std::vector<Text>& texts,
                            const std::vector<int64_t>& depths) {
    if (states.size() != texts.size() || states.size() != depths.size())
      throw std::invalid_argument("states, texts and depths are not as many");
    for (size_t i = 0; i < states.size(); i++) states[i]->read(texts[i].tokens, texts[i].count, record_);
    if (states.empty()) return {};
    double count = static_cast<double>(states.size());
    double floor = count / time_at(count, times) * least_slope(count, times), first_trust = record_.acceptance.trust();
    std::vector<std::pair<double, size_t>> ranked;
    for (size_t i = 0; i < states.size(); i++)
      for (double gain : states[i]->draft(depths[i], num_nodes_, floor, first_trust)) ranked.push_back({gain, i});
    std::stable_sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    double tokens = count, best = count / (time_at(count, times) * plain_part);
    size_t num_kept = 0;
    for (size_t k = 1; k <= ranked.size(); k++) {
      tokens += ranked[k - 1].first;
      double rate = tokens / time_at(count + static_cast<double>(k), times);
      if (rate > best) best = rate, num_kept = k;
    }
    std::vector<size_t> counts(states.size(), 0);
    for (size_t k = 0; k < num_kept; k++) counts[ranked[k].second]++;
    std::vector<Tokens> found;
    for (size_t i = 0; i < states.size(); i++) found.push_back(states[i]->keep(counts[i]));
    return found;
  }

  std::vector<std::pair<Tokens, Tokens>> draft_trees(const std::vector<ChainState*>& states,
                                                     const std::vector<Text>& news, int64_t depth) {
    if (states.size() != news.size()) throw std::invalid_argument("states and news are not as many");
    for (size_t i = 0; i < states.size(); i++) states[i]->extend(news[i].tokens, news[i].count, record_);
    std::vector<std::pair<Tokens, Tokens>> found;
    for (ChainState* state : states) found.push_back(state->draft_tree(depth, num_nodes_));
    return found;
  }

 private:
  int64_t num_nodes_;
  ChainRecord record_;
};

}  // namespace lpr
