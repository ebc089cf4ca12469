// The search of one draft. Specification: lpr/core/search.py. Included by drafting.h, which has the evidence.
#pragma once

#include "drafting.h"
#include "known_noise.h"

namespace lpr {

// The heap of one draft.
class Search {
 public:
  void run(Drafter& drafter, TokenTree& tree, int limit, int64_t deepest, Price* price, const Numbers* trusts,
           std::vector<double>& found) {
    drafter_ = &drafter;
    trusts_ = trusts;
    tree_ = &tree;
    frequencies_ = drafter.calibration.frequencies.data();
    heap_.clear();
    payloads_.clear();
    places_.clear();
    tried_.clear();
    tried_tokens_.clear();
    for (Trials& each : trials_) each.is_begun = false;
    alignments_.clear();
    guesses_.assign(1, 0);
    noise_.begin(drafter.seed, drafter.num_observed_);
    bool is_new = tree.size() == 1;  // a later node then equals none that is there
    expand(0, 1.0, {}, 0, 0, kNothing);
    while (!heap_.empty()) {
      std::pop_heap(heap_.begin(), heap_.end());
      Rank next = heap_.back();
      heap_.pop_back();
      if (price && next.rank < price->floor) return;
      Payload payload = payloads_[next.serial];
      int node = payload.node;
      if (payload.kind == kEscape) {
        expand(node, payload.kept, {}, 0, payload.order, payload.tried);
        continue;
      }
      uint8_t source = kTrie;
      int32_t token = payload.token;
      if (payload.kind == kRecentToken) {
        token = drafter.recent_[recent_trial(tree.depths[node], payload.order)->rank];
        double untrusted = next.rank / step_of_trust(tree.depths[node] + 1);
        try_recent(node, payload.kept, payload.left - untrusted, payload.order + 1, payload.tried);
      } else if (payload.places.count) {
        source = places_[payload.places.begin].source;
      }
      if (tree.size() == limit && tree.find(node, token) < 0) return;
      int child = tree.add(node, token, source);
      if (child == static_cast<int>(found.size())) {
        found.push_back(next.rank);
        drafter.cells_.push_back(payload.cell);
        if (price) price->take(next.rank);
        if (is_new && tree.size() == limit) return;
      } else {
        found[child] = next.rank;
        drafter.cells_[child] = payload.cell;
      }
      if (tree.depths[child] < deepest) {
        if (payload.places.count)
          expand(child, next.rank, payload.places, payload.order, 0, kNothing);
        else
          ask_later(child, next.rank, 0, kNothing);
      }
    }
  }

 private:
  static constexpr int kNothing = -1;  // no token was tried
  static constexpr int kUnknown = -2;
  enum Kind : uint8_t { kChild, kEscape, kRecentToken };

  struct Rank {
    double rank;
    uint32_t serial;
    bool operator<(const Rank& other) const {
      return rank != other.rank ? rank < other.rank : serial > other.serial;
    }
  };

  struct Payload {
    Kind kind;
    int node;
    int32_t token;
    int cell;
    Span places;
    int order;  // a child: offset of its evidence; an escape: the next source; a recent token: its number
    int tried;
    double kept, left;
  };

  // Tokens that need no second trial: those of one stage, and the stages before it.
  struct Tried {
    Span tokens;
    int before;
  };

  // A recent token as a child: how often such ones were right.
  struct Trial {
    double frequency;
    int rank, cell;
    bool operator<(const Trial& other) const {
      return frequency != other.frequency ? frequency < other.frequency : rank > other.rank;
    }
  };

  // The recent tokens as children of nodes at a depth; where the noise is known a heap, whose best ones have been moved
  // to its end one after the other.
  struct Trials {
    std::vector<Trial> tokens;
    bool is_begun = false;
    int num_ordered = 0;
  };

  struct Row {
    int32_t token;
    double weight;
    Span places;
  };

  bool was_tried(int tried, int32_t token) const {
    for (; tried != kNothing; tried = tried_[tried].before) {
      const int32_t* begin = tried_tokens_.data() + tried_[tried].tokens.begin;
      const int32_t* end = begin + tried_[tried].tokens.count;
      if (std::find(begin, end, token) != end) return true;
    }
    return false;
  }

  void push(double rank, const Payload& payload) {
    heap_.push_back({rank, static_cast<uint32_t>(payloads_.size())});
    payloads_.push_back(payload);
    std::push_heap(heap_.begin(), heap_.end());
  }

  void expand(int node, double probability, Span evidence, int offset, int order, int tried) {
    bool has_held = order == 0 && tried == kNothing && tree_->first_child[node] >= 0;
    bool is_first = order == 0 && tried == kNothing;
    if (is_first && evidence.count) evidence = with_guesses(evidence, node, offset);
    int stage = 0;
    double total;
    while (true) {
      total = gather(evidence, offset, tried);
      if (!rows_.empty()) break;
      if (order == drafter_->num_sources()) {
        if (has_held) break;
        try_recent(node, probability, probability, 0, tried);
        return;
      }
      evidence = ask(order, node, is_first && order == 0);
      offset = 0;
      stage = order++;
    }
    scatter(evidence);
    if (has_held) {
      for (int child = tree_->first_child[node]; child >= 0; child = tree_->next_sibling[child])
        if (find_row(tree_->tokens[child]) < 0) add_row(tree_->tokens[child]);
    }
    total += constants.novelties[std::min(offset, constants.max_match)];
    offer(node, probability, total, stage, offset, has_held, order, tried);
  }

  // Make rows, one per token that the evidence has next; returns the weight of the evidence.
  double gather(Span evidence, int offset, int tried) {
    rows_.clear();
    row_tokens_.clear();
    row_of_.clear();
    double total = 0.0;
    guessed_total_ = 0.0;
    for (uint32_t i = 0; i < evidence.count; i++) {
      const Place& place = places_[evidence.begin + i];
      int32_t token = place.token(offset);
      int row = kNothing;
      if (token >= 0) {
        (place.source == kHead || place.source == kCopy ? guessed_total_ : total) += place.weight;
        if (tried == kNothing || !was_tried(tried, token)) {
          row = find_row(token);
          if (row < 0) row = add_row(token);
          rows_[row].weight += place.weight;  // 0 plus the first weight is that weight
          rows_[row].places.count++;
        }
      }
      row_of_.push_back(row);
    }
    return total;
  }

  // Put each row's places side by side.
  void scatter(Span evidence) {
    uint32_t end = static_cast<uint32_t>(places_.size());
    for (Row& row : rows_) {
      row.places.begin = end;
      end += row.places.count;
      row.places.count = 0;
    }
    places_.resize(end);
    for (uint32_t i = 0; i < evidence.count; i++) {
      if (row_of_[i] == kNothing) continue;
      Span& mine = rows_[row_of_[i]].places;
      places_[mine.begin + mine.count++] = places_[evidence.begin + i];
    }
  }

  int find_row(int32_t token) const {
    for (size_t i = 0; i < row_tokens_.size(); i++)
      if (row_tokens_[i] == token) return static_cast<int>(i);
    return -1;
  }

  int add_row(int32_t token) {
    row_tokens_.push_back(token);
    rows_.push_back({token, 0.0, {}});
    return static_cast<int>(rows_.size()) - 1;
  }

  // Push the rows as children of `node`, and the rest of its probability as an escape.
  void offer(int node, double probability, double total, int stage, int offset, bool has_held, int order, int tried) {
    int depth = tree_->depths[node], first = first_cell(stage, depth);
    double known = 0.0, copied = 0.0;
    bool with_copy = is_copied(node);
    row_cells_.clear();
    for (const Row& row : rows_) {
      if (with_copy && is_by_copy(row)) {
        bool is_held = has_held && tree_->find(node, row.token) >= 0;
        double share = places_[row.places.begin].weight;
        int kind = constants.copy_kind + (row.places.count > 1 || is_held ? constants.several : 0);
        row_cells_.push_back(first + cell_within(kind, share / (constants.head_weight - share), 0));
        copied += frequencies_[row_cells_.back()];
        continue;
      }
      int kind = row.places.count ? places_[row.places.begin].source : kWindow;
      if (has_held && tree_->find(node, row.token) >= 0)
        kind = row.places.count ? kWindow + constants.several : kWindow;
      else if (row.places.count > 1)
        kind += constants.several;
      bool is_guess = kind == constants.head_kind || kind == constants.head_kind + constants.several;
      int octaves = is_guess ? 0 : noise_.octaves(depth, row.token);
      // Guesses take no part of the weight of what the text alone proposes: a bad head does not dilute it.
      bool has_guess = row.places.count && places_[row.places.begin].source == kHead;
      double whole = has_guess ? total + guessed_total_ : total;
      int cell = first + cell_within(kind, row.weight / (whole - row.weight), octaves);
      row_cells_.push_back(cell);
      known += frequencies_[cell];
    }
    // The others share what the copy leaves: it has seen all that they know.
    double by_copy = copied <= constants.most_known ? probability : probability * constants.most_known / copied;
    double rest = probability - by_copy * copied;
    double scale = known <= constants.most_known ? rest : rest * constants.most_known / known;
    double step = step_of_trust(depth + 1), trusted = scale * step;
    by_copy = by_copy * step;
    for (size_t i = 0; i < rows_.size(); i++) {
      bool is_copy = with_copy && is_by_copy(rows_[i]);
      int cell = row_cells_[i];
      Payload child{kChild, node, rows_[i].token, with_copy && !is_copy ? -1 : cell, rows_[i].places, offset + 1,
                    kNothing, 0.0, 0.0};
      push(std::min(probability, (is_copy ? by_copy : trusted) * frequencies_[cell]), child);
    }
    Span tokens{static_cast<uint32_t>(tried_tokens_.size()), static_cast<uint32_t>(row_tokens_.size())};
    tried_tokens_.insert(tried_tokens_.end(), row_tokens_.begin(), row_tokens_.end());
    tried_.push_back({tokens, tried});
    ask_later(node, rest - scale * known, order, static_cast<int>(tried_.size()) - 1);
  }

  // The trust of this depth by that of the one above: 1 but where a band of depths begins.
  double step_of_trust(int depth) const {
    if (!trusts_ || depth & (depth - 1)) return 1.0;
    return (*trusts_)[band_of(depth)] / (depth > 1 ? (*trusts_)[band_of(depth - 1)] : 1.0);
  }

  void ask_later(int node, double kept, int order, int tried) {
    push(constants.delay * kept, {kEscape, node, 0, -1, {}, order, tried, kept, 0.0});
  }

  void try_recent(int node, double kept, double left, int index, int tried) {
    const Tokens& recent = drafter_->recent_;
    int depth = tree_->depths[node];
    const Trial* trial = recent_trial(depth, index);
    while (trial && was_tried(tried, recent[trial->rank])) trial = recent_trial(depth, ++index);
    if (!trial) return;
    double probability = std::min(kept * trial->frequency, left) * step_of_trust(depth + 1);
    push(probability, {kRecentToken, node, 0, is_copied(node) ? -1 : trial->cell, {}, index, tried, kept, left});
  }

  // The recent token that is tried as number `index` below nodes at a depth: the latest first or, by known noise, the
  // likeliest. Null beyond the last. Few of them are needed, so a heap puts them in order.
  const Trial* recent_trial(int depth, int index) {
    if (static_cast<int>(trials_.size()) <= depth) trials_.resize(depth + 1);
    Trials& here = trials_[depth];
    int count = static_cast<int>(drafter_->recent_.size());
    if (index >= count) return nullptr;
    if (!here.is_begun) {
      here.tokens.clear();
      here.num_ordered = 0;
      here.is_begun = true;
    }
    if (!noise_.is_known()) {
      while (static_cast<int>(here.tokens.size()) <= index) here.tokens.push_back(trial_of(here.tokens.size(), depth));
      return &here.tokens[index];
    }
    if (here.tokens.empty()) {
      for (int rank = 0; rank < count; rank++) here.tokens.push_back(trial_of(rank, depth));
      std::make_heap(here.tokens.begin(), here.tokens.end());
    }
    for (; here.num_ordered <= index; here.num_ordered++)
      std::pop_heap(here.tokens.begin(), here.tokens.end() - here.num_ordered);
    return &here.tokens[count - 1 - index];
  }

  Trial trial_of(int rank, int depth) {
    int octaves = noise_.octaves(depth, drafter_->recent_[rank]);
    int cell = first_cell(constants.recent_stage, depth) + cell_within(constants.recent_kind, 1.0 / (rank + 1), octaves);
    return {frequencies_[cell], rank, cell};
  }

  // Sources: each appends the evidence for the token after a node.

  Span ask(int order, int node, bool with_head) {
    uint32_t begin = static_cast<uint32_t>(places_.size());
    if (with_head) guesses(node, 0);
    if (drafter_->prediction_ && order != 1) predicted(node, order == 0);
    set_context(node);
    int depth = tree_->depths[node];
    if (!drafter_->tries_on_) {
      ngrams(depth);
    } else if (order == 0) {
      two_tokens(depth);
    } else if (order == 1) {
      one_token(depth);
    } else {
      one_replaced();
    }
    return {begin, static_cast<uint32_t>(places_.size()) - begin};
  }

  // The places of `evidence` behind the guesses of the head for what follows a node.
  Span with_guesses(Span evidence, int node, int offset) {
    uint32_t begin = static_cast<uint32_t>(places_.size());
    guesses(node, offset);
    if (places_.size() == begin) return evidence;
    for (uint32_t i = 0; i < evidence.count; i++) places_.push_back(Place(places_[evidence.begin + i]));
    return {begin, static_cast<uint32_t>(places_.size()) - begin};
  }

  void guesses(int node, int offset) {
    const HeadDraft& head = drafter_->head;
    if (!drafter_->tries_on_ || head.tokens.size() < 2) return;
    int guess = guess_of(node);
    if (guess < 0) return;
    for (size_t i = 1; i < head.tokens.size(); i++)
      if (head.parents[i] == guess) places_.push_back({head.weight(i), nullptr, nullptr, head.tokens[i], head.source(), offset});
  }

  // True if the model's copy has chosen what follows a node.
  bool is_copied(int node) {
    const HeadDraft& head = drafter_->head;
    if (!head.is_copy || !drafter_->tries_on_) return false;
    int guess = guess_of(node);
    return guess >= 0 && std::find(head.parents.begin() + 1, head.parents.end(), guess) != head.parents.end();
  }

  bool is_by_copy(const Row& row) const { return row.places.count && places_[row.places.begin].source == kCopy; }

  // The guess that is a node; -1 if the head has not guessed it.
  int guess_of(int node) {
    if (static_cast<int>(guesses_.size()) <= node) guesses_.resize(node + 1, kUnknown);
    if (guesses_[node] == kUnknown) {
      int above = guess_of(tree_->parents[node]);
      guesses_[node] = above < 0 ? -1 : drafter_->head.child(above, tree_->tokens[node]);
    }
    return guesses_[node];
  }

  // The places of the prediction whose token before is, or is not, that of a node.
  void predicted(int node, bool agrees) {
    const Prediction& prediction = *drafter_->prediction_;
    for (const Alignment::Cursor& each : alignment(node).cursors) {
      if (prediction.agrees(each.place, tree_->tokens[node]) != agrees) continue;
      double weight = constants.prediction_trust * constants.weights[each.strength];
      places_.push_back({weight, &prediction.index, nullptr, each.place, kPrediction});
    }
  }

  // The alignment at a node and, where they are not known yet, at its ancestors.
  const Alignment& alignment(int node) {
    if (!node) return drafter_->prediction_->alignment;
    if (static_cast<int>(alignments_.size()) <= node) alignments_.resize(node + 1);
    if (!alignments_[node]) {
      const Alignment& above = alignment(tree_->parents[node]);
      set_context(node);
      alignments_[node] = above.follow(drafter_->prediction_->index, context_.data(), context_.size());
    }
    return *alignments_[node];
  }

  void two_tokens(int depth) {
    ngrams(depth);
    int limit = depth ? constants.node_places : constants.root_places;
    each_trie([&](const SuffixIndex& trie, double trust, uint8_t source) {
      trie.match(context_.data(), context_.size(), limit, [&](int64_t index, int length) {
        places_.push_back({trust * constants.weights[length], &trie, nullptr, index, source});
      });
    });
  }

  void ngrams(int depth) {
    if (depth) return;
    const std::vector<Tokens>* found = drafter_->pool.get(context_.back());
    if (!found) return;
    for (auto ngram = found->rbegin(); ngram != found->rend(); ++ngram)  // the newest first
      places_.push_back({constants.weights[constants.pool_match], nullptr, &*ngram, 1, kPool});
  }

  void one_token(int depth) {
    int32_t last = context_.back();
    own_places_.clear();
    each_trie([&](const SuffixIndex& trie, double trust, uint8_t source) {
      double weight = trust * constants.growth;
      trie.match_last(last, constants.node_places, [&](int64_t index) {
        places_.push_back({weight, &trie, nullptr, index, source});
        if (source == kTrie) own_places_.push_back(index);
      });
    });
    if (!drafter_->table_) return;
    drafter_->evaluated_.nearest(drafter_->own_, own_places_, context_, candidates_);
    if (candidates_.empty()) candidates_.push_back(drafter_->table_->get(last));
    add_candidates(1.0);
    if (depth > constants.max_match) return;
    const int32_t* below = context_.data() + context_.size() - depth;
    drafter_->evaluated_.of_siblings(drafter_->num_observed_, below, depth, candidates_);
    add_candidates(constants.sibling_trust);
  }

  // Rows of candidates and scores, which share their weight.
  void add_candidates(double trust) {
    double share = trust / static_cast<double>(std::max<size_t>(1, candidates_.size()));
    for (const CandidateTable::Row& row : candidates_)
      for (int i = 0; i < row.size; i++)
        places_.push_back({share * constants.candidate_weights[row.scores[i]], nullptr, nullptr, row.tokens[i], kRecycled});
  }

  void one_replaced() {
    each_trie([&](const SuffixIndex& trie, double trust, uint8_t source) {
      trie.match(context_.data(), context_.size() - 1, constants.node_places, [&](int64_t index, int length) {
        double weight = constants.replaced_trust * trust * constants.weights[length - 1];
        places_.push_back({weight, &trie, nullptr, index + 1, source});
      });
    });
  }

  template <typename Use>
  void each_trie(Use use) {
    use(drafter_->own_, 1.0, kTrie);
    if (drafter_->shared_) use(*drafter_->shared_, constants.shared_trust, kSharedTrie);
  }

  // The last tokens up to and including `node`; enough of them for the longest match.
  void set_context(int node) {
    context_ = drafter_->tail_;
    size_t tail = context_.size();
    for (int left = constants.max_match; node && left; node = tree_->parents[node], left--)
      context_.push_back(tree_->tokens[node]);
    std::reverse(context_.begin() + tail, context_.end());
  }

  Drafter* drafter_ = nullptr;
  TokenTree* tree_ = nullptr;
  const double* frequencies_ = nullptr;
  std::vector<Rank> heap_;
  std::vector<Payload> payloads_;
  std::vector<Place> places_;
  std::vector<Tried> tried_;
  std::vector<Row> rows_;
  std::vector<Trials> trials_;  // by depth
  std::vector<int64_t> own_places_;
  std::vector<CandidateTable::Row> candidates_;
  std::vector<std::optional<Alignment>> alignments_;  // by node
  Noise noise_;
  const Numbers* trusts_ = nullptr;
  Tokens tried_tokens_, row_tokens_, row_of_, row_cells_, context_;
  Tokens guesses_;  // by node
  double guessed_total_ = 0.0;  // weight of the guesses among what `gather` has read last
};

inline std::vector<double> Drafter::draft(TokenTree& tree, int64_t budget, std::optional<int64_t> max_depth,
                                          Price* price, const Numbers* trusts) {
  int64_t deepest = max_depth ? std::min(branch_length_, *max_depth) : branch_length_;
  std::vector<double> probabilities(tree.size(), 0.0);
  probabilities[0] = 1.0;
  cells_.assign(tree.size(), -1);
  if (deepest < 1 || (budget < 1 && tree.size() == 1)) return probabilities;
  if (tail_.empty()) throw std::out_of_range("a draft continues observed tokens, and there are none");
  static thread_local Search search;  // its arenas stay warm
  int limit = static_cast<int>(tree.size() + std::max<int64_t>(0, budget));
  search.run(*this, tree, limit, deepest, price, trusts, probabilities);
  return probabilities;
}

}  // namespace lpr
