// Attention over pages (lpr.model.attention.native), without the interpreter's lock.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=fast")  // here multiplications may be fused with additions
#endif
#include "bindings.h"
#include "amx_attention.h"
#include "paged_attention.h"
#include "row_attention.h"

namespace lpr {

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))) void attend_avx512(
    const PagedStep& step, const LayerCall& call, const Item& item, Scratch& scratch) {
  attend_item<WideTile>(step, call, item, scratch);
}
__attribute__((target("avx2,fma"))) void attend_avx2(const PagedStep& step, const LayerCall& call, const Item& item,
                                                     Scratch& scratch) {
  item.count * call.group <= kFewLanes ? attend_item_by_rows<HalfLanes>(step, call, item, scratch)
                                       : attend_item<NarrowTile>(step, call, item, scratch);
}
#endif
void attend_any(const PagedStep& step, const LayerCall& call, const Item& item, Scratch& scratch) {
  item.count * call.group <= kFewLanes ? attend_item_by_rows<QuarterLanes>(step, call, item, scratch)
                                       : attend_item<SmallTile>(step, call, item, scratch);
}

auto choose_kernel() {
#if defined(__x86_64__) && defined(__GNUC__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return attend_avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return attend_avx2;
#endif
  return attend_any;
}

// A step's trees, and what its layers share.
class PagedAttention final : public PageReader {
 public:
  PagedAttention(PagedStep step) : step_(std::move(step)) {}

  const PagedStep& step() const { return step_; }

  void attend(const LayerCall& call, bool exact) override {
    if (exact) return attend_exactly(step_, call);
    if (call.group != group_) lay_out(call.group);
    items_.clear();
    places_.clear();
    size_t partial_size = 0, num_open = 0;
    for (size_t i = 0; i < step_.sequences.size(); i++) add_items(step_.sequences[i], masks_[i], call, partial_size, num_open);
    if (partial_.size() < partial_size) partial_.resize(partial_size);
    if (open_size_ < num_open) open_.reset(new std::atomic<int>[open_size_ = num_open]);
    for (size_t i = 0; i < items_.size(); i++) {
      Item& item = items_[i];
      if (item.num_parts == 1) continue;
      item.partial = partial_.data() + places_[i].first;
      item.open = &open_[places_[i].second];
      item.open->store(item.num_parts, std::memory_order_relaxed);
    }
    static const auto any_kernel = choose_kernel();
    auto kernel = any_kernel;
#ifdef LPR_HAS_AMX
    if (fits_amx(step_, call) && can_use_amx()) kernel = attend_item_by_tiles;
#endif
    parallel_for(static_cast<int64_t>(items_.size()), step_.num_threads, [&](int64_t index, int) {
      static thread_local Scratch scratch;
      kernel(step_, call, items_[index], scratch);
    });
  }

 private:
  using Masks = std::vector<std::vector<uint16_t>>;  // per tile of entries [entries up to its last][vectors of lanes]

  static size_t part_size(const Item& item, const LayerCall& call) {
    return static_cast<size_t>(vectors_of(item.count * call.group) * kLanes) *
           (vectors_of(call.value_dim) * kLanes + 2);
  }

  // Entries of an item.
  int tile_of() const { return std::max(1, kMostLanes / group_); }

  void lay_out(int group) {
    if (group > kMostLanes) throw std::invalid_argument("too many heads share keys and values");
    group_ = group;
    masks_.assign(step_.sequences.size(), {});
    for (size_t i = 0; i < masks_.size(); i++) {
      const Sequence& sequence = step_.sequences[i];
      if (sequence.is_chain) continue;
      for (int first = 0; first < sequence.count; first += tile_of()) {
        int count = std::min(tile_of(), sequence.count - first), vectors = vectors_of(count * group);
        std::vector<uint16_t> masks(static_cast<size_t>(first + count) * vectors, 0);
        for (int other = 0; other < first + count; other++)
          for (int lane = 0; lane < count * group; lane++)
            if (sequence.sees(first + lane / group, other))
              masks[static_cast<size_t>(other) * vectors + lane / kLanes] |= static_cast<uint16_t>(1 << lane % kLanes);
        masks_[i].push_back(std::move(masks));
      }
    }
  }

  void add_items(const Sequence& sequence, const Masks& masks, const LayerCall& call, size_t& partial_size,
                 size_t& num_open) {
    int64_t begin = sequence.lowest(call.rule) / kKeys * kKeys, end = sequence.num_cached + sequence.count;
    int pieces = 1;
    if (sequence.count <= tile_of())
      pieces = static_cast<int>(std::min<int64_t>(kMostPieces, (end - begin + kPieceKeys - 1) / kPieceKeys));
    int64_t piece = ((end - begin + pieces - 1) / pieces + kKeys - 1) / kKeys * kKeys;
    pieces = static_cast<int>((end - begin + piece - 1) / piece);
    size_t heads = static_cast<size_t>(call.kv_heads), size = 0;
    for (int tile = (sequence.count - 1) / tile_of(); tile >= 0; tile--) {  // those with most keys first
      int first = tile * tile_of();
      int count = std::min(tile_of(), sequence.count - first);
      int64_t last = std::min<int64_t>(end, sequence.num_cached + first + count);
      const uint16_t* mask = masks.empty() ? nullptr : masks[tile].data();
      for (int part = 0; part < pieces; part++)
        for (int head = 0; head < call.kv_heads; head++) {  // heads lie side by side, so what is fetched beside one is used
          int64_t from = begin + part * piece, to = std::min(last, from + piece);
          if (pieces == 1) from = first_key(sequence, first, count, call.rule);
          items_.push_back({&sequence, mask, head, first, count, from, to, part, pieces, nullptr, nullptr});
          size = part_size(items_.back(), call) * static_cast<size_t>(pieces);
          places_.push_back({partial_size + static_cast<size_t>(head) * size, num_open + static_cast<size_t>(head)});
        }
    }
    if (pieces == 1) return;
    partial_size += heads * size;
    num_open += heads;
  }

  static int64_t first_key(const Sequence& sequence, int first, int count, const KeyRule& rule) {
    int32_t least = sequence.num_cached;
    for (int i = first; i < first + count; i++) least = std::min(least, rule.lowest(sequence.positions[i]));
    return least / kKeys * kKeys;
  }

  PagedStep step_;
  int group_ = 0;
  std::vector<Masks> masks_;
  std::vector<Item> items_;
  std::vector<std::pair<size_t, size_t>> places_;  // of the partial results of each item, and of their count
  std::vector<float> partial_;
  std::unique_ptr<std::atomic<int>[]> open_;
  size_t open_size_ = 0;
};

std::unique_ptr<PageReader> read_pages(PagedStep step) { return std::make_unique<PagedAttention>(std::move(step)); }

using Entries = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Places = std::vector<std::pair<int64_t, int64_t>>;

// Keeps the tables' array alive: sequences point into it.
struct BoundAttention {
  Entries tables;
  PagedAttention attention;
};

PagedStep make_step(const Entries& tables, int64_t page_size, const std::vector<int64_t>& slots,
                    const std::vector<int64_t>& num_cached, const std::vector<Entries>& entries,
                    const Places& places, int num_threads) {
  PagedStep step{{}, page_size, num_threads};
  if (num_cached.size() != slots.size() || entries.size() != slots.size() || places.size() != slots.size())
    throw std::invalid_argument("of each sequence a slot, a length, entries and a place");
  for (size_t i = 0; i < slots.size(); i++) {
    int64_t count = entries[i].shape(1), slot = slots[i];
    if (slot < 0 || slot >= static_cast<int64_t>(tables.shape(0))) throw std::invalid_argument("no table of this slot");
    if (num_cached[i] + count > static_cast<int64_t>(tables.shape(1)) * page_size)
      throw std::invalid_argument("a sequence is longer than its table");
    if (count)
      step.sequences.emplace_back(tables.data() + slot * tables.shape(1), static_cast<int32_t>(num_cached[i]),
                                  entries[i].data(), static_cast<int32_t>(count), places[i].first, places[i].second);
  }
  return step;
}

// Tokens, positions and cache rows of a step's entries, int64 [3, batch, num_tokens]; padding has token 0 and `spare_row`.
nb::object lay_out(const BoundAttention& self, int64_t batch, int64_t num_tokens, int64_t spare_row) {
  size_t size = static_cast<size_t>(batch * num_tokens);
  std::vector<int64_t> words(3 * size, 0);
  std::fill(words.begin() + 2 * size, words.end(), spare_row);
  const PagedStep& step = self.attention.step();
  for (const Sequence& sequence : step.sequences) {
    if (sequence.batch >= batch || sequence.first + sequence.count > num_tokens)
      throw std::invalid_argument("a sequence has no place in the step");
    int64_t* to = words.data() + sequence.batch * num_tokens + sequence.first;
    for (int32_t i = 0; i < sequence.count; i++) {
      to[i] = sequence.tokens[i];
      to[i + size] = sequence.positions[i];
      to[i + 2 * size] = step.row_of(sequence, sequence.num_cached + i);
    }
  }
  size_t rows = static_cast<size_t>(batch), length = static_cast<size_t>(num_tokens);
  return owned_array<int64_t, 3>(std::move(words), {3, rows, length});
}

using Strides = std::tuple<int64_t, int64_t, int64_t>;
using Pair = std::pair<int64_t, int64_t>;

void bind_paged(nb::module_& m) {
  nb::class_<BoundAttention>(m, "PagedAttention")
      .def(
          "__init__",
          [](BoundAttention* self, const Entries& tables, int64_t page_size, const std::vector<int64_t>& slots,
             const std::vector<int64_t>& num_cached, const std::vector<Entries>& entries, const Places& places,
             int num_threads) {
            PagedStep step = make_step(tables, page_size, slots, num_cached, entries, places, num_threads);
            new (self) BoundAttention{tables, PagedAttention(std::move(step))};
          },
          "tables"_a, "page_size"_a, "slots"_a, "num_cached"_a, "entries"_a, "places"_a, "num_threads"_a)
      .def_prop_ro("reader", [](BoundAttention& self) { return reinterpret_cast<uintptr_t>(static_cast<PageReader*>(&self.attention)); })
      .def("lay_out", &lay_out, "batch"_a, "num_tokens"_a, "spare_row"_a)
      .def(
          "attend",
          [](BoundAttention& self, bool is_half, uintptr_t query, Strides query_strides, uintptr_t key, Pair key_strides,
             uintptr_t value, Pair value_strides, uintptr_t out, int64_t num_tokens, int num_heads, int kv_heads, int dim,
             int value_dim, float scale, float softcap, int32_t window, int32_t chunk, uintptr_t sinks, bool exact) {
            LayerCall call{reinterpret_cast<void*>(query), reinterpret_cast<void*>(key), reinterpret_cast<void*>(value),
                           reinterpret_cast<void*>(out), num_tokens,
                           std::get<0>(query_strides), std::get<1>(query_strides), std::get<2>(query_strides),
                           key_strides.first, key_strides.second, value_strides.first, value_strides.second,
                           kv_heads, num_heads / kv_heads, dim, value_dim, is_half, scale, softcap, {window, chunk},
                           reinterpret_cast<const float*>(sinks)};
            self.attention.attend(call, exact);
          },
          "is_half"_a, "query"_a, "query_strides"_a, "key"_a, "key_strides"_a, "value"_a, "value_strides"_a, "out"_a,
          "num_tokens"_a, "num_heads"_a, "kv_heads"_a, "dim"_a, "value_dim"_a, "scale"_a, "softcap"_a, "window"_a,
          "chunk"_a, "sinks"_a, "exact"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace lpr
