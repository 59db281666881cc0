// Native twin of attention (reference/attention.py). An item is a range of queries of one sequence with all heads that share a key head, so
// that every tile of keys and values is widened once for all of them. Only the address of a key differs between packed and paged calls.
#include "attention_native.h"

namespace megatron_ext {
namespace {

constexpr Index kItemElements = 256 * 128;  // elements of q, and of the output, that an item keeps in the second cache
constexpr Index kRowsTogether = 48;         // rows whose scores stay in the nearest cache

// One call, as every item sees it.
template <typename T>
struct Attention {
    const AttentionTiling& tiling;
    MmadOrder order;
    const T *q, *k, *v;
    const int32_t *block_tables, *cu_query_lens, *kv_lens;
    T* out;
    float* lse;
    Index group;

    Attention(const KernelCall& call, const AttentionTiling& t)
        : tiling(t),
          order(MmadOrder(call.mmad_order)),
          q(static_cast<const T*>(call.operands[0])),
          k(static_cast<const T*>(call.operands[1])),
          v(static_cast<const T*>(call.operands[2])),
          block_tables(static_cast<const int32_t*>(call.operands[3])),
          cu_query_lens(static_cast<const int32_t*>(call.operands[4])),
          kv_lens(static_cast<const int32_t*>(call.operands[5])),
          out(static_cast<T*>(call.operands[7])),
          lse(static_cast<float*>(call.operands[8])),
          group(t.query_heads / t.key_heads) {}

    Index queries(Index b) const { return cu_query_lens[b + 1] - cu_query_lens[b]; }
    Index keys(Index b) const { return kv_lens ? kv_lens[b] : queries(b); }

    // Rows of keys [start, start + live) of a key head; a row of zeros for the others up to `count`.
    void rows_of(const T* base, const KeyStrides& strides, Index b, Index head, Index start, Index live, Index count, const T* zeros,
                 const T** rows) const {
        for (Index j = 0; j < live; ++j) {
            const Index position = start + j, page = tiling.page ? block_tables[b * tiling.max_pages + position / tiling.page] : 0;
            const Index slot = tiling.page ? position % tiling.page : cu_query_lens[b] + position;
            rows[j] = base + page * strides.page + slot * strides.row + head * strides.head;
        }
        std::fill(rows + live, rows + count, zeros);
    }
};

struct Item {
    Index sequence, head, first, count;  // queries [first, first + count) of the sequence
};

template <typename T>
std::vector<Item> items_of(const Attention<T>& call) {
    const AttentionTiling& tiling = call.tiling;
    const Index step = std::max<Index>(1, kItemElements / (call.group * tiling.head_dim));
    std::vector<Item> items;
    for (Index b = 0; b < tiling.sequences; ++b)
        for (Index last = call.queries(b); last > 0; last -= std::min(step, last))  // the longest ones first
            for (Index head = 0; head < tiling.key_heads; ++head) items.push_back({b, head, std::max<Index>(0, last - step), std::min(step, last)});
    return items;
}

template <typename T>
double work_of(const Attention<T>& call) {
    double pairs = 0;
    for (Index b = 0; b < call.tiling.sequences; ++b) pairs += double(call.queries(b)) * call.keys(b);
    return pairs * call.tiling.query_heads * call.tiling.head_dim * (call.tiling.causal ? 1 : 2);
}

// What rows have seen so far; [rows] and [rows][dim].
struct State {
    std::vector<float> m, l, o;
    void clear(Index rows, Index dim) {
        m.assign(rows, kNegativeInfinity);
        l.assign(rows, 0.0f);
        o.assign(rows * dim, 0.0f);
    }
};

struct Scratch {
    std::vector<float> q, keys, values, scores, product;
    State split, total;
};

// One online-softmax step of a row. Columns [begin, end), multiples of 16, of the tile become probabilities; the row sees [first, last) of
// them. Returns the factor of the old accumulator.
inline float softmax_step(float* s, Index begin, Index first, Index last, Index end, float scale, float& m, float& l) {
    std::fill(s + begin, s + first, kNegativeInfinity);
    std::fill(s + last, s + end, kNegativeInfinity);
    Lanes most = all_lanes(m);
    for (Index j = begin; j < end; j += kLanes) {
        const Lanes score = load(s + j) * scale;
        store(s + j, score);
        most = score > most ? score : most;
    }
    float m_new = m;
    for (Index i = 0; i < kLanes; ++i) m_new = most[i] > m_new ? most[i] : m_new;
    for (Index j = begin; j < end; j += kLanes) store(s + j, exp_lanes(load(s + j) - m_new));
    float sum = 0.0f;
    const Index first_block = begin / kRowSumBlock * kRowSumBlock, last_block = round_up(end, kRowSumBlock);
    std::fill(s + first_block, s + begin, 0.0f);  // lanes that nobody computed are +0 in the tree
    std::fill(s + end, s + last_block, 0.0f);
    for (Index j = first_block; j < last_block; j += kRowSumBlock) sum = sum + block_sum(s + j);
    const float alpha = exp_f32(m - m_new);
    l = l * alpha + sum;
    m = m_new;
    return alpha;
}

template <typename T>
class ItemRun {
 public:
    ItemRun(const Attention<T>& call, const Item& item, Scratch& scratch)
        : call_(call),
          item_(item),
          room_(scratch),
          tile_(call.tiling.kv_tile),
          dim_(call.tiling.head_dim),
          rows_(item.count * call.group),
          keys_(call.keys(item.sequence)),
          first_position_(keys_ - call.queries(item.sequence) + item.first) {}

    void run() {
        load_queries();
        room_.keys.resize(tile_ * dim_), room_.values.resize(tile_ * dim_);
        room_.scores.resize(kRowsTogether * tile_), room_.product.resize(kRowsTogether * dim_);
        room_.split.clear(rows_, dim_);
        const bool splits = call_.tiling.kv_split != 0;
        if (splits) room_.total.clear(rows_, dim_);
        const Index last = sees(rows_ - 1).last;
        for (Index start = sees(0).first / tile_ * tile_; start < last; start += tile_) {
            add_tile(start);
            const Index end = start + tile_;
            if (splits && (end >= last || end % call_.tiling.kv_split == 0)) merge_split();
        }
        write(splits ? room_.total : room_.split);
    }

 private:
    const Attention<T>& call_;
    const Item& item_;
    Scratch& room_;
    const Index tile_, dim_, rows_, keys_, first_position_;
    Magnitudes q_size_;

    Visible sees(Index row) const { return visible(call_.tiling, first_position_ + row / call_.group, keys_); }

    // Row (query, head of the group) of q.
    const T* query(Index row) const {
        const AttentionTiling& t = call_.tiling;
        return call_.q + (call_.cu_query_lens[item_.sequence] + item_.first + row / call_.group) * t.q_row +
               (item_.head * call_.group + row % call_.group) * t.q_head;
    }

    void load_queries() {
        room_.q.resize(rows_ * dim_);
        for (Index r = 0; r < rows_; ++r) {
            const T* from = query(r);
            q_size_.add(from, dim_);
            for (Index d = 0; d < dim_; d += kPanel) widen16(from + d, room_.q.data() + r * dim_ + d);
        }
    }

    void add_tile(Index start) {
        const Index live = std::min(tile_, keys_ - start), columns = round_up(live, kPanel);
        const T* rows[kAttentionMaxTile];
        const T zeros[kAttentionMaxHeadDim] = {};
        Magnitudes k_size, v_size;
        call_.rows_of(call_.k, call_.tiling.k, item_.sequence, item_.head, start, live, columns, zeros, rows);
        for (Index j = 0; j < live; ++j) k_size.add(rows[j], dim_);
        pack_transposed(room_.keys.data(), rows, columns, dim_);
        call_.rows_of(call_.v, call_.tiling.v, item_.sequence, item_.head, start, live, columns, zeros, rows);
        for (Index j = 0; j < live; ++j) v_size.add(rows[j], dim_);
        pack_natural(room_.values.data(), rows, columns, dim_);
        const bool exact = products_are_exact<T>(q_size_, k_size);
        for (Index first = 0; first < rows_; first += kRowsTogether)
            add_rows(start, columns, first, std::min(kRowsTogether, rows_ - first), exact, v_size);
    }

    // A tile for some rows. Panels that none of them sees are skipped: their probabilities are zero.
    void add_rows(Index start, Index columns, Index first, Index count, bool exact, const Magnitudes& v_size) {
        const Index begin = std::max<Index>(0, sees(first).first - start) / kPanel * kPanel;
        const Index end = std::min(columns, round_up(sees(first + count - 1).last - start, kPanel));
        if (begin >= end) return;
        float *s = room_.scores.data(), *pv = room_.product.data();
        for (Index r = 0; r < count; ++r) std::fill(s + r * tile_ + begin, s + r * tile_ + end, 0.0f);
        panel_product(call_.order, exact, room_.q.data() + first * dim_, dim_, count, room_.keys.data(), dim_, 0, dim_, begin, end, s, tile_);
        float alpha[kRowsTogether];
        const Rounded p = softmax_rows(start, begin, end, first, count, alpha);
        std::fill_n(pv, count * dim_, 0.0f);
        const bool exact_values = products_are_exact<T>(p, v_size);
        panel_product(call_.order, exact_values, s, tile_, count, room_.values.data(), columns, begin, end - begin, 0, dim_, pv, dim_);
        for (Index r = 0; r < count; ++r) {
            float* o = room_.split.o.data() + (first + r) * dim_;
            for (Index d = 0; d < dim_; ++d) o[d] = o[d] * alpha[r] + pv[r * dim_ + d];
        }
    }

    Rounded softmax_rows(Index start, Index begin, Index end, Index first, Index count, float* alpha) {
        Rounded p;
        for (Index r = 0; r < count; ++r) {
            const Visible seen = sees(first + r);
            float* s = room_.scores.data() + r * tile_;
            const Index from = std::clamp(seen.first - start, begin, end), to = std::clamp(seen.last - start, from, end);
            if (from == to) {  // the tile lies outside what the row sees: its state stays
                std::fill(s + begin, s + end, 0.0f);
                alpha[r] = 1.0f;
                continue;
            }
            alpha[r] = softmax_step(s, begin, from, to, end, call_.tiling.scale, room_.split.m[first + r], room_.split.l[first + r]);
            p.round<T>(s + begin, end - begin);
        }
        return p;
    }

    // Splits in index order: both sides scaled to the common maximum, then added.
    void merge_split() {
        State &total = room_.total, &split = room_.split;
        for (Index r = 0; r < rows_; ++r) {
            if (split.m[r] == kNegativeInfinity) continue;
            const float m = split.m[r] > total.m[r] ? split.m[r] : total.m[r];
            const float alpha = exp_f32(total.m[r] - m), beta = exp_f32(split.m[r] - m);
            total.m[r] = m;
            total.l[r] = total.l[r] * alpha + split.l[r] * beta;
            float *o = total.o.data() + r * dim_, *part = split.o.data() + r * dim_;
            for (Index d = 0; d < dim_; ++d) o[d] = o[d] * alpha + part[d] * beta;
        }
        split.clear(rows_, dim_);
    }

    void write(const State& state) const {
        for (Index r = 0; r < rows_; ++r) {
            const Index row = (call_.cu_query_lens[item_.sequence] + item_.first + r / call_.group) * call_.tiling.query_heads +
                              item_.head * call_.group + r % call_.group;
            const float* o = state.o.data() + r * dim_;
            T* to = call_.out + row * dim_;
            for (Index d = 0; d < dim_; ++d) to[d] = from_float<T>(o[d] / state.l[r]);
            call_.lse[row] = state.m[r] + log_f32(state.l[r]);
        }
    }
};

template <typename T>
void attention(const KernelCall& call, const AttentionTiling& tiling) {
    const Attention<T> attention(call, tiling);
    const std::vector<Item> items = items_of(attention);
    over_items<Scratch>(Index(items.size()), call.threads, work_of(attention),
                        [&](Scratch& scratch, Index i) { ItemRun<T>(attention, items[i], scratch).run(); });
}

}  // namespace
}  // namespace megatron_ext

MEGATRON_EXT_NATIVE(attention_bf16, megatron_ext::AttentionTiling, megatron_ext::attention<megatron_ext::BFloat16>)
MEGATRON_EXT_NATIVE(attention_f16, megatron_ext::AttentionTiling, megatron_ext::attention<megatron_ext::Float16>)
