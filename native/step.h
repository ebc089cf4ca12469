// A step of a batch, between what goes up to the device and what comes back (StepDraft in lpr/core/rows.py).
#pragma once

#include <utility>

#include "budgets.h"
#include "carried.h"
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

// What ranks say besides their results (lpr/core/headers.py): a row of words of each.
struct Headers {
  const int32_t* words;
  int64_t num_ranks, stride;

  const int32_t* row(int64_t rank) const { return words + rank * stride; }
  int32_t num_candidates(int64_t rank) const { return row(rank)[3]; }
  const int32_t* of_tree(int64_t rank, int64_t place) const {
    return row(rank) + constants.num_header + place * constants.num_tree_header;
  }
  int32_t num_owned(int64_t rank, int64_t place) const { return of_tree(rank, place)[2]; }
};

// What a step did to one sequence.
struct Conclusion {
  std::shared_ptr<TokenTree> tree;
  std::shared_ptr<std::vector<Shard>> shards;
  Tokens next_tokens, path, emitted;
  std::optional<Tokens> kept;  // none where the rank met logits that are not numbers
  std::optional<int32_t> failure;
  bool may_end = false;
};

// What a step evaluates of its sequences. Trees and shards are null where other ranks serve the sequence, which alone
// draft its tree; once concluded, all are there.
class StepDraft {
 public:
  std::vector<SequenceState*> states;
  std::vector<std::shared_ptr<TokenTree>> trees;
  std::vector<std::shared_ptr<std::vector<Shard>>> shards;
  size_t rank;
  Served served;
  std::vector<int64_t> num_entries;  // per rank, the tokens that it has evaluated; once concluded

  // Draft a tree per sequence that this rank serves, cut the trees to what pays, and split them over their home ranks.
  StepDraft(std::vector<SequenceState*> those, const std::vector<int64_t>& depths, Budgets& budgets, int64_t num_ranks,
            int64_t max_owned, size_t mine, std::optional<Served> rows)
      : states(std::move(those)), trees(states.size()), shards(states.size()), rank(mine) {
    if (rows) {
      served = std::move(*rows);
    } else {
      std::vector<int64_t> all(states.size());
      std::iota(all.begin(), all.end(), 0);
      served.assign(num_ranks, all);
    }
    budgets.begin_step();
    for (const auto& [homes, members] : groups()) {
      draft_group(homes, members, depths, budgets.of(homes));
      for (size_t i : members)
        shards[i] = std::make_shared<std::vector<Shard>>(split(*states[i], *trees[i], num_ranks, max_owned));
    }
  }

  const std::vector<int64_t>& own_trees() const { return served[rank]; }

  const Shard& own(size_t tree) const { return (*shards[tree])[rank]; }

  Tokens headers(uint64_t digest, int32_t num_command_bytes, int32_t num_candidates, bool is_compared) const {
    Tokens words;
    auto add = [&](uint64_t signature) {
      words.push_back(static_cast<int32_t>(static_cast<uint32_t>(signature)));
      words.push_back(static_cast<int32_t>(static_cast<uint32_t>(signature >> 32)));
    };
    add(digest);
    words.push_back(num_command_bytes);
    words.push_back(num_candidates);
    for (int64_t tree : own_trees()) {
      add(is_compared ? states[tree]->sign_tree(*trees[tree]) : 0);
      words.push_back(static_cast<int32_t>(own(tree).owned.size()));
    }
    return words;
  }

  // Do all ranks hold the same by their headers, of which there are as many for each replica?
  bool agrees(const Headers& said) const {
    std::vector<const int32_t*> first(states.size(), nullptr);  // per tree, what the first rank that serves it signed
    for (int64_t rank = 0; rank < said.num_ranks; rank++) {
      if (!std::equal(said.row(rank), said.row(rank) + 2, said.row(0))) return false;
      const std::vector<int64_t>& served_there = served[rank * served.size() / said.num_ranks];
      for (size_t place = 0; place < served_there.size(); place++) {
        const int32_t*& known = first[served_there[place]];
        const int32_t* here = said.of_tree(rank, place);
        if (!known) known = here;
        if (!std::equal(here, here + 2, known)) return false;
      }
    }
    return true;
  }

  // `said` are the headers of the ranks whose results `values` are.
  std::vector<Conclusion> conclude(const int32_t* values, const int64_t* strides, int64_t width, const Headers& said,
                                   Budgets& budgets) {
    std::vector<Conclusion> all;
    std::vector<std::vector<int64_t>> places(states.size(), std::vector<int64_t>(served.size(), 0));
    for (size_t each = 0; each < served.size(); each++)
      for (size_t place = 0; place < served[each].size(); place++) places[served[each][place]][each] = place;
    num_entries.assign(served.size(), 0);
    for (size_t i = 0; i < states.size(); i++) {
      SequenceState& state = *states[i];
      bool is_mine = trees[i] != nullptr;
      if (!is_mine) {
        receive(i, values, strides, width, places[i], said);
        state.forget_drafts();
      }
      int32_t k = std::numeric_limits<int32_t>::max();
      for (int64_t home : state.homes()) k = std::min(k, said.num_candidates(home));
      TreeResult result = results_of(values, strides, places[i], *shards[i], k);
      Conclusion each{trees[i], shards[i], {}, accept(*trees[i], result.next_tokens), {}, Tokens{}, {}, false};
      if (is_mine && SequenceState::has_nan(own(i), result))
        each.kept.reset();
      else if (is_mine)
        each.kept = kept_entries(state, own(i), each.path, rank);
      int32_t bonus = result.next_tokens[each.path.back()];
      if (bonus < 0) each.failure = bonus;
      for (int64_t home : state.homes())
        num_entries[home] += pending_at(state, home) + static_cast<int64_t>((*shards[i])[home].nodes.size());
      each.emitted = state.advance(*trees[i], each.path, result, *shards[i]);
      each.may_end = each.failure || state.may_end(each.emitted);
      each.next_tokens = std::move(result.next_tokens);
      all.push_back(std::move(each));
    }
    for (const auto& [homes, members] : groups()) {
      std::vector<const TokenTree*> those;
      std::vector<const Tokens*> paths;
      std::vector<AcceptanceHistory*> histories;
      for (size_t i : members) {
        those.push_back(all[i].tree.get());
        paths.push_back(&all[i].path);
        histories.push_back(&states[i]->acceptance);
      }
      budgets.of(homes).observe(those, paths, histories);
    }
    return all;
  }

 private:
  using Group = std::pair<std::vector<int64_t>, std::vector<size_t>>;

  // Sets of home ranks, and those of this rank's trees that have just these, both in the order of the sequences.
  std::vector<Group> groups() const {
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

  // Take the tree of a sequence, and its shards, from what its home ranks have sent.
  void receive(size_t tree, const int32_t* values, const int64_t* strides, int64_t width,
               const std::vector<int64_t>& places, const Headers& said) {
    const std::vector<int64_t>& homes = states[tree]->homes();
    std::vector<int64_t> owned(served.size(), 0);
    for (int64_t home : homes) owned[home] = said.num_owned(home, places[home]);
    auto row_of = [&](int64_t home, int64_t i) {
      return values + home * strides[0] + places[home] * strides[1] + i * strides[2] + width - 2;
    };
    auto [read, split] = read_tree(row_of, homes, owned, served.size());
    trees[tree] = std::move(read);
    shards[tree] = std::make_shared<std::vector<Shard>>(std::move(split));
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
    std::vector<AcceptanceHistory*> histories;
    for (size_t i = 0; i < members.size(); i++) {
      those.push_back(&drafts[i]);
      histories.push_back(&states[members[i]]->acceptance);
    }
    budget.cut(those, histories);
    for (size_t i = 0; i < members.size(); i++) trees[members[i]] = std::move(drafts[i].tree);
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
