// A budget for each set of home ranks. Specification: lpr/core/budgets.py.
#pragma once

#include <map>

#include "budget.h"

namespace lpr {

using Homes = std::vector<int64_t>;

class Budgets {
 public:
  std::optional<StepRow> first_times;  // none: fixed sizes

  Budgets(std::vector<TreeLimits> by_homes, std::optional<StepRow> times)
      : first_times(std::move(times)), limits_(std::move(by_homes)) {}
  Budgets(const Budgets&) = delete;

  void begin_step() {
    step_++;
    for (auto each = by_homes_.begin(); each != by_homes_.end();)
      each = step_ - each->second.last_used > constants.forgotten_after ? by_homes_.erase(each) : std::next(each);
  }

  void set_price(const Homes& homes, StepRow times, double other_tokens) {
    auto* budget = dynamic_cast<AdaptiveBudget*>(&of(homes));
    if (!budget) throw std::invalid_argument("fixed sizes have no price");
    budget->times = std::move(times);
    budget->other_tokens = other_tokens;
  }

  Budget& of(const Homes& homes) {
    Entry& entry = by_homes_[homes];
    if (!entry.budget && first_times)
      entry.budget = std::make_unique<AdaptiveBudget>(limits_, *first_times);
    else if (!entry.budget)
      entry.budget = std::make_unique<FixedBudget>(limits_);
    entry.last_used = step_;
    return *entry.budget;
  }

  size_t size() const { return by_homes_.size(); }

 private:
  struct Entry {
    std::unique_ptr<Budget> budget;
    int64_t last_used = 0;
  };
  std::vector<TreeLimits> limits_;  // of trees that 1, 2, ... or all ranks evaluate
  std::map<Homes, Entry> by_homes_;
  int64_t step_ = 0;
};

}  // namespace lpr
