// Online alignment of an output with its prediction. Specification: lpr/core/alignment.py.
#pragma once

#include <algorithm>
#include <utility>

#include "constants.h"
#include "suffix_index.h"

namespace lpr {

// Places of the next token in a text: indices into the tokens of its suffix index, which forgets nothing.
struct Alignment {
  struct Cursor {
    int64_t place;
    int strength;
  };

  std::vector<Cursor> cursors;  // the strongest first
  int64_t anchor = 0;           // the latest place that was sure
  int lost = 0;                 // tokens of the output since then

  // The alignment after one more token of the output, the last of a context.
  Alignment follow(const SuffixIndex& index, const int32_t* context, size_t count) const {
    int32_t token = context[count - 1];
    std::vector<Cursor> found;
    for (const Cursor& each : cursors) {
      if (index.token(each.place) == token) {
        offer(found, each.place + 1, each.strength + 1);
      } else {
        offer(found, each.place + 1, each.strength - constants.replaced_cost);
        offer(found, each.place, each.strength - constants.inserted_cost);
      }
    }
    if (cursors.empty() || index.token(cursors[0].place) != token) {
      bool is_lost = lost >= constants.lost_after;
      if (!is_lost) offer_near(found, index, context, count);
      index.match(context, count, constants.node_places, [&](int64_t place, int length) {
        if (length >= constants.lost_match || !is_lost) offer(found, place, length);
      });
    }
    auto is_outside = [&](const Cursor& each) { return each.place >= index.size(); };
    found.erase(std::remove_if(found.begin(), found.end(), is_outside), found.end());
    auto is_stronger = [](const Cursor& one, const Cursor& other) { return one.strength > other.strength; };
    std::stable_sort(found.begin(), found.end(), is_stronger);
    if (static_cast<int>(found.size()) > constants.most_cursors) found.resize(constants.most_cursors);
    if (!found.empty() && found[0].strength >= constants.sure_strength) {
      int64_t place = found[0].place;
      return {std::move(found), place, 0};
    }
    return {std::move(found), anchor, lost + 1};
  }

 private:
  static void offer(std::vector<Cursor>& found, int64_t place, int strength) {
    if (strength <= 0) return;
    strength = std::min(strength, constants.max_match);
    for (Cursor& each : found) {
      if (each.place != place) continue;
      each.strength = std::max(each.strength, strength);
      return;
    }
    found.push_back({place, strength});
  }

  // Offer places behind the first occurrences of the last token of a context around the anchor.
  void offer_near(std::vector<Cursor>& found, const SuffixIndex& index, const int32_t* context, size_t count) const {
    const int32_t* last = context + count - 1;
    int64_t end = std::min(anchor + constants.near_after, index.size());
    int left = constants.near_places;
    for (int64_t place = std::max<int64_t>(0, anchor - constants.near_before); place < end && left; place++) {
      if (index.token(place) != *last) continue;
      left--;
      int64_t length = 1, most = std::min<int64_t>({static_cast<int64_t>(count), constants.max_match, place + 1});
      while (length < most && index.token(place - length) == last[-length]) length++;
      offer(found, place + 1, static_cast<int>(length) + constants.near_bonus);
    }
  }
};

// The text that a request's output is predicted to follow, and where the output is in it.
struct Prediction {
  SuffixIndex index;
  Alignment alignment;

  Prediction(const Tokens& tokens, int64_t num_prompt) : index(tokens.size()), num_unseen_(num_prompt) {
    index.extend(tokens.data(), tokens.size());
    alignment.cursors.push_back({0, constants.first_strength});
  }

  // Follow committed tokens, the prompt's first; `tail` are those before them.
  void observe(const Tokens& tail, const int32_t* tokens, size_t count) {
    int64_t skipped = std::min<int64_t>(num_unseen_, count);
    num_unseen_ -= skipped;
    Tokens known = tail;
    known.insert(known.end(), tokens, tokens + count);
    for (size_t end = tail.size() + skipped + 1; end <= known.size(); end++) {
      size_t size = std::min<size_t>(end, constants.max_match);
      alignment = alignment.follow(index, known.data() + end - size, size);
    }
  }

  // True if the token before a place is `last`.
  bool agrees(int64_t place, int32_t last) const { return !place || index.token(place - 1) == last; }

 private:
  int64_t num_unseen_;
};

}  // namespace lpr
