// The layout of a step's payload. Specification: lpr/core/wire.py.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "accept.h"
#include "heads.h"
#include "partition.h"

namespace lpr {

// Per rank, the trees that it evaluates, in the order of its rows.
using Served = std::vector<std::vector<int64_t>>;

// The target model's results for each node of a tree: `candidates` and `scores` are [nodes, k], row after row.
struct TreeResult {
  Tokens next_tokens, candidates;
  std::vector<uint8_t> scores;
  int k = 0;
};

// A tree that one rank alone has evaluated: per node the word of its number, its parent's and its source, its token, and
// the next token. Children come after their parents.
struct LoneTree {
  static constexpr int kWords = 3;
  const int32_t* words;
  int32_t count;

  int32_t parent(int32_t node) const { return words[kWords * node] >> constants.node_bits & ((1 << constants.node_bits) - 1); }
  uint8_t source(int32_t node) const { return words[kWords * node] >> 2 * constants.node_bits & 0xF; }
  int32_t token(int32_t node) const { return words[kWords * node + 1]; }
  int32_t next(int32_t node) const { return words[kWords * node + 2]; }

  bool has_nan() const {
    for (int32_t node = 0; node < count; node++)
      if (next(node) == kNotANumber) return true;
    return false;
  }

  // Calls `visit` with each node of the accepted path below the root (see `accept`); returns the path's last node.
  template <typename Visit>
  int32_t follow(const Visit& visit) const {
    int32_t last = 0;
    for (int32_t node = 1; node < count && next(last) >= 0; node++) {
      if (parent(node) != last || token(node) != next(last)) continue;
      if (next(node) < kProcessorFailed) break;
      visit(node);
      last = node;
    }
    return last;
  }
};

inline int result_words(int k) { return 1 + k + (k + 3) / 4; }

// The payloads of some ranks, which lie `stride` words apart, of `num_words` words each.
struct Payloads {
  const int32_t* words;
  int64_t num_ranks, stride, num_words, capacity, width, num_guesses;

  int64_t num_trees() const {
    int64_t words_of_tree = constants.num_tree_header + capacity * width + block_words(num_guesses);
    return (num_words - constants.num_header) / words_of_tree;
  }
  const int32_t* of(int64_t rank) const { return words + rank * stride; }
  const int32_t* tree_header(int64_t rank, int64_t place) const {
    return of(rank) + constants.num_header + place * constants.num_tree_header;
  }
  int32_t num_candidates(int64_t rank) const { return of(rank)[3]; }
  int32_t rows(int64_t rank) const { return of(rank)[5]; }
  int32_t num_owned(int64_t rank, int64_t place) const { return tree_header(rank, place)[2]; }
  // The words of the i-th node that a rank owns of a tree.
  const int32_t* node(int64_t rank, int64_t place, int64_t i) const {
    return tree_header(rank, num_trees()) + (place * capacity + i) * width;
  }
  // What the head of a rank guesses for a tree.
  const int32_t* block(int64_t rank, int64_t place) const {
    return node(rank, num_trees(), 0) + place * block_words(num_guesses);
  }
  // Of the ranks that share a replica the first ones.
  Payloads authoritative(int64_t num_replicas) const {
    return {words, num_replicas, stride * (num_ranks / num_replicas), num_words, capacity, width, num_guesses};
  }
};

// A rank's header and tree headers.
inline Tokens pack_header(uint64_t digest, int32_t num_command_bytes, int32_t num_candidates,
                          const std::vector<uint64_t>& tree_digests, const std::vector<int32_t>& num_owned) {
  Tokens words;
  auto add = [&](uint64_t each) {
    words.push_back(static_cast<int32_t>(static_cast<uint32_t>(each)));
    words.push_back(static_cast<int32_t>(static_cast<uint32_t>(each >> 32)));
  };
  add(digest);
  words.push_back(num_command_bytes);
  words.push_back(num_candidates);
  words.push_back(0);  // the time that the rank has taken, once it is known
  words.push_back(0);  // and the digest of the rows that it has evaluated
  for (size_t i = 0; i < tree_digests.size(); i++) {
    add(tree_digests[i]);
    words.push_back(num_owned[i]);
  }
  return words;
}

// True if all ranks hold the same, the ranks that evaluate a tree the same of it, and those of a replica the same rows.
inline bool headers_agree(const Payloads& all, const Served& served, size_t num_trees) {
  if (all.num_ranks == 1) return true;
  std::vector<const int32_t*> first(num_trees, nullptr);  // per tree, what the first rank that evaluates it has sent
  int64_t replica_size = all.num_ranks / served.size();
  for (int64_t rank = 0; rank < all.num_ranks; rank++) {
    if (!std::equal(all.of(rank), all.of(rank) + 2, all.of(0))) return false;
    if (all.rows(rank) != all.rows(rank - rank % replica_size)) return false;
    const std::vector<int64_t>& trees = served[rank * served.size() / all.num_ranks];
    for (size_t place = 0; place < trees.size(); place++) {
      const int32_t*& known = first[trees[place]];
      const int32_t* here = all.tree_header(rank, place);
      if (!known) known = here;
      if (!std::equal(here, here + 2, known)) return false;
    }
  }
  return true;
}

// A tree's results, each node's from the rank that owns it; `places` has the tree's number per rank.
inline TreeResult read_result(const Payloads& all, const std::vector<int64_t>& places, const std::vector<Shard>& shards,
                              int k) {
  size_t count = 0;
  for (const Shard& shard : shards) count += shard.owned.size();
  TreeResult result{Tokens(count), Tokens(count * k), std::vector<uint8_t>(count * k), k};
  for (size_t rank = 0; rank < shards.size(); rank++) {
    for (size_t i = 0; i < shards[rank].owned.size(); i++) {
      const int32_t* from = all.node(rank, places[rank], i);
      size_t node = shards[rank].owned[i];
      result.next_tokens[node] = from[0];
      std::copy_n(from + 1, k, result.candidates.begin() + node * k);
      std::memcpy(result.scores.data() + node * k, from + 1 + k, k);
    }
  }
  return result;
}

// The two words of a node, its token above its number, its parent's number and its source.
inline int64_t node_word(const TokenTree& tree, int node) {
  int bits = constants.node_bits;
  int64_t parent = std::max(0, tree.parents[node]), source = tree.sources[node];
  return static_cast<int64_t>(tree.tokens[node]) << 32 | source << 2 * bits | parent << bits | node;
}

// Append the words of a LoneTree; false and nothing if its nodes are not in the order of their numbers, or no tree.
inline bool read_lone_tree(const Payloads& all, int64_t home, int64_t place, Tokens& words) {
  int64_t count = all.num_owned(home, place);
  if (count < 1 || count > all.capacity) return false;
  const int bits = constants.node_bits, mask = (1 << bits) - 1;
  size_t begin = words.size();
  words.resize(begin + LoneTree::kWords * count);
  int32_t* to = words.data() + begin;
  for (int32_t node = 0; node < count; node++, to += LoneTree::kWords) {
    const int32_t *result = all.node(home, place, node), *row = result + all.width - constants.num_node_words;
    if ((row[0] & mask) != node || (node && (row[0] >> bits & mask) >= node)) {
      words.resize(begin);
      return false;
    }
    to[0] = row[0];
    to[1] = row[1];
    to[2] = result[0];
  }
  return true;
}

// The tree that `homes` evaluated, and its shards, from the words of the nodes that each of them owns.
inline std::pair<std::shared_ptr<TokenTree>, std::vector<Shard>> read_tree(const Payloads& all,
                                                                           const std::vector<int64_t>& homes,
                                                                           const std::vector<int64_t>& places) {
  const std::invalid_argument no_tree("the nodes that ranks have sent are no tree");
  int64_t total = 0;
  for (int64_t rank : homes) {
    int64_t count = all.num_owned(rank, places[rank]);
    if (count < 0 || count > all.capacity) throw no_tree;
    total += count;
  }
  const int bits = constants.node_bits, mask = (1 << bits) - 1;
  std::vector<const int32_t*> rows(total, nullptr);
  std::vector<Shard> shards(all.num_ranks);
  for (int64_t rank : homes) {
    for (int64_t i = 0; i < all.num_owned(rank, places[rank]); i++) {
      const int32_t* row = all.node(rank, places[rank], i) + all.width - constants.num_node_words;
      int32_t node = row[0] & mask;
      if (node >= total || rows[node]) throw no_tree;
      rows[node] = row;
      shards[rank].owned.push_back(node);
    }
  }
  if (!total) throw no_tree;
  auto tree = std::make_shared<TokenTree>(rows[0][1]);
  tree->reserve(total);
  for (int32_t node = 1; node < total; node++) {
    int32_t parent = rows[node][0] >> bits & mask;
    if (parent >= node || tree->add(parent, rows[node][1], static_cast<uint8_t>(rows[node][0] >> 2 * bits & 0xF)) != node)
      throw no_tree;
  }
  std::vector<int64_t> seen(total, -1);  // the last rank that evaluates a node
  for (int64_t rank : homes) {
    Tokens& nodes = shards[rank].nodes;
    nodes.push_back(0);
    seen[0] = rank;
    for (int32_t owned : shards[rank].owned)
      for (int32_t node = owned; seen[node] != rank; node = tree->parents[node]) {
        seen[node] = rank;
        nodes.push_back(node);
      }
    std::sort(nodes.begin(), nodes.end());
  }
  return {std::move(tree), std::move(shards)};
}

}  // namespace lpr
