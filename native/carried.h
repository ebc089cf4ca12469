// A tree as it travels in the gather (lpr/core/carried.py).
#pragma once

#include "partition.h"

namespace lpr {

constexpr int kNodeBits = 14;
constexpr int32_t kNodeMask = (1 << kNodeBits) - 1;

inline int64_t node_word(const TokenTree& tree, int node) {
  int64_t parent = std::max(0, tree.parents[node]);
  return static_cast<int64_t>(tree.tokens[node]) << 32 | static_cast<int64_t>(tree.sources[node]) << 2 * kNodeBits |
         parent << kNodeBits | node;
}

// The tree that `homes` evaluated, and its shards. `row_of(rank, i)` points to the two words of the i-th node that a
// rank owns, `counts` says per rank how many these are.
template <typename RowOf>
std::pair<std::shared_ptr<TokenTree>, std::vector<Shard>> read_tree(const RowOf& row_of,
                                                                    const std::vector<int64_t>& homes,
                                                                    const std::vector<int64_t>& counts,
                                                                    size_t num_ranks) {
  const std::invalid_argument no_tree("the nodes that ranks have sent are no tree");
  int64_t total = 0;
  for (int64_t rank : homes) total += counts[rank];
  std::vector<const int32_t*> rows(total, nullptr);
  std::vector<Shard> shards(num_ranks);
  for (int64_t rank : homes) {
    for (int64_t i = 0; i < counts[rank]; i++) {
      const int32_t* row = row_of(rank, i);
      int32_t node = row[0] & kNodeMask;
      if (node >= total || rows[node]) throw no_tree;
      rows[node] = row;
      shards[rank].owned.push_back(node);
    }
  }
  if (!total) throw no_tree;
  auto tree = std::make_shared<TokenTree>(rows[0][1]);
  tree->reserve(total);
  for (int32_t node = 1; node < total; node++) {
    int32_t parent = rows[node][0] >> kNodeBits & kNodeMask;
    if (parent >= node || tree->add(parent, rows[node][1], static_cast<uint8_t>(rows[node][0] >> 2 * kNodeBits)) != node)
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
