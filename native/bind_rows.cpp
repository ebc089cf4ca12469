// Words that go up to the device (lpr.core.rows, lpr.core.noise_keys).
#include "bindings.h"

namespace lpr {

using Entries = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void place_rows(nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> words, size_t batch,
                size_t num_entries, const Entries& tables, int64_t page_size, int32_t spare_row,
                const std::vector<int64_t>& num_cached, const std::vector<Entries>& entries) {
  RowWords to(words.data(), batch, num_entries);
  if (words.size() < to.size()) throw std::invalid_argument("the words do not hold the rows");
  if (tables.shape(0) < batch) throw std::invalid_argument("a table for each row");
  for (size_t i = 0; i < batch; i++) {
    size_t count = i < entries.size() ? entries[i].shape(1) : 0;
    if (count > num_entries) throw std::invalid_argument("a row is longer than its place");
    int64_t cached = count ? num_cached[i] : 0;
    if (cached + static_cast<int64_t>(count) > static_cast<int64_t>(tables.shape(1)) * page_size)
      throw std::invalid_argument("a row is longer than its table");
    to.place(i, tables.data() + i * tables.shape(1), page_size, spare_row, cached,
             count ? entries[i].data() : nullptr, count);
  }
}

void place_packed(nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> words, size_t num_sequences,
                  size_t num_entries, size_t num_kept, const Entries& tables, int64_t page_size, int32_t spare_row,
                  const std::vector<int32_t>& slots, const std::vector<int64_t>& num_cached,
                  const std::vector<size_t>& num_results, const std::vector<Entries>& entries) {
  PackedWords to(words.data(), num_sequences, num_entries, num_kept, spare_row);
  size_t total = 0, kept = 0, pages = tables.shape(1);
  if (entries.size() > num_sequences || slots.size() != entries.size() || num_cached.size() != entries.size() ||
      num_results.size() != entries.size())
    throw std::invalid_argument("a slot, cached tokens and results for each row");
  for (size_t i = 0; i < entries.size(); i++) {
    size_t count = entries[i].shape(1);
    if (entries[i].shape(0) != 3 || slots[i] < 0 || static_cast<size_t>(slots[i]) >= tables.shape(0))
      throw std::invalid_argument("a row has three columns, and a slot with a table");
    if (num_cached[i] < 0 || static_cast<size_t>(num_cached[i]) + count > pages * static_cast<size_t>(page_size))
      throw std::invalid_argument("a row is longer than its table");
    if (num_results[i] > count) throw std::invalid_argument("more results than entries");
    total += count;
    kept += num_results[i];
  }
  if (words.size() < to.size() || total > num_entries || kept > num_kept)
    throw std::invalid_argument("the words do not hold the rows");
  to.begin(total);
  for (size_t i = 0; i < entries.size(); i++)
    to.add(tables.data() + slots[i] * pages, page_size, slots[i], num_cached[i], num_results[i], entries[i].data(),
           entries[i].shape(1));
}

nb::object ancestors(const Tokens& parents, size_t num_words) {
  return owned_array<uint64_t, 2>(ancestor_words(parents, num_words), {parents.size(), num_words});
}

nb::object selection(const nb::sequence& choices, const std::vector<Array>& positions) {
  std::vector<Choice> those;
  for (nb::handle each : choices)
    those.push_back({nb::cast<uint64_t>(each[0]), nb::cast<float>(each[1]), nb::cast<int32_t>(each[2]),
                     nb::cast<float>(each[3]), nb::cast<float>(each[4])});
  if (those.size() != positions.size()) throw std::invalid_argument("positions for each choice");
  std::vector<Positions> places;
  for (const Array& each : positions) places.push_back({each.data(), each.size()});
  std::vector<int32_t> words = selection_words(those, places);
  size_t count = words.size();
  return owned_array<int32_t, 1>(std::move(words), {count});
}

void bind_rows(nb::module_& m) {
  m.def("place_rows", &place_rows, "words"_a, "batch"_a, "num_entries"_a, "tables"_a, "page_size"_a, "spare_row"_a,
        "num_cached"_a, "entries"_a);
  m.def("place_packed", &place_packed, "words"_a, "num_sequences"_a, "num_entries"_a, "num_kept"_a, "tables"_a,
        "page_size"_a, "spare_row"_a, "slots"_a, "num_cached"_a, "num_results"_a, "entries"_a);
  m.def("ancestor_words", &ancestors, "parents"_a, "num_words"_a);
  m.def(
      "ancestor_words",
      [](Array parents, size_t num_words) {
        return ancestors(Tokens(parents.data(), parents.data() + parents.size()), num_words);
      },
      "parents"_a, "num_words"_a);
  m.def("selection_words", &selection, "choices"_a, "positions"_a);
}

}  // namespace lpr
