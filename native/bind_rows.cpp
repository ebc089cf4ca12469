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

using Numbers64 = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Columns64 = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void place_packed(nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> words, size_t num_sequences,
                  size_t num_entries, size_t num_kept, const Entries& tables, int64_t page_size, int32_t spare_row,
                  const Numbers64& slots, const Columns64& columns, const Array& entries) {
  PackedWords to(words.data(), num_sequences, num_entries, num_kept, spare_row);
  size_t count = columns.shape(1), total = 0, kept = 0, pages = tables.shape(1);
  if (count > num_sequences || slots.shape(0) != count || columns.shape(0) != 3)
    throw std::invalid_argument("a slot, cached tokens, results and entries for each row");
  const int64_t *cached = columns.data(), *results = cached + count, *lengths = results + count;
  for (size_t i = 0; i < count; i++) {
    if (slots.data()[i] < 0 || slots.data()[i] >= static_cast<int64_t>(tables.shape(0)))
      throw std::invalid_argument("a row has a slot with a table");
    if (cached[i] < 0 || lengths[i] < 0 || cached[i] + lengths[i] > static_cast<int64_t>(pages) * page_size)
      throw std::invalid_argument("a row is longer than its table");
    if (results[i] < 0 || results[i] > lengths[i]) throw std::invalid_argument("more results than entries");
    total += lengths[i];
    kept += results[i];
  }
  if (words.size() < to.size() || total > num_entries || kept > num_kept || entries.size() != 3 * total)
    throw std::invalid_argument("the words do not hold the rows");
  to.begin(total);
  const int32_t* from = entries.data();
  for (size_t i = 0; i < count; from += 3 * lengths[i++])
    to.add(tables.data() + slots.data()[i] * pages, page_size, static_cast<int32_t>(slots.data()[i]), cached[i],
           results[i], from, lengths[i]);
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
        "page_size"_a, "spare_row"_a, "slots"_a, "columns"_a, "entries"_a);
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
