// A step of a batch, between what goes up to the device and what comes back (StepDraft in lpr/core/rows.py).
#pragma once

#include <utility>

#include "rows.h"

namespace lpr {

// What all ranks say of a tree's nodes: each node's owner counts. `values` are int32 [ranks, trees, capacity, 1 + k +
// ceil(k / 4) or more] with these strides: a next token, k candidates and, in bytes, k scores; `places` says the tree's
// number per rank.
inline TreeResult results_of(const int32_t* values, const int64_t* strides, const std::vector<int64_t>& places,
                             const std::vector<Shard>& shards, int k) {
  size_t count = 0;
  for (const Shard& shard : shards) count += shard.owned.size();
  TreeResult all{Tokens(count), Tokens(count * k), std::vector<uint8_t>(count * k), k};
  for (size_t rank = 0; rank < shards.size(); rank++) {
    const int32_t* table = values + static_cast<int64_t>(rank) * strides[0] + places[rank] * strides[1];
    for (size_t row = 0; row < shards[rank].owned.size(); row++) {
      const int32_t* from = table + static_cast<int64_t>(row) * strides[2];
      size_t node = shards[rank].owned[row];
      all.next_tokens[node] = from[0];
      std::copy_n(from + 1, k, all.candidates.begin() + node * k);
      std::memcpy(all.scores.data() + node * k, from + 1 + k, k);
    }
  }
  return all;
}

// What a step did to one sequence.
struct Conclusion {
  std::shared_ptr<TokenTree> tree;
  std::shared_ptr<std::vector<Shard>> shards;
  Tokens next_tokens, path, emitted;
  std::optional<Tokens> kept;  // none where the rank met logits that are not numbers
  std::optional<int32_t> failure;
  bool may_end = false;
};

class StepDraft {
 public:
  std::vector<SequenceState*> states;
  std::vector<std::shared_ptr<TokenTree>> trees;
  std::vector<std::shared_ptr<std::vector<Shard>>> shards;
  size_t rank;
  Served served;

  // Draft a tree per sequence, cut the trees to what pays, and split them over their home ranks.
  StepDraft(std::vector<SequenceState*> those, const std::vector<int64_t>& depths, Budget& budget, int64_t num_ranks,
            int64_t max_owned, size_t mine, std::optional<Served> rows)
      : states(std::move(those)), trees(states.size()), rank(mine) {
    if (rows) {
      served = std::move(*rows);
    } else {
      std::vector<int64_t> all(states.size());
      std::iota(all.begin(), all.end(), 0);
      served.assign(num_ranks, all);
    }
    for (const auto& [homes, members] : groups(num_ranks)) draft_group(homes, members, depths, budget);
    for (size_t i = 0; i < states.size(); i++)
      shards.push_back(std::make_shared<std::vector<Shard>>(split(*states[i], *trees[i], num_ranks, max_owned)));
  }

  const std::vector<int64_t>& own_trees() const { return served[rank]; }

  // Per rank, the tokens that it evaluates: pending chains and nodes.
  std::vector<int64_t> num_entries() const {
    std::vector<int64_t> counts(served.size(), 0);
    for (size_t each = 0; each < served.size(); each++)
      for (int64_t index : served[each])
        counts[each] += pending_at(*states[index], each) + static_cast<int64_t>((*shards[index])[each].nodes.size());
    return counts;
  }

  const Shard& own(size_t tree) const { return (*shards[tree])[rank]; }

  std::vector<Conclusion> conclude(const int32_t* values, const int64_t* strides, int k, Budget& budget) {
    std::vector<Conclusion> all;
    std::vector<std::vector<int64_t>> places(states.size(), std::vector<int64_t>(served.size(), 0));
    for (size_t each = 0; each < served.size(); each++)
      for (size_t place = 0; place < served[each].size(); place++) places[served[each][place]][each] = place;
    for (size_t i = 0; i < states.size(); i++) {
      TreeResult result = results_of(values, strides, places[i], *shards[i], k);
      Conclusion each{trees[i], shards[i], {}, accept(*trees[i], result.next_tokens), {}, {}, {}, false};
      if (!SequenceState::has_nan(own(i), result)) each.kept = kept_entries(*states[i], own(i), each.path, rank);
      int32_t bonus = result.next_tokens[each.path.back()];
      if (bonus < 0) each.failure = bonus;
      each.emitted = states[i]->advance(*trees[i], each.path, result, *shards[i]);
      each.may_end = each.failure || states[i]->may_end(each.emitted);
      each.next_tokens = std::move(result.next_tokens);
      all.push_back(std::move(each));
    }
    std::vector<const TokenTree*> those;
    std::vector<const Tokens*> paths;
    for (const Conclusion& each : all) {
      those.push_back(each.tree.get());
      paths.push_back(&each.path);
    }
    std::vector<AcceptanceHistory*> these = histories();
    budget.observe(those, paths, these);
    return all;
  }

 private:
  using Group = std::pair<std::vector<int64_t>, std::vector<size_t>>;

  // Home ranks, and the sequences that have just these, in order; without sequences all ranks and none.
  std::vector<Group> groups(int64_t num_ranks) const {
    std::vector<Group> found;
    for (size_t i = 0; i < states.size(); i++) {
      auto same = [&](const Group& each) { return each.first == states[i]->homes; };
      auto group = std::find_if(found.begin(), found.end(), same);
      if (group == found.end()) group = found.insert(found.end(), {states[i]->homes, {}});
      group->second.push_back(i);
    }
    if (found.empty()) {
      found.push_back({std::vector<int64_t>(num_ranks), {}});
      std::iota(found[0].first.begin(), found[0].first.end(), 0);
    }
    return found;
  }

  void draft_group(const std::vector<int64_t>& homes, const std::vector<size_t>& members,
                   const std::vector<int64_t>& depths, Budget& budget) {
    std::vector<const SequenceState*> these;
    for (size_t index : members) these.push_back(states[index]);
    auto [pending, kv] = workload(these, homes, &served);
    budget.begin(static_cast<int64_t>(members.size()), pending, kv, static_cast<int64_t>(homes.size()));
    std::vector<Draft> drafts;
    for (size_t index : members)
      drafts.push_back(states[index]->build(depths[index], budget.request(states[index]->acceptance)));
    std::vector<Draft*> those;
    std::vector<AcceptanceHistory*> their_histories;
    for (size_t i = 0; i < members.size(); i++) {
      those.push_back(&drafts[i]);
      their_histories.push_back(&states[members[i]]->acceptance);
    }
    budget.cut(those, their_histories);
    for (size_t i = 0; i < members.size(); i++) trees[members[i]] = std::move(drafts[i].tree);
  }

  std::vector<AcceptanceHistory*> histories() const {
    std::vector<AcceptanceHistory*> found;
    for (SequenceState* state : states) found.push_back(&state->acceptance);
    return found;
  }
};

// Cache rows that accepted entries lie in, and those where they belong, one after the other; not those in their place.
inline std::pair<std::vector<int64_t>, std::vector<int64_t>> cache_moves(const std::vector<const Conclusion*>& concluded,
                                                                         const std::vector<int64_t>& first_rows) {
  std::vector<int64_t> sources, targets;
  for (size_t i = 0; i < concluded.size(); i++) {
    if (!concluded[i]->kept) continue;
    const Tokens& kept = *concluded[i]->kept;
    for (size_t index = 0; index < kept.size(); index++) {
      if (kept[index] == static_cast<int32_t>(index)) continue;
      sources.push_back(first_rows[i] + kept[index]);
      targets.push_back(first_rows[i] + static_cast<int64_t>(index));
    }
  }
  return {std::move(sources), std::move(targets)};
}

}  // namespace lpr
