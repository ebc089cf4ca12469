// The replicated state of one sequence. Specification: lpr/core/state.py.
#pragma once

#include "budget.h"
#include "digest.h"
#include "drafting.h"
#include "window.h"
#include "wire.h"

namespace lpr {

// The fields of a TreeSizes that a state reads.
struct Sizes {
  int64_t window_size, ngram_size, guess_set_size, trie_nodes, branch_length, trie_capacity, num_recycled, num_guesses;
};

// What the steps of a sequence have evaluated and emitted since they were last asked for.
struct StepCounts {
  int64_t num_steps = 0, num_nodes = 0, num_tokens = 0;
  std::vector<int64_t> drafted, accepted;  // nodes below the root by depth and source: see `place`

  static size_t place(int depth, uint8_t source) { return static_cast<size_t>(depth) * kNumSources + source; }

  // `depths` is room for the depths of its nodes.
  void add(const LoneTree& tree, Tokens& depths) {
    num_steps++;
    num_nodes += tree.count;
    depths.assign(tree.count, 0);
    for (int32_t node = 1; node < tree.count; node++) {
      depths[node] = depths[tree.parent(node)] + 1;
      count(drafted, depths[node], tree.source(node));
    }
    int32_t last = tree.follow([&](int32_t node) {
      count(accepted, depths[node], tree.source(node));
      num_tokens++;
    });
    num_tokens += tree.next(last) >= 0;
  }

  void add(const TokenTree& tree, const Tokens& path, size_t num_emitted) {
    num_steps++;
    num_nodes += tree.size();
    num_tokens += static_cast<int64_t>(num_emitted);
    for (int node = 1; node < tree.size(); node++) count(drafted, tree.depths[node], tree.sources[node]);
    for (size_t i = 1; i < path.size(); i++) count(accepted, tree.depths[path[i]], tree.sources[path[i]]);
  }

 private:
  static void count(std::vector<int64_t>& counts, int depth, uint8_t source) {
    size_t at = place(depth, source);
    if (at >= counts.size()) counts.resize(at + kNumSources, 0);
    counts[at]++;
  }
};

class SequenceState {
 public:
  // First what a step of one node reads and writes.
  Tokens tokens;
  std::vector<int64_t> num_computed_tokens;  // per rank: leading tokens whose K/V it holds
  int64_t care_at = 0;  // the length from which on `conclude` names the sequence as grown
  StepCounts counts;
  int64_t num_steps = 0, num_emitted = 0;  // published steps and their tokens, with those of an earlier state
  bool is_suspect = false;
  bool was_only_root = false;  // the last tree was a root that no drafter has made
  std::shared_ptr<Drafter> drafter;  // of a home rank, made when it drafts for the first time

 private:
  bool is_plain_;  // without a source of drafts: a drafter is then made only if a tree asks for nodes, or ranks compare it
  Digest committed_;
  int64_t longest_;
  uint64_t stop_bits_ = 0;  // of a stop id its last six bits: most tokens are none of them
  Tokens stop_ids_;

 public:
  std::shared_ptr<CandidateTable> table;  // the recycled candidates of `drafter`
  std::optional<JacobiWindow> window;
  AcceptanceHistory acceptance;
  std::vector<double> probabilities;

  SequenceState(Tokens begin, const std::string& params, const Sizes& sizes, std::vector<int64_t> computed,
                std::shared_ptr<SuffixIndex> shared, int64_t longest, Tokens stop_ids,
                std::optional<uint64_t> seed, Tokens prediction, int64_t num_prompt)
      : tokens(std::move(begin)), num_computed_tokens(std::move(computed)),
        is_plain_(!sizes.trie_nodes && !sizes.window_size && !sizes.num_recycled && !sizes.num_guesses), longest_(longest),
        stop_ids_(std::move(stop_ids)), sizes_(sizes), shared_(std::move(shared)), seed_(seed),
        prediction_(std::move(prediction)), num_prompt_(num_prompt) {
    for (int32_t id : stop_ids_) stop_bits_ |= uint64_t{1} << (id & 63);
    homes_.resize(num_computed_tokens.size());
    std::iota(homes_.begin(), homes_.end(), 0);
    if (tokens.empty()) throw std::invalid_argument("a sequence starts with at least one token");
    committed_.update(tokens);
    for (char each : params) committed_.add(static_cast<unsigned char>(each));
    committed_.update(num_computed_tokens);
    committed_.update(prediction_);
  }

  SequenceState(const SequenceState&) = delete;

  // The ranks that evaluate its trees, ascending. One that joins makes all of them begin to draft anew.
  const std::vector<int64_t>& homes() const { return homes_; }

  void set_homes(std::vector<int64_t> ranks) {
    auto is_home = [this](int64_t rank) { return std::find(homes_.begin(), homes_.end(), rank) != homes_.end(); };
    if (!std::all_of(ranks.begin(), ranks.end(), is_home)) forget_drafts();
    homes_ = std::move(ranks);
  }

  bool has_drafted() const { return drafter || was_only_root; }

  // Drop the drafting state of home ranks.
  void forget_drafts() {
    drafter.reset();
    table.reset();
    window.reset();
    probabilities.clear();
    was_only_root = false;
    acceptance = {};
  }

  int64_t num_pending() const {
    int64_t least = tokens.size();
    for (int64_t rank : homes_) least = std::min(least, num_computed_tokens[rank]);
    return static_cast<int64_t>(tokens.size()) - least;
  }

  // The length of a rank's pending chain without the root.
  int64_t num_above(int64_t rank) const { return static_cast<int64_t>(tokens.size()) - num_computed_tokens[rank] - 1; }

  // Greatest depth of a node that could still be emitted with a bonus token behind it.
  int64_t max_depth() const { return std::min(longest_ - static_cast<int64_t>(tokens.size()) - 1, kDeepest); }

  uint64_t digest() const { return committed_.value; }

  // True if the sequence ends with one of its last `count` tokens.
  bool may_end(size_t count) const {
    auto ends = [this](int32_t token) {
      return stop_bits_ >> (token & 63) & 1 && std::find(stop_ids_.begin(), stop_ids_.end(), token) != stop_ids_.end();
    };
    return static_cast<int64_t>(tokens.size()) >= longest_ || std::any_of(tokens.end() - count, tokens.end(), ends);
  }

  // The estimated path probability of each node of the last tree.
  Numbers last_probabilities() const { return was_only_root ? Numbers{1.0} : probabilities; }

  // True if the next tree is a root that no drafter makes.
  bool is_only_root(const DraftRequest& request) const {
    return !drafter && request.nodes < 1 && !request.window && is_plain_;
  }

  // As `advance` without a drafter, of a tree that only rank `home` has evaluated; true if the sequence may end.
  bool advance_lone(const LoneTree& tree, int64_t home) {
    size_t before = tokens.size();
    auto emit = [&](int32_t token) {
      tokens.push_back(token);
      committed_.add(static_cast<uint64_t>(token));
    };
    int32_t bonus = tree.next(tree.follow([&](int32_t node) { emit(tree.token(node)); }));
    int64_t held = tokens.size();
    if (bonus >= 0) emit(bonus);
    is_suspect = bonus == kNotANumber;
    if (!tree.has_nan()) num_computed_tokens[home] = std::min<int64_t>(held, tokens.size() - 1);
    return bonus < 0 || may_end(tokens.size() - before);
  }

  Draft build(int64_t max_depth, DraftRequest request) {
    was_only_root = false;
    if (is_only_root(request)) return plain_draft(std::move(request));
    if (!drafter) begin_drafting();
    auto tree = std::make_shared<TokenTree>(tokens.back());
    tree->reserve(std::min<int64_t>(1024, 1 + request.nodes));
    if (is_suspect) max_depth = 0;
    if (!request.window)
      window.reset();
    else if (!window || window->num_columns != request.window)
      start_window(request.window);
    if (window) window->add_to(*tree, static_cast<int>(max_depth));
    int64_t num_window = tree->size();
    Price* price = request.price ? &*request.price : nullptr;
    const Numbers* trusts = request.trusts ? &*request.trusts : nullptr;
    probabilities = drafter->draft(*tree, request.nodes, max_depth, price, trusts);
    return {std::move(tree), probabilities, num_window, std::move(request.trusts)};
  }

  // A digest of the tree that is about to be evaluated and all before it; only ranks that have drafted it know it.
  uint64_t tree_digest(const TokenTree& tree) {
    if (is_plain_) return digest();
    if (!drafter) begin_drafting();
    drafted_.update(tree.tokens);
    drafted_.update(tree.parents);
    drafted_.add(drafter->calibration.digest());
    return drafted_.value;
  }

  Tokens advance(const TokenTree& tree, const Tokens& path, const TreeResult& result,
                 const std::vector<Shard>& shards, HeadDraft head = {}) {
    Tokens emitted;
    for (size_t i = 1; i < path.size(); i++) emitted.push_back(tree.tokens[path[i]]);
    int32_t bonus = result.next_tokens[path.back()];
    if (bonus >= 0) emitted.push_back(bonus);
    int64_t before = tokens.size();
    tokens.insert(tokens.end(), emitted.begin(), emitted.end());
    for (size_t rank = 0; rank < shards.size(); rank++) {
      if (shards[rank].nodes.empty() || has_nan(shards[rank], result)) continue;
      int64_t held = before + depth_held(shards[rank], path);
      num_computed_tokens[rank] = std::min<int64_t>(held, tokens.size() - 1);
    }
    committed_.update(emitted);
    is_suspect = bonus == kNotANumber;
    if (drafter) {
      if (table && result.k) {
        for (int32_t token : tree.tokens) table->prefetch(token);
        for (int node = 0; node < tree.size(); node++) {
          size_t at = static_cast<size_t>(node) * result.k;
          table->update(tree.tokens[node], &result.candidates[at], &result.scores[at], result.k);
        }
      }
      learn(tree, path, result, emitted);
      drafter->head = std::move(head);
      if (drafter->head.is_copy) acceptance.pause = 0;  // passes were made for the next tree
    }
    return emitted;
  }

  // True if a rank that evaluated `shard` met logits that are not numbers.
  static bool has_nan(const Shard& shard, const TreeResult& result) {
    for (int node : shard.owned)
      if (result.next_tokens[node] == kNotANumber) return true;
    return false;
  }

  // Load what a step of one node reads into the processor's caches: after a forward nothing of it is left there.
  void prefetch() const {
    const char* end = reinterpret_cast<const char*>(&table);
    for (const char* at = reinterpret_cast<const char*>(this); at < end; at += 64) __builtin_prefetch(at, 1);
  }

  void prefetch_counts() const {
    __builtin_prefetch(counts.drafted.data(), 1);
    __builtin_prefetch(counts.accepted.data(), 1);
  }

  void prefetch_tokens() const {
    __builtin_prefetch(tokens.data() + tokens.size() - 1, 1);
    __builtin_prefetch(num_computed_tokens.data(), 1);
  }

 private:
  Draft plain_draft(DraftRequest request) {
    window.reset();
    was_only_root = true;
    return {std::make_shared<TokenTree>(tokens.back()), last_probabilities(), 1, std::move(request.trusts)};
  }

  // Make the drafter from the tokens, as all home ranks do before the same step.
  void begin_drafting() {
    if (sizes_.num_recycled) table = std::make_shared<CandidateTable>();
    int64_t guesses = sizes_.window_size ? sizes_.guess_set_size : 0;
    drafter = std::make_shared<Drafter>(sizes_.trie_nodes, sizes_.branch_length, sizes_.trie_capacity, guesses,
                                        sizes_.ngram_size, shared_, table, seed_, prediction_, num_prompt_);
    drafter->observe(tokens.data(), tokens.size());
    drafted_ = {};
    drafted_.add(digest());
  }

  // Update the drafting state by a step that emitted these tokens.
  void learn(const TokenTree& tree, const Tokens& path, const TreeResult& result, const Tokens& emitted) {
    bool succeeded = result.next_tokens[path.back()] >= 0;
    if (succeeded) drafter->learn(tree, path);
    if (table && result.k) drafter->keep_candidates(tree, path, result.candidates.data(), result.scores.data(), result.k);
    drafter->observe(emitted.data(), emitted.size());
    if (window && succeeded) {
      Tokens next(result.next_tokens.size());
      std::transform(result.next_tokens.begin(), result.next_tokens.end(), next.begin(), likely);
      for (const Tokens& ngram : window->advance(tree, next, emitted.size(), tokens)) drafter->pool.add(ngram);
    } else if (window) {
      start_window(window->num_columns);
    }
  }

  void start_window(int64_t columns) {
    window.emplace(static_cast<int>(columns), static_cast<int>(sizes_.ngram_size), tokens);
  }

  // Nodes of the path below the root that a rank has evaluated without a gap.
  static int64_t depth_held(const Shard& shard, const Tokens& path) {
    size_t depth = 0;
    while (depth + 1 < path.size() && std::binary_search(shard.nodes.begin(), shard.nodes.end(), path[depth + 1])) depth++;
    return static_cast<int64_t>(depth);
  }

  static constexpr int64_t kDeepest = 1 << 20;  // no tree is as deep

  Sizes sizes_;
  std::vector<int64_t> homes_;
  std::shared_ptr<SuffixIndex> shared_;
  std::optional<uint64_t> seed_;  // of a request that samples
  Tokens prediction_;
  int64_t num_prompt_;
  Digest drafted_;
};

}  // namespace lpr
