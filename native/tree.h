// The token tree as flat arrays, with a hash of its edges. Specification: lpr/core/tree.py.
#pragma once

#include <cstdint>
#include <vector>

#include "keyed_hash.h"

namespace lpr {

enum Source : uint8_t { kRoot, kWindow, kPool, kTrie, kSharedTrie, kRecycled, kPrediction, kHead, kCopy };
constexpr size_t kNumSources = kCopy + 1;

using Tokens = std::vector<int32_t>;

class TokenTree {
 public:
  Tokens tokens, parents, depths;
  std::vector<uint8_t> sources;
  // Children of a node in the order in which they were added: the first, and of each node its next sibling.
  Tokens first_child, next_sibling;

  explicit TokenTree(int32_t root_token) { append(-1, root_token, 0, kRoot); }

  int size() const { return static_cast<int>(tokens.size()); }

  // Make room for so many nodes.
  void reserve(size_t count) {
    for (auto* column : {&tokens, &parents, &depths, &first_child, &last_child_, &next_sibling}) column->reserve(count);
    sources.reserve(count);
    size_t slots = 32;
    while (slots < 2 * count) slots *= 2;
    if (num_edges_ == 0 && count > 1) edges_.assign(slots, -1);
  }

  // The child of `parent` that holds `token`; -1 if there is none.
  int find(int parent, int32_t token) const {
    if (edges_.empty()) return -1;
    for (size_t at = home(parent, token);; at = (at + 1) & (edges_.size() - 1)) {
      int node = edges_[at];
      if (node < 0 || (parents[node] == parent && tokens[node] == token)) return node;
    }
  }

  int add(int parent, int32_t token, uint8_t source) {
    int node = find(parent, token);
    if (node >= 0) return node;
    node = size();
    append(parent, token, depths[parent] + 1, source);
    link(node);
    return node;
  }

  void truncate(int count) {
    if (count >= size()) return;
    for (auto* column : {&tokens, &parents, &depths}) column->resize(count);
    sources.resize(count);
    first_child.assign(count, -1);
    last_child_.assign(count, -1);
    next_sibling.assign(count, -1);
    edges_.assign(edges_.size(), -1);
    num_edges_ = 0;
    for (int node = 1; node < count; node++) link(node);
  }

  Tokens path_to(int node) const {
    Tokens path;
    for (; node >= 0; node = parents[node]) path.push_back(node);
    return {path.rbegin(), path.rend()};
  }

 private:
  void append(int parent, int32_t token, int depth, uint8_t source) {
    tokens.push_back(token);
    parents.push_back(parent);
    depths.push_back(depth);
    sources.push_back(source);
    first_child.push_back(-1);
    last_child_.push_back(-1);
    next_sibling.push_back(-1);
  }

  void link(int node) {
    int parent = parents[node];
    (last_child_[parent] < 0 ? first_child[parent] : next_sibling[last_child_[parent]]) = node;
    last_child_[parent] = node;
    if (2 * ++num_edges_ > edges_.size()) {
      edges_.assign(edges_.empty() ? 32 : 2 * edges_.size(), -1);
      for (int each = 1; each < node; each++) insert_edge(each);
    }
    insert_edge(node);
  }

  void insert_edge(int node) {
    size_t at = home(parents[node], tokens[node]);
    while (edges_[at] >= 0) at = (at + 1) & (edges_.size() - 1);
    edges_[at] = node;
  }

  size_t home(int parent, int32_t token) const {
    uint64_t key = static_cast<uint64_t>(parent) << 32 | static_cast<uint32_t>(token);
    return (keyed_hash(key) >> 32) & (edges_.size() - 1);
  }

  Tokens last_child_, edges_;  // edges_: nodes by (parent, token), -1 where there is none
  size_t num_edges_ = 0;
};

}  // namespace lpr
