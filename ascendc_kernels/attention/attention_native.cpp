// Causal attention, forward over packed or paged keys and backward over packed keys (reference/attention.py).
// One core serves training, prefill, chunked prefill and decode: only KeyAddress differs.
#include "dispatch.h"
#include "sums.h"

namespace megatron_ext {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Row of key `position` of a sequence, in elements. Packed: page_size 0, rows start at base_row.
struct KeyAddress {
    const int32_t* block_table;
    Index page_size, page_stride, row_stride, base_row;
    Index operator()(Index position) const {
        if (page_size == 0) return (base_row + position) * row_stride;
        return block_table[position / page_size] * page_stride + (position % page_size) * row_stride;
    }
};

struct Shape {
    Index query_heads, key_heads, head_dim, tile;
    float scale;
    MmadOrder order;
    Index group() const { return query_heads / key_heads; }
    Index padded_dim() const { return round_up(head_dim, kPanel); }
};

// The query rows of one sequence that share one key head: row r stands at positions[r].
struct Queries {
    std::vector<float> q;  // [rows][padded_dim]
    std::vector<Index> position;
    Index rows() const { return Index(position.size()); }
};

template <typename T>
Queries gather_queries(const T* q, Index first_row, Index count, Index first_position, Index key_head, const Shape& shape) {
    Queries out;
    out.q.assign(count * shape.group() * shape.padded_dim(), 0.0f);
    for (Index i = 0; i < count; ++i)
        for (Index g = 0; g < shape.group(); ++g) {
            const T* source = q + ((first_row + i) * shape.query_heads + key_head * shape.group() + g) * shape.head_dim;
            float* target = out.q.data() + out.rows() * shape.padded_dim();
            for (Index d = 0; d < shape.head_dim; ++d) target[d] = to_float(source[d]);
            out.position.push_back(first_position + i);
        }
    return out;
}

template <typename T>
void pack_keys(std::vector<float>& panels, const T* k, const KeyAddress& at, Index start, Index live, const Shape& shape) {
    std::vector<Index> rows(live);
    for (Index j = 0; j < live; ++j) rows[j] = at(start + j);
    pack_panels(panels, shape.head_dim, shape.tile, [&](Index d, Index j) { return j < live ? to_float(k[rows[j] + d]) : 0.0f; });
}

template <typename T>
void pack_values(std::vector<float>& panels, const T* v, const KeyAddress& at, Index start, Index live, const Shape& shape) {
    std::vector<Index> rows(live);
    for (Index j = 0; j < live; ++j) rows[j] = at(start + j);
    pack_panels(panels, shape.tile, shape.head_dim, [&](Index j, Index d) { return j < live ? to_float(v[rows[j] + d]) : 0.0f; });
}

// One online-softmax step of one row: scores [tile] become rounded probabilities; returns the factor for the old accumulator.
template <typename T>
float softmax_step(float* s, Index visible, float scale, Index tile, float& m, float& l) {
    float m_new = m;
    for (Index j = 0; j < visible; ++j) {
        s[j] = s[j] * scale;
        m_new = s[j] > m_new ? s[j] : m_new;
    }
    for (Index j = 0; j < visible; ++j) s[j] = exp_f32(s[j] - m_new);
    for (Index j = visible; j < tile; ++j) s[j] = 0.0f;
    const float alpha = exp_f32(m - m_new);
    l = l * alpha + row_sum(tile, [&](Index j) { return s[j]; });
    m = m_new;
    for (Index j = 0; j < visible; ++j) s[j] = to_float(from_float<T>(s[j]));
    return alpha;
}

template <typename T>
void forward_group(const Queries& queries, const T* k, const T* v, const KeyAddress& at, Index keys, const Shape& shape,
                   std::vector<float>& o, std::vector<float>& m, std::vector<float>& l) {
    const Index rows = queries.rows(), dim = shape.padded_dim();
    o.assign(rows * dim, 0.0f), m.assign(rows, kNegativeInfinity), l.assign(rows, 0.0f);
    std::vector<float> key_panels, value_panels, s(rows * shape.tile), pv(rows * dim);
    for (Index start = 0; start < keys; start += shape.tile) {
        Index first = 0;  // rows ascend by position: the active ones are a suffix
        while (first < rows && queries.position[first] < start) ++first;
        const Index active = rows - first, live = std::min(shape.tile, keys - start);
        pack_keys(key_panels, k, at, start, live, shape);
        pack_values(value_panels, v, at, start, live, shape);
        std::fill_n(s.data(), active * shape.tile, 0.0f);
        std::fill_n(pv.data(), active * dim, 0.0f);
        contract_panels(shape.order, queries.q.data() + first * dim, dim, active, key_panels, shape.head_dim, shape.tile, s.data(), shape.tile);
        std::vector<float> alpha(active);
        for (Index r = 0; r < active; ++r) {
            const Index visible = std::min(shape.tile, queries.position[first + r] + 1 - start);
            alpha[r] = softmax_step<T>(s.data() + r * shape.tile, visible, shape.scale, shape.tile, m[first + r], l[first + r]);
        }
        contract_panels(shape.order, s.data(), shape.tile, active, value_panels, shape.tile, shape.head_dim, pv.data(), dim);
        for (Index r = 0; r < active; ++r)
            for (Index d = 0; d < dim; ++d) {
                float& value = o[(first + r) * dim + d];
                value = value * alpha[r] + pv[r * dim + d];
            }
    }
}

template <typename T>
void forward_sequence(const T* q, const T* k, const T* v, T* out, float* lse, Index first_row, Index count, KeyAddress at, Index keys,
                      const Shape& shape) {
    std::vector<float> o, m, l;
    for (Index head = 0; head < shape.key_heads; ++head) {
        const Index offset = head * shape.head_dim;
        const Queries queries = gather_queries(q, first_row, count, keys - count, head, shape);
        forward_group(queries, k + offset, v + offset, at, keys, shape, o, m, l);
        for (Index r = 0; r < queries.rows(); ++r) {
            const Index row = (first_row + r / shape.group()) * shape.query_heads + head * shape.group() + r % shape.group();
            for (Index d = 0; d < shape.head_dim; ++d) out[row * shape.head_dim + d] = from_float<T>(o[r * shape.padded_dim() + d] / l[r]);
            if (lse) lse[row] = m[r] + log_f32(l[r]);
        }
    }
}

// Dense fp32 copy of one head of one packed sequence, rows padded to padded_dim.
template <typename T>
std::vector<float> load_head(const T* x, Index first_row, Index n, Index heads, Index head, const Shape& shape) {
    std::vector<float> out(round_up(n, kFractal) * shape.padded_dim(), 0.0f);
    for (Index i = 0; i < n; ++i)
        for (Index d = 0; d < shape.head_dim; ++d)
            out[i * shape.padded_dim() + d] = to_float(x[((first_row + i) * heads + head) * shape.head_dim + d]);
    return out;
}

struct HeadGradients {
    std::vector<float> dq, dk, dv;  // [padded n][padded_dim]
};

// p and ds of one tile of `rows` queries x `keys` keys, both rounded to T, stored [rows][tile] and transposed [keys][tile].
struct BackwardTile {
    std::vector<float> p, ds, p_transposed, ds_transposed;
};

template <typename T>
void softmax_backward_tile(BackwardTile& tile, Index i, Index rows, Index j, Index keys, const float* lse, Index lse_stride,
                           const float* delta, const Shape& shape) {
    const Index width = shape.tile;
    tile.p_transposed.assign(width * width, 0.0f), tile.ds_transposed.assign(width * width, 0.0f);
    for (Index r = 0; r < rows; ++r)
        for (Index c = 0; c < width; ++c) {
            float &p = tile.p[r * width + c], &ds = tile.ds[r * width + c];
            if (c >= keys || j + c > i + r) {
                p = ds = 0.0f;
                continue;
            }
            p = exp_f32(p * shape.scale - lse[(i + r) * lse_stride]);
            ds = to_float(from_float<T>(p * (ds - delta[i + r])));
            p = to_float(from_float<T>(p));
            tile.p_transposed[c * width + r] = p, tile.ds_transposed[c * width + r] = ds;
        }
}

template <typename T>
void backward_head(HeadGradients& grad, const std::vector<float>& d_o, const std::vector<float>& q, const std::vector<float>& k,
                   const std::vector<float>& v, const float* delta, const float* lse, Index lse_stride, Index n, const Shape& shape) {
    const Index dim = shape.padded_dim(), width = shape.tile;
    BackwardTile tile{std::vector<float>(width * width), std::vector<float>(width * width), {}, {}};
    std::vector<float> panels;
    auto transposed = [&](const std::vector<float>& x, Index first, Index count) {
        pack_panels(panels, shape.head_dim, width, [&](Index d, Index c) { return c < count ? x[(first + c) * dim + d] : 0.0f; });
    };
    auto natural = [&](const std::vector<float>& x, Index first, Index count) {
        pack_panels(panels, count, shape.head_dim, [&](Index c, Index d) { return x[(first + c) * dim + d]; });
    };
    for (Index i = 0; i < n; i += width) {
        const Index rows = std::min(width, n - i);
        for (Index j = 0; j <= i; j += width) {
            const Index keys = std::min(width, n - j);
            std::fill(tile.p.begin(), tile.p.end(), 0.0f), std::fill(tile.ds.begin(), tile.ds.end(), 0.0f);
            transposed(k, j, keys);
            contract_panels(shape.order, q.data() + i * dim, dim, rows, panels, shape.head_dim, width, tile.p.data(), width);
            transposed(v, j, keys);
            contract_panels(shape.order, d_o.data() + i * dim, dim, rows, panels, shape.head_dim, width, tile.ds.data(), width);
            softmax_backward_tile<T>(tile, i, rows, j, keys, lse, lse_stride, delta, shape);
            natural(k, j, keys);
            contract_panels(shape.order, tile.ds.data(), width, rows, panels, keys, shape.head_dim, grad.dq.data() + i * dim, dim);
            natural(q, i, rows);
            contract_panels(shape.order, tile.ds_transposed.data(), width, keys, panels, rows, shape.head_dim, grad.dk.data() + j * dim, dim);
            natural(d_o, i, rows);
            contract_panels(shape.order, tile.p_transposed.data(), width, keys, panels, rows, shape.head_dim, grad.dv.data() + j * dim, dim);
        }
    }
}

// dq, dk, dv are fp32 and zeroed; dk and dv add their query heads in order.
template <typename T>
void backward_sequence(const T* d_o, const T* q, const T* k, const T* v, const T* o, const float* lse, float* dq, float* dk, float* dv,
                       Index first_row, Index n, const Shape& shape) {
    const Index dim = shape.padded_dim();
    std::vector<float> delta(n);
    for (Index head = 0; head < shape.query_heads; ++head) {
        const Index key_head = head / shape.group();
        const auto d_o_h = load_head(d_o, first_row, n, shape.query_heads, head, shape);
        const auto o_h = load_head(o, first_row, n, shape.query_heads, head, shape);
        const auto q_h = load_head(q, first_row, n, shape.query_heads, head, shape);
        const auto k_h = load_head(k, first_row, n, shape.key_heads, key_head, shape);
        const auto v_h = load_head(v, first_row, n, shape.key_heads, key_head, shape);
        for (Index i = 0; i < n; ++i)
            delta[i] = row_sum(shape.head_dim, [&](Index d) { return d_o_h[i * dim + d] * o_h[i * dim + d]; });
        const std::vector<float> zeros(round_up(n, kFractal) * dim, 0.0f);
        HeadGradients grad{zeros, zeros, zeros};
        backward_head<T>(grad, d_o_h, q_h, k_h, v_h, delta.data(), lse + first_row * shape.query_heads + head, shape.query_heads, n, shape);
        for (Index i = 0; i < n; ++i)
            for (Index d = 0; d < shape.head_dim; ++d) {
                const Index key_at = ((first_row + i) * shape.key_heads + key_head) * shape.head_dim + d;
                dq[((first_row + i) * shape.query_heads + head) * shape.head_dim + d] = grad.dq[i * dim + d] * shape.scale;
                dk[key_at] = dk[key_at] + grad.dk[i * dim + d] * shape.scale;
                dv[key_at] = dv[key_at] + grad.dv[i * dim + d];
            }
    }
}

}  // namespace
}  // namespace megatron_ext

using namespace megatron_ext;

// Packed when block_tables is null: keys of sequence b are rows [cu_queries[b], cu_queries[b + 1]) of k and v.
extern "C" __attribute__((visibility("default"))) int32_t megatron_ext_attention(int32_t dtype, int32_t order, const void* q, const void* k, const void* v, void* out, float* lse,
                                          const int32_t* cu_queries, const int32_t* kv_lens, const int32_t* block_tables, Index sequences,
                                          Index max_pages, Index page_size, Index page_stride, Index row_stride, Index query_heads,
                                          Index key_heads, Index head_dim, Index tile, float scale) {
    const Shape shape{query_heads, key_heads, head_dim, tile, scale, MmadOrder(order)};
    return dispatch(dtype, [&](auto tag) {
        using T = decltype(tag);
        for (Index b = 0; b < sequences; ++b) {
            const Index first = cu_queries[b], count = cu_queries[b + 1] - first;
            const KeyAddress at{block_tables ? block_tables + b * max_pages : nullptr, block_tables ? page_size : 0, page_stride, row_stride,
                                first};
            forward_sequence(static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v), static_cast<T*>(out), lse, first,
                             count, at, kv_lens[b], shape);
        }
    });
}

extern "C" __attribute__((visibility("default"))) int32_t megatron_ext_attention_backward(int32_t dtype, int32_t order, const void* d_o, const void* q, const void* k, const void* v,
                                                   const void* o, const float* lse, float* dq, float* dk, float* dv,
                                                   const int32_t* cu_seqlens, Index sequences, Index query_heads, Index key_heads,
                                                   Index head_dim, Index tile, float scale) {
    const Shape shape{query_heads, key_heads, head_dim, tile, scale, MmadOrder(order)};
    return dispatch(dtype, [&](auto tag) {
        using T = decltype(tag);
        for (Index b = 0; b < sequences; ++b)
            backward_sequence(static_cast<const T*>(d_o), static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v),
                              static_cast<const T*>(o), lse, dq, dk, dv, cu_seqlens[b], cu_seqlens[b + 1] - cu_seqlens[b], shape);
    });
}
