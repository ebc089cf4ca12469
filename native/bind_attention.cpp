// Exact attention on a CPU (lpr.model.attention.in_order), without the interpreter's lock.
#include "attention.h"
#include "bindings.h"
#include "paged_step.h"
#include "parallel.h"

namespace lpr {

template <int N>
using Floats = nb::ndarray<const float, nb::ndim<N>, nb::device::cpu>;
using Output = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Keys or values of one head, in whole blocks: as they lie, or a copy with zeros behind each row.
struct Head {
  std::vector<float> copy;

  States states(const Floats<3>& all, int64_t head) {
    int width = static_cast<int>(all.shape(2)), blocks = (width + kLanes - 1) / kLanes;
    const float* data = all.data() + head * all.stride(0);
    if (width == blocks * kLanes) return {data, all.stride(1), blocks};
    copy.resize(all.shape(1) * blocks * kLanes);
    for (size_t row = 0; row < all.shape(1); row++)
      std::copy(data + row * all.stride(1), data + row * all.stride(1) + width, copy.data() + row * blocks * kLanes);
    return {copy.data(), blocks * kLanes, blocks};
  }
};

// `query` [Hk * G, T, D], scaled, over `key`, `value` [Hk, KV, D(v)]; entry t reads the cache rows
// rows[starts[t]:starts[t + 1]] in that order. Writes `out` [Hk * G, T, Dv]; zeros where an entry reads nothing.
void attend_in_order(const Floats<3>& query, const Floats<3>& key, const Floats<3>& value, const Table& rows,
                     const Table& starts, float softcap, std::optional<Floats<1>> sinks, Output out) {
  int64_t length = query.shape(1), kv_heads = key.shape(0), width = query.shape(2), value_width = value.shape(2);
  int group = static_cast<int>(query.shape(0)) / static_cast<int>(kv_heads), longest = 0;
  const int32_t *begins = starts.data(), *places = rows.data();
  for (int64_t t = 0; t < length; t++) longest = std::max(longest, begins[t + 1] - begins[t]);
  Head key_head, value_head;
  std::vector<float> queries, found, scores(static_cast<size_t>(kMostQueries) * (longest + kLanes));
  for (int64_t head = 0; head < kv_heads; head++) {
    States keys = key_head.states(key, head), values = value_head.states(value, head);
    int query_stride = keys.num_blocks * kLanes, out_stride = values.num_blocks * kLanes;
    queries.resize(static_cast<size_t>(kMostQueries) * query_stride);
    found.resize(static_cast<size_t>(kMostQueries) * out_stride);
    for (int64_t t = 0; t < length; t++) {
      Path path{places + begins[t], begins[t + 1] - begins[t]};
      for (int first = 0; first < group; first += kMostQueries) {
        int count = std::min(kMostQueries, group - first);
        int64_t own = head * group + first;
        for (int q = 0; q < count; q++) {
          const float* from = query.data() + (own + q) * query.stride(0) + t * query.stride(1);
          std::copy(from, from + width, queries.data() + q * query_stride);  // zeros behind it stay
        }
        std::fill(found.begin(), found.end(), 0.0f);
        if (path.count)
          attend_path(count, queries.data(), keys, values, path, softcap, sinks ? sinks->data() + own : nullptr,
                      scores.data(), found.data());
        for (int q = 0; q < count; q++)
          std::copy(found.data() + q * out_stride, found.data() + q * out_stride + value_width,
                    out.data() + ((own + q) * length + t) * value_width);
      }
    }
  }
}

// Some entries of a sequence, with the heads of a group.
struct ExactItem {
  const Sequence* sequence;
  int head, first, count;
};

// Rows as they lie in the cache or, where they must be converted or padded, side by side in `copy`.
static States states_of(const LayerCall& call, const void* base, int64_t head, int64_t stride, int width,
                        const std::vector<int32_t>& rows, bool copies, std::vector<float>& copy) {
  int blocks = (width + kLanes - 1) / kLanes;
  if (!copies) return {static_cast<const float*>(base) + head, stride, blocks};
  copy.resize(rows.size() * blocks * kLanes);
  for (size_t i = 0; i < rows.size(); i++)
    unpack(at(base, call.is_half, head + rows[i] * stride), call.is_half, width, blocks * kLanes,
           copy.data() + i * blocks * kLanes);
  return {copy.data(), blocks * kLanes, blocks};
}

static bool must_copy(const LayerCall& call) {
  return call.is_half || call.dim % kLanes || call.value_dim % kLanes;
}

static void attend_entries(const PagedStep& step, const LayerCall& call, const ExactItem& item) {
  const Sequence& sequence = *item.sequence;
  int32_t begin = sequence.lowest(call.rule), cached = sequence.num_cached;
  std::vector<int32_t> rows, path;  // of the keys from `begin` on
  for (int32_t key = begin; key < cached + item.first + item.count; key++)
    rows.push_back(static_cast<int32_t>(step.row_of(sequence, key)));
  std::vector<float> key_copy, value_copy;
  bool copies = must_copy(call);
  States keys = states_of(call, call.key, item.head * call.key_head, call.key_row, call.dim, rows, copies, key_copy);
  States values = states_of(call, call.value, item.head * call.value_head, call.value_row, call.value_dim, rows, copies,
                            value_copy);
  int query_stride = keys.num_blocks * kLanes, out_stride = values.num_blocks * kLanes;
  std::vector<float> queries(kMostQueries * query_stride), found(kMostQueries * out_stride);
  std::vector<float> scores(kMostQueries * (rows.size() + kLanes));
  for (int entry = item.first; entry < item.first + item.count; entry++) {
    int32_t lowest = call.rule.lowest(sequence.positions[entry]);
    path.clear();
    for (int32_t key = std::max(begin, lowest); key < cached; key++) path.push_back(copies ? key - begin : rows[key - begin]);
    for (int32_t other = 0; other <= entry; other++)
      if (sequence.sees(entry, other) && sequence.positions[other] >= lowest) {
        int32_t key = cached + other - begin;
        path.push_back(copies ? key : rows[key]);
      }
    for (int first = 0; first < call.group; first += kMostQueries) {
      int count = std::min(kMostQueries, call.group - first), own = item.head * call.group + first;
      for (int q = 0; q < count; q++) {
        float* to = queries.data() + q * query_stride;
        unpack(at(call.query, call.is_half, sequence.batch * call.query_batch + (own + q) * call.query_head +
                                                (sequence.first + entry) * call.query_token),
               call.is_half, call.dim, query_stride, to);
        for (int d = 0; d < call.dim; d++) to[d] *= call.scale;
      }
      attend_path(count, queries.data(), keys, values, {path.data(), static_cast<int>(path.size())}, call.softcap,
                  call.sinks ? call.sinks + own : nullptr, scores.data(), found.data());
      for (int q = 0; q < count; q++) put(call, sequence, entry, own + q, found.data() + q * out_stride, 1.0f);
    }
  }
}

void attend_exactly(const PagedStep& step, const LayerCall& call) {
  std::vector<ExactItem> items;
  for (const Sequence& sequence : step.sequences) {
    int piece = must_copy(call) ? sequence.count : 8;
    for (int head = 0; head < call.kv_heads; head++)
      for (int first = 0; first < sequence.count; first += piece)
        items.push_back({&sequence, head, first, std::min(piece, sequence.count - first)});
  }
  parallel_for(static_cast<int64_t>(items.size()), step.num_threads,
               [&](int64_t index, int) { attend_entries(step, call, items[index]); });
}

void bind_attention(nb::module_& m) {
  m.def("attend_in_order", &attend_in_order, "query"_a, "key"_a, "value"_a, "rows"_a, "starts"_a, "softcap"_a,
        "sinks"_a.none(), "out"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace lpr
