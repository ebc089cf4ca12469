// The passes of a low-bit copy for one sequence, without Python between them (lpr.model.self_draft).
//
// A pass reads all weights and evicts Python's memory from the caches.
#pragma once

#include <chrono>
#include <cmath>
#include <memory>

#include "paged_step.h"
#include "selection.h"
#include "state.h"
#include "workspace.h"

namespace lpr {

// When a further pass pays (lpr.core.passes): if its gain exceeds what it needs by the passes made and by its entries.
struct PassRules {
  Numbers by_made, by_entries;
  Numbers copy, text;  // how often choices of the copy, and tokens of the text, were right, by the octave of their odds
  double least_text;   // path probability of a token of the text that a pass evaluates
  int64_t num_likely;  // tokens that are looked at
};

// The sequence: the cache row of its last token, behind which up to `most` tokens may follow, none behind one of `ends`.
struct PassStart {
  const SequenceState* state;  // has the text behind its tokens and those `emitted` since; or null
  Tokens emitted;
  const int32_t* table;
  int64_t page_size, num_cached, most;
  int32_t token;
  Tokens ends, text;  // `text`: what the first pass evaluates
  Numbers shares;     // of the text
};

struct MadePass {
  Tokens text;
  Numbers shares;
  std::vector<std::vector<int64_t>> tokens;  // of each entry
  std::vector<std::vector<float>> odds;
  double ms;
};

inline double of_octave(const Numbers& estimates, double share) {
  int octave;
  std::frexp(share / std::max(1.0 - share, 1e-9), &octave);
  return estimates[std::clamp(octave, 0, static_cast<int>(estimates.size()) - 1)];
}

// `compute` gives the address of the logits of entries from their reader, tokens, cache rows and first position on, of
// `size` tokens each.
template <class Compute>
std::vector<MadePass> make_passes(PassStart at, const PassRules& rules, const Choice& choice, int64_t size, bool is_half,
                                  int threads, const Compute& compute) {
  using Clock = std::chrono::steady_clock;
  std::vector<MadePass> made;
  Tokens chain;
  double path = 1.0;
  while (true) {
    auto began = Clock::now();
    MadePass pass{at.text, at.shares, {}, {}, 0.0};
    int64_t held = at.num_cached + static_cast<int64_t>(chain.size());
    int32_t count = 1 + static_cast<int32_t>(at.text.size());
    Tokens entries{chain.empty() ? at.token : chain.back()};
    entries.insert(entries.end(), at.text.begin(), at.text.end());
    for (int32_t i = 0; i < count; i++) entries.push_back(i - 1);
    for (int32_t i = 0; i < count; i++) entries.push_back(static_cast<int32_t>(held) + i);
    PagedStep step{{}, at.page_size, threads};
    step.sequences.emplace_back(at.table, static_cast<int32_t>(held), entries.data(), count, 0, 0);
    std::vector<int64_t> rows;
    for (int32_t i = 0; i < count; i++) rows.push_back(step.row_of(step.sequences[0], held + i));
    auto reader = read_pages(std::move(step));
    uintptr_t logits = compute(*reader, entries.data(), rows, held - at.num_cached);
    bool is_open = true;
    for (int32_t i = 0; i < count; i++) {
      std::vector<int64_t> tokens(rules.num_likely);
      std::vector<float> odds(rules.num_likely);
      draft_likely(logits + static_cast<uintptr_t>(i * size * (is_half ? 2 : 4)), size, is_half, choice,
                   noise_key(choice.seed, static_cast<int32_t>(held) + i + 1), rules.num_likely, tokens.data(), odds.data());
      pass.tokens.push_back(tokens);
      pass.odds.push_back(odds);
      is_open = is_open && tokens[0] >= 0;
      if (!is_open) break;
      double whole = 0.0;
      for (float each : odds) whole += static_cast<double>(each) * each;
      path *= of_octave(rules.copy, 0.5 + (whole > 0 ? odds[0] * odds[0] / whole / 2 : 0.0));
      int32_t token = static_cast<int32_t>(tokens[0]);
      chain.push_back(token);
      is_open = static_cast<int64_t>(chain.size()) < at.most && std::find(at.ends.begin(), at.ends.end(), token) == at.ends.end();
      if (!is_open || i == count - 1 || token != at.text[i]) break;
    }
    pass.ms = std::chrono::duration<double, std::milli>(Clock::now() - began).count();
    made.push_back(std::move(pass));
    if (!is_open || made.size() >= rules.by_made.size()) return made;
    int64_t limit = std::min<int64_t>(rules.by_entries.size(), at.most - static_cast<int64_t>(chain.size())) - 1;
    at.text.clear();
    at.shares.clear();
    double likely = 1.0;
    if (at.state && at.state->drafter && limit > 0) {
      Tokens known = at.emitted;
      known.insert(known.end(), chain.begin(), chain.end());
      std::tie(at.text, at.shares) = at.state->drafter->continuation(known, static_cast<int>(limit));
      size_t kept = 0;
      for (double further; kept < at.shares.size(); kept++, likely = further)
        if ((further = likely * of_octave(rules.text, at.shares[kept])) < rules.least_text) break;
      at.text.resize(kept);
      at.shares.resize(kept);
    }
    bool is_cut = limit > 0 && static_cast<int64_t>(at.text.size()) == limit;  // the text goes on behind the pass
    if (path * (is_cut ? 1.0 - likely : 1.0) <= rules.by_made[made.size()] + rules.by_entries[at.text.size()]) return made;
  }
}

}  // namespace lpr
