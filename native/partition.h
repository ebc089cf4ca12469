// Which rank evaluates which nodes of a tree. Specification: lpr/core/partition.py.
#pragma once

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "tree.h"

namespace lpr {

struct Shard {
  Tokens nodes, owned;  // ascending
};

// The nodes in depth-first order, children in the order in which they were drafted.
inline Tokens depth_first(const TokenTree& tree) {
  Tokens order;
  order.reserve(tree.size());
  for (int node = 0; node >= 0;) {
    order.push_back(node);
    int next = tree.first_child[node];
    for (; next < 0 && node > 0; node = tree.parents[node]) next = tree.next_sibling[node];
    node = next;
  }
  return order;
}

// How many nodes of `order` each rank takes when none may evaluate more than `size` tokens.
inline std::vector<int64_t> run_lengths(const TokenTree& tree, const Tokens& order, const std::vector<int64_t>& pending,
                                        int64_t size, int64_t limit) {
  std::vector<int64_t> lengths;
  int64_t start = 0, count = static_cast<int64_t>(order.size());
  for (int64_t chain : pending) {
    int64_t above = start < count ? tree.depths[order[start]] : 0;  // ancestors to evaluate besides the run
    lengths.push_back(std::max<int64_t>(0, std::min({size - chain - above, limit, count - start})));
    start += lengths.back();
  }
  return lengths;
}

inline std::vector<Shard> partition(const TokenTree& tree, int64_t num_ranks, const std::vector<int64_t>& pending,
                                    std::optional<int64_t> max_owned) {
  int64_t count = tree.size();
  if (num_ranks == 1) {
    Tokens everything(count);
    std::iota(everything.begin(), everything.end(), 0);
    return {{everything, everything}};
  }
  int64_t limit = max_owned.value_or(count);
  std::string refusal = std::to_string(count) + " nodes do not fit " + std::to_string(num_ranks) +
                        " ranks that own at most " + std::to_string(limit) + " each";
  if (limit * num_ranks < count) throw std::invalid_argument(refusal);
  Tokens order = depth_first(tree);
  auto covers = [&](int64_t size) {
    auto lengths = run_lengths(tree, order, pending, size, limit);
    return std::accumulate(lengths.begin(), lengths.end(), int64_t{0}) == count;
  };
  int64_t total = count + std::accumulate(pending.begin(), pending.end(), int64_t{0});
  int64_t low = std::max<int64_t>(1, (total + num_ranks - 1) / num_ranks);
  int64_t high = count + *std::max_element(pending.begin(), pending.end());
  while (low < high) {  // the smallest size that lets the runs cover the tree
    int64_t middle = (low + high) / 2;
    if (covers(middle))
      high = middle;
    else
      low = middle + 1;
  }
  std::vector<Shard> shards;
  int64_t start = 0;
  for (int64_t length : run_lengths(tree, order, pending, low, limit)) {
    Shard shard;
    shard.owned.assign(order.begin() + start, order.begin() + start + length);
    std::sort(shard.owned.begin(), shard.owned.end());
    shard.nodes = shard.owned;
    Tokens above = length ? tree.path_to(order[start]) : Tokens{0};
    shard.nodes.insert(shard.nodes.end(), above.begin(), above.end());
    std::sort(shard.nodes.begin(), shard.nodes.end());
    shard.nodes.erase(std::unique(shard.nodes.begin(), shard.nodes.end()), shard.nodes.end());
    shards.push_back(std::move(shard));
    start += length;
  }
  if (start < count) throw std::invalid_argument(refusal);
  return shards;
}

}  // namespace lpr
