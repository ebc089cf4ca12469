// A budget for each set of home ranks (lpr/core/budgets.py).
#pragma once

#include <functional>
#include <map>
#include <memory>

#include "budget.h"

namespace lpr {

class Budgets {
 public:
  explicit Budgets(std::function<std::unique_ptr<Budget>()> make) : make_(std::move(make)) {}
  Budgets(const Budgets&) = delete;

  void begin_step() {
    step_++;
    for (auto each = by_homes_.begin(); each != by_homes_.end();)
      each = step_ - each->second.last_used > constants.forgotten_after ? by_homes_.erase(each) : std::next(each);
  }

  Budget& of(const std::vector<int64_t>& homes) {
    Entry& entry = by_homes_[homes];
    if (!entry.budget) entry.budget = make_();
    entry.last_used = step_;
    return *entry.budget;
  }

  size_t size() const { return by_homes_.size(); }

 protected:
  struct Entry {
    std::unique_ptr<Budget> budget;
    int64_t last_used = 0;
  };
  std::map<std::vector<int64_t>, Entry> by_homes_;

 private:
  std::function<std::unique_ptr<Budget>()> make_;
  int64_t step_ = 0;
};

}  // namespace lpr
