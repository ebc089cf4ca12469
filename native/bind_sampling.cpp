// Choosing tokens on a CPU (lpr.model.sampling.in_cpp): rows of logits in, ids out, without the interpreter's lock.
#include "bindings.h"
#include "parallel.h"
#include "sampling.h"

namespace lpr {

template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T, int N>
using Found = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

// Writes the token of every row, NONE or DOUBT; a temperature of 0 takes the largest score.
void choose_rows(uintptr_t address, int64_t size, int64_t stride, bool is_half, const Column<float>& temperature,
                 const Column<uint32_t>& keys, const Column<int64_t>& top_k, const Column<float>& top_p,
                 const Column<float>& min_p, uint32_t first_token, int threads,
                 const Found<int64_t, 1>& chosen) {
  Logits logits{address, size, stride, is_half};
  std::vector<Scores> scores(std::max(threads, 1));
  parallel_for(chosen.shape(0), threads, [&](int64_t row, int worker) {
    Chooser choice{temperature.data()[row], top_p.data()[row], min_p.data()[row],
                   keys.data()[row],        top_k.data()[row], first_token};
    chosen.data()[row] =
        choice.temperature > 0 ? choose_row(logits, row, choice, scores[worker]) : best_of_row(logits, row);
  });
}

// Writes the token with the largest score of every row, the lowest of equal ones, or NONE.
void best_rows(uintptr_t address, int64_t size, int64_t stride, bool is_half, int threads,
               const Found<int64_t, 1>& chosen) {
  Logits logits{address, size, stride, is_half};
  parallel_for(chosen.shape(0), threads, [&](int64_t row, int) { chosen.data()[row] = best_of_row(logits, row); });
}

// Writes the most likely tokens of every row, and their scores (lpr.core.recycle).
void rank_rows(uintptr_t address, int64_t size, int64_t stride, bool is_half, int threads, float steps,
               int most, const Found<int32_t, 2>& tokens, const Found<uint8_t, 2>& ranks) {
  Logits logits{address, size, stride, is_half};
  int64_t k = tokens.shape(1);
  std::vector<Scores> scores(std::max(threads, 1));
  parallel_for(tokens.shape(0), threads, [&](int64_t row, int worker) {
    rank_row(logits, row, k, steps, most, scores[worker], tokens.data() + row * k, ranks.data() + row * k);
  });
}

// Writes the tokens that the choice of every row is likeliest to take, and how likely each of them is.
void guess_rows(uintptr_t address, int64_t size, int64_t stride, bool is_half, const Column<float>& temperature,
                const Column<uint32_t>& keys, int64_t num_noised, uintptr_t vocabulary, int threads,
                const Found<int64_t, 2>& tokens, const Found<float, 2>& shares) {
  Logits logits{address, size, stride, is_half};
  int64_t k = tokens.shape(1);
  std::vector<Scores> scores(std::max(threads, 1));
  parallel_for(tokens.shape(0), threads, [&](int64_t row, int worker) {
    guess_row(logits, row, temperature.data()[row], keys.data()[row], num_noised, k,
              reinterpret_cast<const int64_t*>(vocabulary), scores[worker], tokens.data() + row * k, shares.data() + row * k);
  });
}

// Writes what a copy drafts by every row; `words` are those of lpr.core.noise_keys.selection_words, none if no row is sampled.
void draft_rows(uintptr_t address, int64_t size, int64_t stride, bool is_half, const Column<int32_t>& words, int threads,
                const Found<int64_t, 2>& tokens, const Found<float, 2>& odds) {
  Logits logits{address, size, stride, is_half};
  int64_t count = tokens.shape(0), k = tokens.shape(1);
  if (k > size || (words.shape(0) && static_cast<int64_t>(words.shape(0)) <= 5 * count)) throw std::invalid_argument("5 words a row, and keys");
  std::vector<Scores> scores(std::max(threads, 1));
  auto column = [&](int place, int64_t row, auto as) {
    std::memcpy(&as, words.data() + place * count + row, sizeof(as));
    return as;
  };
  parallel_for(count, threads, [&](int64_t row, int worker) {
    Chooser choice{0.0f, 1.0f, 0.0f, 0, 0, 0};
    if (words.shape(0)) {
      int32_t key = column(0, row, 0);
      choice = {column(2, row, 0.0f), column(3, row, 0.0f), column(4, row, 0.0f), static_cast<uint32_t>(words.data()[5 * count + key]),
                column(1, row, 0), 0};
    }
    draft_row(logits, row, choice, k, scores[worker], tokens.data() + row * k, odds.data() + row * k);
  });
}

void draft_likely(uintptr_t logits, int64_t size, bool is_half, const Choice& choice, uint32_t key, int64_t count,
                  int64_t* tokens, float* odds) {
  static thread_local Scores scores;
  draft_row({logits, size, size, is_half}, 0, {choice.temperature, choice.top_p, choice.min_p, key, choice.top_k, 0}, count,
            scores, tokens, odds);
}

void bind_sampling(nb::module_& m) {
  m.def("choose_rows", &choose_rows, "address"_a, "size"_a, "stride"_a, "is_half"_a, "temperature"_a, "keys"_a,
        "top_k"_a, "top_p"_a, "min_p"_a, "first_token"_a, "threads"_a, "chosen"_a,
        nb::call_guard<nb::gil_scoped_release>());
  m.def("best_rows", &best_rows, "address"_a, "size"_a, "stride"_a, "is_half"_a, "threads"_a, "chosen"_a,
        nb::call_guard<nb::gil_scoped_release>());
  m.def("rank_rows", &rank_rows, "address"_a, "size"_a, "stride"_a, "is_half"_a, "threads"_a, "steps"_a, "most"_a,
        "tokens"_a, "ranks"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("guess_rows", &guess_rows, "address"_a, "size"_a, "stride"_a, "is_half"_a, "temperature"_a, "keys"_a,
        "num_noised"_a, "vocabulary"_a, "threads"_a, "tokens"_a, "shares"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("draft_rows", &draft_rows, "address"_a, "size"_a, "stride"_a, "is_half"_a, "words"_a, "threads"_a, "tokens"_a,
        "odds"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace lpr
