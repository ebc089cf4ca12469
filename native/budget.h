// The size of a step's trees. Specification: lpr/core/budget.py; the arithmetic is numpy's, operation for operation.
#pragma once

#include <cmath>
#include <limits>
#include <memory>
#include <optional>

#include "constants.h"
#include "tree.h"

namespace lpr {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
using StepRow = std::vector<double>;  // milliseconds at the knots

inline double last_slope(const StepRow& row) {
  const auto& knots = constants.knots;
  size_t last = knots.size() - 1;
  return (row[last] - row[last - 1]) / static_cast<double>(knots[last] - knots[last - 1]);
}

// Milliseconds at a number of tokens per rank: numpy.interp, and the last slope beyond the last knot.
inline double time_at(double per_rank, const StepRow& row) {
  const auto& knots = constants.knots;
  size_t last = knots.size() - 1;
  double beyond = std::max(per_rank - static_cast<double>(knots[last]), 0.0) * last_slope(row);
  if (per_rank < knots[0]) return row[0] + beyond;
  if (per_rank >= knots[last]) return row[last] + beyond;
  size_t low = std::upper_bound(knots.begin(), knots.end(), per_rank) - knots.begin() - 1;
  double from = static_cast<double>(knots[low]);
  if (from == per_rank) return row[low] + beyond;
  double slope = (row[low + 1] - row[low]) / (static_cast<double>(knots[low + 1]) - from);
  return (slope * (per_rank - from) + row[low]) + beyond;
}

// The least that further tokens after so many cost on average: t(n) is linear between the knots.
inline double least_slope(double at, const StepRow& row) {
  double now = time_at(at, row), least = last_slope(row);
  for (size_t knot = 0; knot < row.size(); knot++) {
    double ahead = static_cast<double>(constants.knots[knot]) - at;
    if (ahead > 1e-9) least = std::min(least, (row[knot] - now) / ahead);
  }
  return least;
}

// Expected tokens and time of a step while its trees are drafted, one after the other.
class ExpectedTokens {
 public:
  ExpectedTokens(int64_t count, double other_tokens, int64_t pending, int64_t held, int64_t limit, int64_t num_ranks,
                 const StepRow& row)
      : tokens_(static_cast<double>(count) + other_tokens), base_(count * (1 + held)), pending_(pending),
        most_(count * limit), num_ranks_(num_ranks), row_(row) {
    rate_ = tokens_ / times(0);
    node_ms_ = cheapest(0);
  }

  double price() const { return rate_ * node_ms_; }

  void add(double gain) {
    tokens_ += gain;
    num_nodes_ = std::min(num_nodes_ + 1, most_);
    rate_ = std::max(rate_, tokens_ / times(num_nodes_));
    node_ms_ = cheapest(num_nodes_);
  }

 private:
  double per_rank(int64_t nodes) const {
    return static_cast<double>(base_ + nodes) / static_cast<double>(num_ranks_) + static_cast<double>(pending_);
  }

  double times(int64_t nodes) const { return time_at(per_rank(nodes), row_); }

  double cheapest(int64_t nodes) const {
    return least_slope(per_rank(nodes), row_) / static_cast<double>(num_ranks_);
  }

  double tokens_, rate_, node_ms_;
  int64_t base_, pending_, num_nodes_ = 0, most_, num_ranks_;
  StepRow row_;
};

// Least path probability at which a node of one sequence pays.
class Price {
 public:
  double floor;

  explicit Price(std::shared_ptr<ExpectedTokens> expected) : floor(expected->price()), expected_(std::move(expected)) {}

  // One that does not rise.
  explicit Price(double floor) : floor(floor) {}

  void take(double probability) {
    if (!expected_) return;
    least_ = std::min(least_, probability);
    expected_->add(least_);
    floor = expected_->price();
  }

 private:
  std::shared_ptr<ExpectedTokens> expected_;
  double least_ = kInfinity;
};

struct DraftRequest {
  int64_t nodes;
  std::optional<Price> price;
  int64_t window;  // columns
  std::optional<Numbers> trusts;  // by band of depths, factors of path probabilities
};

struct Draft {
  std::shared_ptr<TokenTree> tree;
  std::vector<double> probabilities;
  int64_t num_window;
  std::optional<Numbers> trusts;
};

// How many promised nodes were accepted.
struct Promises {
  double expected = 0.0, accepted = 0.0;

  double trust(double first = 1.0) const {
    return (first * constants.trusted_nodes + accepted) / (constants.trusted_nodes + expected);
  }

  void record_step(double offered, int64_t num_accepted, double memory, double idle) {
    double weight = offered != 0.0 ? std::min(1.0, constants.most_promised / offered) : 0.0;
    if (offered == 0.0) memory = idle;
    expected = memory * expected + weight * offered;
    accepted = memory * accepted + weight * static_cast<double>(num_accepted);
  }
};

// The band of a depth from 1.
inline int band_of(int depth) {
  int band = -1;
  while (depth) {
    band++;
    depth >>= 1;
  }
  return std::min(band, constants.num_bands - 1);
}

// How far a sequence's drafts kept what they promised, by band of depths.
struct AcceptanceHistory {
  std::vector<Promises> by_band = std::vector<Promises>(constants.num_bands);
  Numbers offered = Numbers(constants.num_bands, 0.0);
  int64_t quiet = 0, pause = 0;
  bool is_new = true;

  Numbers trusts(const Numbers& first) const {
    Numbers found;
    double last = kInfinity;
    for (size_t band = 0; band < by_band.size(); band++)
      found.push_back(last = std::min(last, by_band[band].trust(first[band])));
    return found;
  }

  void record_step(const Numbers& promised, const std::vector<int64_t>& kept, double memory, double idle) {
    is_new = false;
    for (size_t band = 0; band < by_band.size(); band++)
      by_band[band].record_step(promised[band], kept[band], memory, idle);
  }

  bool has_offered() const {
    return std::any_of(offered.begin(), offered.end(), [](double each) { return each != 0.0; });
  }

  void count(bool drafted, bool is_far) {
    if (pause) {
      pause--;
    } else if (drafted) {
      quiet = 0;
    } else if (++quiet >= constants.quiet_steps) {
      int64_t longest = is_far ? constants.longest_far_pause : constants.longest_pause;
      int64_t power = quiet - constants.quiet_steps + 1;
      pause = power > 30 ? longest : std::min<int64_t>(longest, int64_t{1} << power);
    }
  }
};

class Budget {
 public:
  virtual ~Budget() = default;
  // True if no tree depends on another one, and nothing is learned from steps.
  virtual bool is_fixed() const { return false; }
  // `num_homes` ranks evaluate each tree together.
  virtual void begin(int64_t count, int64_t pending, int64_t num_homes) = 0;
  virtual DraftRequest request(const AcceptanceHistory& history) = 0;
  virtual void cut(std::vector<Draft*>& drafts, std::vector<AcceptanceHistory*>& histories) = 0;
  virtual void observe(const std::vector<const TokenTree*>& trees, const std::vector<const Tokens*>& paths,
                       std::vector<AcceptanceHistory*>& histories) = 0;
};

// The sizes of a tree that so many ranks evaluate together.
struct TreeLimits {
  int64_t num_nodes, num_drafted, num_window_nodes, columns;
};

class FixedBudget : public Budget {
 public:
  explicit FixedBudget(std::vector<TreeLimits> by_homes) : by_homes_(std::move(by_homes)), now_(by_homes_.back()) {}
  bool is_fixed() const override { return true; }
  void begin(int64_t, int64_t, int64_t num_homes) override { now_ = by_homes_.at(num_homes - 1); }
  DraftRequest request(const AcceptanceHistory&) override {
    return {now_.num_drafted, std::nullopt, now_.columns, std::nullopt};
  }
  void cut(std::vector<Draft*>&, std::vector<AcceptanceHistory*>&) override {}
  void observe(const std::vector<const TokenTree*>&, const std::vector<const Tokens*>&,
               std::vector<AcceptanceHistory*>&) override {}

 private:
  std::vector<TreeLimits> by_homes_;
  TreeLimits now_;
};

class AdaptiveBudget : public Budget {
 public:
  bool window = false;
  int64_t num_ranks = 1;
  StepRow times;              // milliseconds at the knots of a step like the running one
  double other_tokens = 0.0;  // that other requests are expected to get in the running step

  AdaptiveBudget(std::vector<TreeLimits> by_homes, StepRow first_times)
      : times(std::move(first_times)), by_homes_(std::move(by_homes)) {
    int64_t window_size = by_homes_.back().columns;
    spread(by_homes_.size());
    first_yield_[0] = yield_[0] = constants.first_window_yield;
    first_yield_[1] = yield_[1] = std::max(0.0, constants.pool_yield * std::log2((1 + window_size) / 3.0));
    double earned = first_yield_[0] + first_yield_[1];
    if (window_nodes_) window = (1 + earned) / milliseconds(1 + window_nodes_) > 1 / milliseconds(1);
  }

  void begin(int64_t count, int64_t pending, int64_t num_homes) override {
    spread(num_homes);
    count_ = count;
    pending_ = num_homes > 1 ? pending : 0;  // lpr.core.budget has the reason
    expected_ = nullptr;
  }

  DraftRequest request(const AcceptanceHistory& history) override {
    if (history.pause) return {0, std::nullopt, 0, std::nullopt};
    int64_t held = window ? window_nodes_ : 0;
    if (!expected_)
      expected_ = std::make_shared<ExpectedTokens>(count_, other_tokens, pending_, held, limit_, num_ranks, times);
    Numbers first = all_.trusts(Numbers(constants.num_bands, 1.0));
    if (history.is_new) first = first_trees_.trusts(first);
    return {limit_ - held, Price(expected_), window ? columns_ : 0, history.trusts(first)};
  }

  void cut(std::vector<Draft*>& drafts, std::vector<AcceptanceHistory*>& histories) override {
    bool any = false;
    for (Draft* draft : drafts) any |= draft->tree->size() > 1;
    if (!any) {
      for (AcceptanceHistory* history : histories) {  // plain decoding stays as cheap as it is without a budget
        history->offered.assign(constants.num_bands, 0.0);
        history->count(false, true);
      }
      return;
    }
    std::vector<std::vector<double>> falling;
    std::vector<double> gains;
    int64_t held = 0;
    for (size_t i = 0; i < drafts.size(); i++) {
      falling.push_back(promised(*drafts[i]));
      gains.insert(gains.end(), falling.back().begin(), falling.back().end());
      held += drafts[i]->num_window;
    }
    std::sort(gains.begin(), gains.end(), std::greater<>());
    double without = static_cast<double>(count_) + other_tokens;
    std::vector<double> tokens = {without};
    double sum = 0.0;
    for (double gain : gains) tokens.push_back(without + (sum += gain));
    size_t best = 0;
    double best_rate = -kInfinity, near_price = 0.0, first_rate = 0.0, first_time = 0.0;
    for (size_t k = 0; k < tokens.size(); k++) {
      double time = milliseconds(held + static_cast<int64_t>(k));
      double rate = tokens[k] / time;
      if (rate > best_rate) {
        best = k;
        best_rate = rate;
      }
      if (k == 0) {
        first_rate = rate;
        first_time = time;
      } else if (k == 1) {
        near_price = constants.near_price * (first_rate * (time - first_time));
      }
    }
    double least = 1 + constants.least_gain * (1 - 1 / static_cast<double>(count_));
    if (best_rate < least * first_rate) best = 0;
    double threshold = best ? gains[best - 1] : kInfinity;
    for (size_t i = 0; i < drafts.size(); i++) keep(*drafts[i], *histories[i], falling[i], threshold, near_price);
    if (window_nodes_) weigh_window(tokens);
  }

  void observe(const std::vector<const TokenTree*>& trees, const std::vector<const Tokens*>& paths,
               std::vector<AcceptanceHistory*>& histories) override {
    int64_t by_window = 0, by_pool = 0;
    bool offered = false;
    for (size_t i = 0; i < trees.size(); i++) {
      std::vector<int64_t> accepted(constants.num_bands, 0);
      for (size_t step = 1; step < paths[i]->size(); step++) {
        int node = (*paths[i])[step];
        uint8_t source = trees[i]->sources[node];
        accepted[band_of(trees[i]->depths[node])] += source != kWindow;
        by_window += source == kWindow;
        by_pool += source == kPool;
      }
      bool is_first = histories[i]->is_new;
      histories[i]->record_step(histories[i]->offered, accepted, constants.trust_memory, constants.plain_memory);
      if (is_first)
        first_trees_.record_step(histories[i]->offered, accepted, constants.long_memory, constants.plain_memory);
      if (!histories[i]->has_offered()) continue;
      offered = true;
      all_.record_step(histories[i]->offered, accepted, constants.long_memory, constants.long_memory);
    }
    if (!offered) {
      Numbers none(constants.num_bands, 0.0);
      all_.record_step(none, std::vector<int64_t>(constants.num_bands, 0), constants.plain_memory, constants.plain_memory);
    }
    if (trees.empty() || !by_homes_.back().num_window_nodes) return;
    double news[2] = {first_yield_[0], first_yield_[1]}, weight = constants.window_return;
    if (window) {
      news[0] = static_cast<double>(by_window) / static_cast<double>(trees.size());
      news[1] = static_cast<double>(by_pool) / static_cast<double>(trees.size());
      weight = constants.window_memory;
    }
    for (int i = 0; i < 2; i++) yield_[i] = yield_[i] + weight * (news[i] - yield_[i]);
  }

 private:
  // Let so many ranks evaluate each tree.
  void spread(int64_t num_homes) {
    const TreeLimits& limits = by_homes_.at(num_homes - 1);
    num_ranks = num_homes;
    limit_ = limits.num_nodes - 1;
    window_nodes_ = limits.num_window_nodes;
    columns_ = limits.columns;
  }

  // Path probabilities after the window, none higher than one drafted before it.
  static std::vector<double> promised(const Draft& draft) {
    std::vector<double> falling(draft.probabilities.begin() + draft.num_window, draft.probabilities.end());
    double least = kInfinity;
    for (double& each : falling) {
      least = std::min(least, each);
      each = least;
    }
    return falling;
  }

  static void keep(Draft& draft, AcceptanceHistory& history, const std::vector<double>& falling, double threshold,
                   double near_price) {
    int64_t kept = 0;
    for (double each : falling) kept += each >= threshold;
    draft.tree->truncate(static_cast<int>(draft.num_window + kept));
    history.offered.assign(constants.num_bands, 0.0);
    for (int64_t node = draft.num_window; node < draft.num_window + kept; node++) {
      int band = band_of(draft.tree->depths[node]);
      history.offered[band] += draft.probabilities[node] / (draft.trusts ? (*draft.trusts)[band] : 1.0);
    }
    history.count(draft.tree->size() > 1, falling.empty() || falling[0] < near_price);
  }

  void weigh_window(const std::vector<double>& tokens) {
    double count = static_cast<double>(count_);
    int64_t held = count_ * window_nodes_, left = count_ * limit_ - held, drafted = static_cast<int64_t>(tokens.size()) - 1;
    double more = count * (window ? yield_[0] : yield_[0] + yield_[1]), less = window ? count * yield_[1] : 0.0;
    double best_wide = -kInfinity, best_plain = -kInfinity;
    for (int64_t k = 0; k <= (window ? drafted : std::min(drafted, left)); k++)
      best_wide = std::max(best_wide, (tokens[k] + more) / milliseconds(k + (count_ + held)));
    auto weigh_plain = [&](double expected, int64_t k) {
      if (window) expected = std::max(expected - less, count + other_tokens);
      best_plain = std::max(best_plain, expected / milliseconds(k + count_));
    };
    for (int64_t k = 0; k <= drafted; k++) weigh_plain(tokens[k], k);
    if (window && drafted && drafted >= left) {  // all nodes were spent: the promise of further ones
      double last = (tokens[drafted] - tokens[drafted - 1]) * static_cast<double>(drafted), sum = 0.0;
      for (int64_t k = 1; k <= held; k++) {
        sum += last / (static_cast<double>(drafted) + static_cast<double>(k));
        weigh_plain(tokens[drafted] + sum, drafted + k);
      }
    }
    segment_wide_ += best_wide;
    segment_plain_ += best_plain;
    if (++segment_ == constants.window_segment) {
      window = segment_wide_ > segment_plain_;
      segment_wide_ = segment_plain_ = 0.0;
      segment_ = 0;
    }
  }

  // Milliseconds of a step whose trees have `size` nodes together.
  double milliseconds(int64_t size) const {
    double rows = std::ceil(static_cast<double>(size) / static_cast<double>(num_ranks)) + static_cast<double>(pending_);
    return time_at(rows, times);
  }

  std::vector<TreeLimits> by_homes_;
  int64_t limit_ = 0, window_nodes_ = 0, columns_ = 0, count_ = 1, pending_ = 0;
  double first_yield_[2], yield_[2], segment_wide_ = 0.0, segment_plain_ = 0.0;
  int segment_ = 0;
  AcceptanceHistory all_, first_trees_;
  std::shared_ptr<ExpectedTokens> expected_;
};

}  // namespace lpr
