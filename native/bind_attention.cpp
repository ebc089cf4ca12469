// Exact attention on a CPU (lpr.model.exact.in_order), without the interpreter's lock.
#include "attention.h"
#include "bindings.h"

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

void bind_attention(nb::module_& m) {
  m.def("attend_in_order", &attend_in_order, "query"_a, "key"_a, "value"_a, "rows"_a, "starts"_a, "softcap"_a,
        "sinks"_a.none(), "out"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace lpr
