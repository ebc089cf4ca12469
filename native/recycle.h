// Recycled candidates (lpr/core/recycle.py): token -> the candidates of the last node that held it.
#pragma once

#include "flat_map.h"
#include "tree.h"

namespace lpr {

class CandidateTable {
 public:
  struct Row {
    const int32_t *tokens, *scores;
    int size;
  };

  size_t size() const { return sizes_.size(); }

  // The `count` candidates of a node that holds `token`, most likely first.
  void update(int32_t token, const int32_t* candidates, const int32_t* scores, int count) {
    if (count > stride_) widen(count);
    int64_t row = rows_.get(token);
    if (row < 0) {
      row = sizes_.size();
      rows_.replace(token, row);
      sizes_.push_back(0);
      data_.resize(data_.size() + 2 * stride_);
    }
    sizes_[row] = count;
    std::copy(candidates, candidates + count, data_.begin() + row * 2 * stride_);
    std::copy(scores, scores + count, data_.begin() + row * 2 * stride_ + stride_);
  }

  Row get(int32_t token) const {
    int64_t row = rows_.get(token);
    if (row < 0) return {nullptr, nullptr, 0};
    const int32_t* begin = data_.data() + row * 2 * stride_;
    return {begin, begin + stride_, sizes_[row]};
  }

 private:
  void widen(int stride) {
    Tokens wider(sizes_.size() * 2 * stride);
    for (size_t row = 0; row < sizes_.size(); row++) {
      for (int side = 0; side < 2; side++) {
        auto from = data_.begin() + (2 * row + side) * stride_;
        std::copy(from, from + stride_, wider.begin() + (2 * row + side) * stride);
      }
    }
    data_ = std::move(wider);
    stride_ = stride;
  }

  FlatMap rows_;
  Tokens data_, sizes_;  // data_: per row its candidates and then their scores, `stride_` places for each
  int stride_ = 0;
};

}  // namespace lpr
