// The host's two halves of a step. Specification: lpr/core/step.py.
#pragma once

#include <map>

#include "budgets.h"
#include "parallel.h"
#include "rows.h"
#include "wire.h"

namespace lpr {

// What a step did to one sequence.
struct Conclusion {
  std::shared_ptr<TokenTree> tree;
  std::shared_ptr<std::vector<Shard>> shards;
  Tokens next_tokens, path, emitted;
  bool has_nan = false;
  std::optional<int32_t> failure;
  bool may_end = false;
};

constexpr int32_t kNoRoot = -1;

// The conclusions of all sequences of a step.
class Concluded {
 public:
  std::vector<int64_t> ending, grown, with_nan;  // those that may end, that have reached `care_at`, that met NaN

  Concluded(Concluded&&) = default;
  Concluded(size_t count, size_t num_ranks) : all_(count), lone_(count), num_ranks_(num_ranks) { states_.reserve(count); }

  size_t size() const { return all_.size(); }

  const Conclusion& at(size_t i) {
    if (!all_[i]) all_[i] = std::make_unique<Conclusion>(conclude_lone(i));
    return *all_[i];
  }

  void put(size_t i, Conclusion&& each) { all_[i] = std::make_unique<Conclusion>(std::move(each)); }

  // A tree of rank `home` alone, whose conclusion is made where one asks for it.
  void put_lone(size_t i, int64_t home, const int32_t (&root)[LoneTree::kWords]) {
    lone_[i] = {home, words_.size(), 1};
    words_.insert(words_.end(), std::begin(root), std::end(root));
  }

  // As `put_lone`, of what the rank has sent; false if it has to be read in full.
  bool read_lone(size_t i, const Payloads& all, int64_t home, int64_t place) {
    size_t begin = words_.size();
    if (!read_lone_tree(all, home, place, words_)) return false;
    lone_[i] = {home, begin, static_cast<int32_t>((words_.size() - begin) / LoneTree::kWords)};
    return true;
  }

  bool is_lone(size_t i) const { return lone_[i].count; }
  int64_t home_of(size_t i) const { return lone_[i].home; }
  LoneTree lone(size_t i) const { return {words_.data() + lone_[i].begin, lone_[i].count}; }

  // Note what the next sequence needs, in order; `ends` says it of a lone tree.
  void note(SequenceState* state, bool ends, bool is_mine) {
    size_t i = states_.size();
    bool has_nan = is_lone(i) ? is_mine && lone(i).has_nan() : all_[i]->has_nan;
    if (is_lone(i) ? ends : all_[i]->may_end) ending.push_back(i);
    if (static_cast<int64_t>(state->tokens.size()) >= state->care_at) grown.push_back(i);
    if (has_nan) with_nan.push_back(i);
    states_.push_back(state);
  }

  // Count the step in each of its states, once.
  void publish() {
    Tokens depths;
    for (size_t i = 0; i < states_.size(); i++) {
      if (i + 4 < states_.size()) states_[i + 4]->prefetch_counts();
      StepCounts& counts = states_[i]->counts;
      int64_t before = counts.num_tokens;
      if (is_lone(i))
        counts.add(lone(i), depths);
      else
        counts.add(*all_[i]->tree, all_[i]->path, all_[i]->emitted.size());
      states_[i]->num_steps++;
      states_[i]->num_emitted += counts.num_tokens - before;
    }
    states_.clear();
  }

 private:
  struct Place {
    int64_t home = 0;
    size_t begin = 0;
    int32_t count = 0;
  };

  Conclusion conclude_lone(size_t i) const {
    const LoneTree known = lone(i);
    auto tree = std::make_shared<TokenTree>(known.token(0));
    Shard all{Tokens(known.count), {}};
    std::iota(all.nodes.begin(), all.nodes.end(), 0);
    all.owned = all.nodes;
    Conclusion each{tree, std::make_shared<std::vector<Shard>>(num_ranks_), {}, {0}, {}, false, {}, false};
    (*each.shards)[lone_[i].home] = std::move(all);
    for (int32_t node = 0; node < known.count; node++) {
      if (node) tree->add(known.parent(node), known.token(node), known.source(node));
      each.next_tokens.push_back(known.next(node));
    }
    known.follow([&](int32_t node) {
      each.path.push_back(node);
      each.emitted.push_back(known.token(node));
    });
    int32_t bonus = known.next(each.path.back());
    if (bonus >= 0) each.emitted.push_back(bonus);
    if (bonus < 0) each.failure = bonus;
    each.has_nan = std::binary_search(with_nan.begin(), with_nan.end(), static_cast<int64_t>(i));
    each.may_end = std::binary_search(ending.begin(), ending.end(), static_cast<int64_t>(i));
    return each;
  }

  std::vector<std::unique_ptr<Conclusion>> all_;
  std::vector<Place> lone_;
  Tokens words_;  // of lone trees
  size_t num_ranks_;
  std::vector<SequenceState*> states_;
};

// Int64 columns of one length.
struct Columns {
  std::vector<int64_t> first, second, third;

  void add(int64_t one, int64_t two, int64_t three) {
    first.push_back(one);
    second.push_back(two);
    third.push_back(three);
  }
};

// What a step evaluates of its sequences. Trees and shards are null where only other ranks serve the sequence.
class StepDraft {
 public:
  std::vector<SequenceState*> states;
  std::vector<std::shared_ptr<TokenTree>> trees;
  std::vector<std::shared_ptr<std::vector<Shard>>> shards;
  size_t rank;
  Served served;
  int64_t capacity;
  int32_t num_candidates = 0;
  Tokens roots;  // of a tree of this rank alone that is a root without a drafter its token; it is made when asked for
  std::vector<int64_t> num_entries;  // per rank, the tokens that it has evaluated; once concluded

  // Draft a tree per sequence that this rank serves, cut the trees to what pays, and split them over their home ranks.
  StepDraft(std::vector<SequenceState*> those, Budgets& budgets, size_t mine, Served rows, int64_t max_owned,
            int32_t num_wanted, int threads)
      : states(std::move(those)), trees(states.size()), shards(states.size()), rank(mine), served(std::move(rows)),
        capacity(max_owned), roots(states.size(), kNoRoot), num_threads_(threads) {
    of_roots_ = std::make_shared<std::vector<Shard>>(served.size());
    (*of_roots_)[rank] = {{0}, {0}};
    for (const auto& [homes, members] : groups()) {
      draft_group(homes, members, budgets.of(homes));
      for (size_t i : members) shards[i] = shards_of(i);
    }
    for (int64_t i : own_trees())
      if (trees[i] && trees[i]->size() > 1) num_candidates = num_wanted;
  }

  const TokenTree& tree(size_t i) {
    if (!trees[i]) trees[i] = std::make_shared<TokenTree>(roots[i]);
    return *trees[i];
  }

  const std::vector<int64_t>& own_trees() const { return served[rank]; }

  const Shard& own(size_t tree) const { return (*shards[tree])[rank]; }

  Tokens header(int32_t num_command_bytes, const std::optional<std::vector<uint64_t>>& digests) {
    Digest all;
    std::vector<uint64_t> tree_digests(own_trees().size(), 0);
    std::vector<int32_t> num_owned;
    for (int64_t tree : own_trees()) num_owned.push_back(static_cast<int32_t>(own(tree).owned.size()));
    if (digests) {
      for (const SequenceState* state : states) all.add(state->digest());
      all.update(*digests);
      for (size_t i = 0; i < tree_digests.size(); i++) {
        int64_t index = own_trees()[i];
        tree_digests[i] = roots[index] != kNoRoot ? states[index]->digest() : states[index]->tree_digest(*trees[index]);
      }
    }
    return pack_header(all.value, num_command_bytes, num_candidates, tree_digests, num_owned);
  }

  // Of every node that this rank owns its place among the nodes of all rows, its place among the tables of the payload,
  // and its words.
  Columns placement() {
    Columns found;
    int64_t start = 0;
    for (size_t row = 0; row < own_trees().size(); row++) {
      size_t index = own_trees()[row];
      const Shard& shard = own(index);
      auto from = shard.nodes.begin();
      for (size_t place = 0; place < shard.owned.size(); place++) {
        from = std::lower_bound(from, shard.nodes.end(), shard.owned[place]);
        found.add(start + (from - shard.nodes.begin()),
                  static_cast<int64_t>(row) * capacity + static_cast<int64_t>(place),
                  roots[index] != kNoRoot ? int64_t{roots[index]} << 32 : node_word(*trees[index], shard.owned[place]));
      }
      start += static_cast<int64_t>(shard.nodes.size());
    }
    return found;
  }

  // Accept a path of each tree and advance the states; `moves` gets row, entry, and the entry in whose place it belongs.
  // `drafting` are ranks that serve no tree and draft for all.
  Concluded conclude(const Payloads& payloads, Budgets& budgets, Columns& moves,
                     const std::vector<int64_t>& drafting = {}) {
    check(payloads);
    if (!drafting.empty() && static_cast<int64_t>(states.size()) > payloads.num_trees())
      throw std::invalid_argument("the payloads do not hold the drafts of all trees");
    Payloads all = payloads.authoritative(served.size());
    std::vector<int64_t> all_places(states.size() * served.size(), 0), homes(states.size(), -1);
    for (size_t each = 0; each < served.size(); each++) {
      for (size_t place = 0; place < served[each].size(); place++) {
        int64_t i = served[each][place];
        all_places[i * served.size() + each] = place;
        homes[i] = homes[i] == -1 ? static_cast<int64_t>(each) : kSeveral;
      }
    }
    std::vector<Tokens> kept(states.size());
    Concluded concluded(states.size(), served.size());
    std::vector<char> is_mine(states.size(), 1);
    std::vector<size_t> with_trees;
    for (size_t i = 0; i < states.size(); i++) {
      const int64_t* those = all_places.data() + i * served.size();
      if (roots[i] != kNoRoot) {
        concluded.put_lone(i, rank, {0, roots[i], all.node(rank, those[rank], 0)[0]});
        continue;
      }
      is_mine[i] = trees[i] != nullptr;
      if (!is_mine[i] && homes[i] >= 0 && concluded.read_lone(i, all, homes[i], those[homes[i]])) continue;
      with_trees.push_back(i);
      if (is_mine[i]) continue;
      auto [tree, split] = read_tree(all, states[i]->homes(), std::vector<int64_t>(those, those + served.size()));
      trees[i] = std::move(tree);
      shards[i] = std::make_shared<std::vector<Shard>>(std::move(split));
    }
    num_entries.assign(served.size(), 0);  // from here on nothing is refused
    std::vector<char> may_end(states.size(), 0);
    for (size_t i = 0; i < states.size(); i++) {
      SequenceState& state = *states[i];
      prefetch_after(i);
      if (!is_mine[i] && state.has_drafted()) state.forget_drafts();
      if (concluded.is_lone(i)) {
        num_entries[concluded.home_of(i)] += state.num_above(concluded.home_of(i)) + concluded.lone(i).count;
        may_end[i] = state.advance_lone(concluded.lone(i), concluded.home_of(i));
        continue;
      }
      for (int64_t home : state.homes())
        num_entries[home] += state.num_above(home) + static_cast<int64_t>((*shards[i])[home].nodes.size());
    }
    parallel_for(static_cast<int64_t>(with_trees.size()), threads_for(with_trees), [&](int64_t each, int) {
      size_t i = with_trees[each];
      concluded.put(i, conclude_tree(i, is_mine[i], all, all_places.data() + i * served.size(), drafting, kept[i]));
    });
    for (size_t i = 0; i < states.size(); i++) concluded.note(states[i], may_end[i], is_mine[i]);
    for (const auto& [homes, members] : groups())
      if (Budget& budget = budgets.of(homes); !budget.is_fixed()) observe_group(members, concluded, budget);
    for (size_t row = 0; row < own_trees().size(); row++) {
      const Tokens& entries = kept[own_trees()[row]];
      for (size_t place = 0; place < entries.size(); place++)
        if (entries[place] != static_cast<int32_t>(place)) moves.add(row, entries[place], place);
    }
    return concluded;
  }

 private:
  std::shared_ptr<std::vector<Shard>> of_roots_;  // of this rank alone
  std::map<int, std::shared_ptr<std::vector<Shard>>> of_sizes_;  // by a tree's nodes, where there is one rank
  int num_threads_;

  // Accept a path of one tree and advance its state; `kept` gets the row's entries whose K/V stays.
  Conclusion conclude_tree(size_t i, bool is_mine, const Payloads& all, const int64_t* those,
                           const std::vector<int64_t>& drafting, Tokens& kept) {
    SequenceState& state = *states[i];
    std::vector<int64_t> places(those, those + served.size());
    int32_t k = std::numeric_limits<int32_t>::max();
    for (int64_t home : state.homes()) k = std::min(k, all.num_candidates(home));
    TreeResult result = read_result(all, places, *shards[i], k);
    Conclusion each{trees[i], shards[i], {}, accept(*trees[i], result.next_tokens), {}, false, {}, false};
    each.has_nan = is_mine && SequenceState::has_nan(own(i), result);
    if (is_mine && !each.has_nan && each.path.size() > 1) kept = kept_entries(state, own(i), each.path);
    int32_t bonus = result.next_tokens[each.path.back()];
    if (bonus < 0) each.failure = bonus;
    HeadDraft head;
    for (int64_t home : all.num_guesses ? state.homes() : std::vector<int64_t>{}) {
      head = read_block(all.block(home, places[home]), all.num_guesses, each.path.back(), bonus);
      if (head.tokens.size() > 1) break;
    }
    if (all.num_guesses && bonus >= 0 && !drafting.empty()) {
      HeadDraft ahead;
      Tokens emitted;
      for (size_t node = 1; node < each.path.size(); node++) emitted.push_back(trees[i]->tokens[each.path[node]]);
      emitted.push_back(bonus);
      for (int64_t rank : drafting) read_ahead(all.block(rank, i), all.num_guesses, emitted, ahead);
      if (ahead.tokens.size() > 1) head = std::move(ahead);
    }
    each.emitted = state.advance(*trees[i], each.path, result, *shards[i], std::move(head));
    each.may_end = each.failure || state.may_end(each.emitted.size());
    each.next_tokens = std::move(result.next_tokens);
    return each;
  }

  // Load the states of the next sequences.
  void prefetch_after(size_t i) const {
    if (i + 8 < states.size()) states[i + 8]->prefetch();
    if (i + 4 < states.size()) states[i + 4]->prefetch_tokens();
  }

  // Threads for the trees of some sequences: waking them takes as long as some tens of nodes.
  int threads_for(const std::vector<size_t>& members) const {
    int64_t num_nodes = 0;
    for (size_t i : members) num_nodes += trees[i]->size();
    return num_nodes >= kManyNodes ? num_threads_ : 1;
  }

  static constexpr int64_t kManyNodes = 256, kSeveral = -2;

  using Group = std::pair<Homes, std::vector<size_t>>;

  // Sets of home ranks, and those of this rank's trees that have just these, both in the order of the sequences.
  std::vector<Group> groups() const {
    if (served.size() == 1 && !states.empty() && own_trees().size() == states.size()) {
      std::vector<size_t> all(states.size());
      std::iota(all.begin(), all.end(), 0);
      return {{Homes{0}, std::move(all)}};
    }
    std::vector<int64_t> mine = own_trees();
    std::sort(mine.begin(), mine.end());
    std::vector<Group> found;
    for (int64_t i : mine) {
      auto same = [&](const Group& each) { return each.first == states[i]->homes(); };
      auto group = std::find_if(found.begin(), found.end(), same);
      if (group == found.end()) group = found.insert(found.end(), {states[i]->homes(), {}});
      group->second.push_back(i);
    }
    return found;
  }

  void draft_group(const Homes& homes, const std::vector<size_t>& members, Budget& budget) {
    budget.begin(static_cast<int64_t>(members.size()), budget.is_fixed() ? 0 : most_pending(homes, members),
                 static_cast<int64_t>(homes.size()));
    std::vector<Draft> drafts(members.size());
    std::vector<DraftRequest> requests(members.size());
    std::vector<size_t> left;  // places of members whose trees may have more than a root
    int64_t num_nodes = 0;
    for (size_t place = 0; place < members.size(); place++) {
      size_t i = members[place];
      prefetch_after(i);
      if (budget.is_fixed()) requests[place] = budget.request(states[i]->acceptance);
      if (budget.is_fixed() && homes.size() == 1 && states[i]->is_only_root(requests[place])) {
        roots[i] = states[i]->tokens.back();
        states[i]->was_only_root = true;
        continue;
      }
      left.push_back(place);
      num_nodes += requests[place].nodes;
    }
    int threads = budget.is_fixed() && num_nodes >= kManyNodes ? num_threads_ : 1;
    parallel_for(static_cast<int64_t>(left.size()), threads, [&](int64_t each, int) {
      size_t place = left[each];
      SequenceState& state = *states[members[place]];
      if (!budget.is_fixed()) requests[place] = budget.request(state.acceptance);
      drafts[place] = state.build(state.max_depth(), std::move(requests[place]));
    });
    for (size_t place : left) trees[members[place]] = drafts[place].tree;
    if (budget.is_fixed()) return;
    std::vector<Draft*> those;
    std::vector<AcceptanceHistory*> histories;
    for (size_t i = 0; i < members.size(); i++) {
      those.push_back(&drafts[i]);
      histories.push_back(&states[members[i]]->acceptance);
    }
    budget.cut(those, histories);
  }

  void observe_group(const std::vector<size_t>& members, Concluded& concluded, Budget& budget) {
    std::vector<const TokenTree*> those;
    std::vector<const Tokens*> paths;
    std::vector<AcceptanceHistory*> histories;
    for (size_t i : members) {
      those.push_back(concluded.at(i).tree.get());
      paths.push_back(&concluded.at(i).path);
      histories.push_back(&states[i]->acceptance);
    }
    budget.observe(those, paths, histories);
  }

  // The most tokens that one of `homes` evaluates besides these trees; another tree counts as one token, and the rest of a
  // prompt as nothing.
  int64_t most_pending(const Homes& homes, const std::vector<size_t>& members) const {
    int64_t most = std::numeric_limits<int64_t>::min();
    for (int64_t rank : homes) {
      int64_t total = static_cast<int64_t>(served[rank].size()) - static_cast<int64_t>(members.size());
      for (size_t i : members) {
        int64_t above = states[i]->num_above(rank);
        total += above <= constants.longest_catch_up ? above : 0;
      }
      most = std::max(most, total);
    }
    return most;
  }

  // The shards of a tree. Where this is the only rank, trees of one size have the same.
  std::shared_ptr<std::vector<Shard>> shards_of(size_t i) {
    if (!trees[i]) return of_roots_;
    if (served.size() > 1) return std::make_shared<std::vector<Shard>>(split(*states[i], *trees[i]));
    auto& found = of_sizes_[trees[i]->size()];
    if (!found) found = std::make_shared<std::vector<Shard>>(split(*states[i], *trees[i]));
    return found;
  }

  // The shards of a tree: home ranks with a longer pending chain get fewer nodes, other ranks none.
  std::vector<Shard> split(const SequenceState& state, const TokenTree& tree) const {
    std::vector<int64_t> pending;
    for (int64_t rank : state.homes()) pending.push_back(state.num_above(rank));
    std::vector<Shard> of_homes = partition(tree, static_cast<int64_t>(pending.size()), pending, capacity);
    std::vector<Shard> all(served.size());
    for (size_t i = 0; i < of_homes.size(); i++) all[state.homes()[i]] = std::move(of_homes[i]);
    return all;
  }

  // The entries of this rank's row whose K/V stays: its pending chain, and the path as far as the rank evaluated it.
  Tokens kept_entries(const SequenceState& state, const Shard& shard, const Tokens& path) const {
    if (shard.nodes.empty()) return {};
    int32_t above = static_cast<int32_t>(state.num_above(rank));
    Tokens kept(above);
    std::iota(kept.begin(), kept.end(), 0);
    for (int node : path) {
      auto found = std::lower_bound(shard.nodes.begin(), shard.nodes.end(), node);
      if (found == shard.nodes.end() || *found != node) break;
      kept.push_back(above + static_cast<int32_t>(found - shard.nodes.begin()));
    }
    return kept;
  }

  // Refuse payloads that cannot be read, or that ranks have sent from unequal states.
  void check(const Payloads& all) const {
    int64_t num_ranks = served.size();
    bool fits = num_ranks && all.num_ranks >= num_ranks && all.num_ranks % num_ranks == 0;
    for (const auto& trees : served) fits = fits && static_cast<int64_t>(trees.size()) <= all.num_trees();
    for (int64_t rank = 0; fits && rank < all.num_ranks; rank++) {
      int32_t k = all.num_candidates(rank);
      fits = k >= 0 && result_words(k) <= all.width;
    }
    if (!fits) throw std::invalid_argument("the payloads do not hold the results of all trees");
    if (!headers_agree(all, served, states.size())) throw std::invalid_argument("the headers of the ranks differ");
  }
};

}  // namespace lpr
