// Native twin of attention (reference/attention.py). An item is a range of queries of one sequence with all heads that share a key head, so
// that every tile of keys and values is widened once for all of them; where these are few rows, as in decode, with several key heads, because
// their keys lie side by side in memory. Only the address of a key differs between packed and paged calls.
#include "attention_native.h"

namespace megatron_ext {
namespace {

constexpr Index kItemElements = 256 * 128;  // elements of q, and of the output, that an item keeps in the second cache
constexpr Index kRowsTogether = 48;         // rows whose scores stay in the nearest cache
constexpr Index kCacheLine = 64;

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

    // Rows of keys [start, start + live) of a key head, page by page; a row of zeros for the others up to `count`.
    void rows_of(const T* base, const KeyStrides& strides, Index b, Index head, Index start, Index live, Index count, const T* zeros,
                 const T** rows) const {
        const Index step = tiling.page ? tiling.page : live;
        for (Index done = 0; done < live; done += step) {
            const Index block = tiling.page ? block_tables[b * tiling.max_pages + (start + done) / tiling.page] : 0;
            const Index slot = tiling.page ? 0 : cu_query_lens[b] + start;
            const T* first = base + block * strides.page + slot * strides.row + head * strides.head;
            for (Index j = 0; j < std::min(step, live - done); ++j) rows[done + j] = first + j * strides.row;
        }
        std::fill(rows + live, rows + count, zeros);
    }
};

struct Item {
    Index sequence, head, heads, first, count;  // key heads [head, head + heads), queries [first, first + count) of the sequence
};

template <typename T>
std::vector<Item> items_of(const Attention<T>& call, Index threads) {
    constexpr Index kItemsPerThread = 2;  // at least, so that no thread is left alone with the last one
    const AttentionTiling& tiling = call.tiling;
    const Index step = std::max<Index>(1, kItemElements / (call.group * tiling.head_dim));
    const Index together = std::clamp<Index>(tiling.sequences * tiling.key_heads / (kItemsPerThread * threads), 1, tiling.key_heads);
    std::vector<Item> items;
    for (Index b = 0; b < tiling.sequences; ++b)
        for (Index last = call.queries(b); last > 0; last -= std::min(step, last)) {  // the longest ones first
            const Index first = std::max<Index>(0, last - step), heads = (last - first) * call.group <= kRowsTogether ? together : 1;
            for (Index head = 0; head < tiling.key_heads; head += heads)
                items.push_back({b, head, std::min(heads, tiling.key_heads - head), first, last - first});
        }
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
    Buffer q, keys, values, scores, product;
    State split, total;
};

// Alignments 2 and 3, reduce order and block rhythm: one online-softmax step of a row over whole blocks of 64 scores, which become probabilities and
// are summed as a tree each, one after another. The row sees [first, last) of them. Returns the factor of the old accumulator.
inline float softmax_step(float* s, Index n, Index first, Index last, float scale, float& m, float& l) {
    std::fill(s, s + first, kNegativeInfinity);
    std::fill(s + last, s + n, kNegativeInfinity);
    Lanes most[kTogether] = {splat(m), splat(m), splat(m), splat(m)};
    for (Index j = 0; j < n; j += kTogether * kLanes)
        for (Index v = 0; v < kTogether; ++v) {
            const Lanes score = load(s + j + v * kLanes) * scale;
            store(s + j + v * kLanes, score);
            most[v] = larger(score, most[v]);
        }
    const Lanes largest = larger(larger(most[0], most[1]), larger(most[2], most[3]));
    float m_new = m;
    for (Index i = 0; i < kLanes; ++i) m_new = largest[i] > m_new ? largest[i] : m_new;
    const float sum = sum_of_blocks(n, [&](Index j, Lanes* p) {
        for (Index v = 0; v < kTogether; ++v) p[v] = load(s + j + v * kLanes) - m_new;
        exp_below_zero(p);
        for (Index v = 0; v < kTogether; ++v) store(s + j + v * kLanes, p[v]);
    });
    const float alpha = exp_f32(m - m_new);
    l = l * alpha + sum;
    m = m_new;
    return alpha;
}

// A tile of keys and values.
template <typename T>
struct Tile {
    Index start, columns;
    const T *keys[kAttentionMaxTile], *values[kAttentionMaxTile];  // rows
    bool exact_keys = false;
    Extremes value_size;
};

// One key head of an item.
template <typename T>
class HeadRun {
 public:
    HeadRun(const Attention<T>& call, const Item& item, Index head, Scratch& scratch)
        : call_(call),
          item_(item),
          head_(head),
          room_(scratch),
          tile_(call.tiling.kv_tile),
          dim_(call.tiling.head_dim),
          rows_(item.count * call.group),
          keys_(call.keys(item.sequence)),
          first_position_(keys_ - call.queries(item.sequence) + item.first) {
        load_queries();
        const Index together = std::min(kRowsTogether, rows_);
        room_.keys.reserve((few_rows() ? kPanel : tile_) * dim_), room_.values.reserve(tile_ * (few_rows() ? kLine : dim_));
        room_.scores.reserve(together * tile_), room_.product.reserve(together * dim_);
        room_.split.clear(rows_, dim_);
        if (splits()) room_.total.clear(rows_, dim_);
    }

    // Keys that any row sees.
    Visible range() const { return {sees(0).first, sees(rows_ - 1).last}; }

    // Where the rows of a tile are.
    const Tile<T>& locate(Index start) {
        static const T zeros[kAttentionMaxHeadDim] = {};
        const Index live = std::min(tile_, keys_ - start);
        Tile<T>& tile = tiles_[start / tile_ % 2];
        tile.start = start, tile.columns = round_up(live, kPanel);
        call_.rows_of(call_.k, call_.tiling.k, item_.sequence, head_, start, live, tile.columns, zeros, tile.keys);
        call_.rows_of(call_.v, call_.tiling.v, item_.sequence, head_, start, live, tile.columns, zeros, tile.values);
        return tile;
    }

    // With few rows a panel is packed when it is needed and is still in the nearest cache then, and the rows of the next tile are fetched meanwhile;
    // with many, all panels are packed first. next: nullptr after the last one.
    void add_tile(Index start, const Tile<T>* next) {
        Tile<T>& tile = tiles_[start / tile_ % 2];
        next_ = next;
        if (!few_rows()) {
            Magnitudes keys, values;
            pack_all_transposed(room_.keys.data(), tile.keys, tile.columns, dim_, keys);
            pack_all_natural(room_.values.data(), tile.values, tile.columns, dim_, values);
            tile.exact_keys = products_are_exact<T>(q_size_, keys);
            tile.value_size = values;
        }
        for (Index first = 0; first < rows_; first += kRowsTogether) add_rows(tile, first, std::min(kRowsTogether, rows_ - first));
        const Index end = start + tile_;
        if (splits() && (end >= range().last || end % call_.tiling.kv_split == 0)) merge_split();
    }

    void write() const { write(splits() ? room_.total : room_.split); }

 private:
    const Attention<T>& call_;
    const Item& item_;
    const Index head_;
    Scratch& room_;
    const Index tile_, dim_, rows_, keys_, first_position_;
    Extremes q_size_;
    Tile<T> tiles_[2];  // by parity
    const Tile<T>* next_ = nullptr;

    bool splits() const { return call_.tiling.kv_split != 0; }
    Visible sees(Index row) const { return visible(call_.tiling, first_position_ + row / call_.group, keys_); }

    // Row (query, head of the group) of q.
    const T* query(Index row) const {
        const AttentionTiling& t = call_.tiling;
        return call_.q + (call_.cu_query_lens[item_.sequence] + item_.first + row / call_.group) * t.q_row +
               (head_ * call_.group + row % call_.group) * t.q_head;
    }

    void load_queries() {
        Magnitudes seen;
        room_.q.reserve(rows_ * dim_);
        for (Index r = 0; r < rows_; ++r) {
            const T* from = query(r);
            seen.add(from, dim_);
            widen(from, dim_, room_.q.data() + r * dim_);
        }
        q_size_ = seen;
    }

    // Rows [first, last), or what there is of them.
    void fetch(const T* const* rows, Index first, Index last) const {
        for (Index j = first; j < std::min(last, next_->columns); ++j)
            for (Index d = 0; d < dim_; d += kCacheLine / Index(sizeof(T))) __builtin_prefetch(rows[j] + d);
    }

    bool few_rows() const { return rows_ <= kRowsTogether; }

    // A tile for some rows. Panels that none of them sees are skipped: their probabilities are zero.
    void add_rows(const Tile<T>& tile, Index first, Index count) {
        const Index begin = std::max<Index>(0, sees(first).first - tile.start) / kPanel * kPanel;
        const Index end = std::min(tile.columns, round_up(sees(first + count - 1).last - tile.start, kPanel));
        if (begin >= end) return;
        float *s = room_.scores.data(), *pv = room_.product.data(), alpha[kRowsTogether];
        for (Index r = 0; r < count; ++r) std::fill(s + r * tile_ + begin, s + r * tile_ + end, 0.0f);
        add_scores(tile, first, count, begin, end);
        const Rounding p = softmax_rows(tile.start, begin, end, first, count, alpha);
        std::fill_n(pv, count * dim_, 0.0f);
        add_products(tile, count, begin, end, p);
        for (Index r = 0; r < count; ++r) {
            float* o = room_.split.o.data() + (first + r) * dim_;
            for (Index d = 0; d < dim_; ++d) o[d] = o[d] * alpha[r] + pv[r * dim_ + d];
        }
    }

    void add_scores(const Tile<T>& tile, Index first, Index count, Index begin, Index end) {
        for (Index n = begin; n < end; n += kPanel) {
            float* panel = room_.keys.data() + (few_rows() ? 0 : n * dim_);
            bool exact = tile.exact_keys;
            if (few_rows()) {
                Magnitudes seen;
                pack_transposed(panel, tile.keys + n, dim_, seen);
                if (next_) fetch(next_->keys, n, n + kPanel);
                exact = products_are_exact<T>(q_size_, seen);
            }
            tiles(call_.order, exact, room_.q.data() + first * dim_, dim_, count, panel, dim_, room_.scores.data() + n, tile_);
        }
    }

    void add_products(const Tile<T>& tile, Index count, Index begin, Index end, const Rounding& p) {
        for (Index at = 0; at < dim_; at += kLine) {
            const Index columns = std::min(kLine, dim_ - at);
            const float* panels = room_.values.data() + (few_rows() ? 0 : at * tile.columns + begin * kPanel);
            Extremes size = tile.value_size;
            if (few_rows()) {
                Magnitudes seen;
                pack_natural(room_.values.data(), tile.values + begin, end - begin, at, columns, seen);
                if (next_) fetch(next_->values, at * tile_ / dim_, (at + columns) * tile_ / dim_);
                size = seen;
            }
            const Index apart = few_rows() ? end - begin : tile.columns;
            for (Index n = 0; n < columns; n += kPanel)
                tiles(call_.order, p.products_are_exact_with<T>(size), room_.scores.data() + begin, tile_, count, panels + n * apart, end - begin,
                      room_.product.data() + at + n, dim_);
        }
    }

    // Scores [begin, end) of the tile become probabilities, rounded for their product.
    Rounding softmax_rows(Index start, Index begin, Index end, Index first, Index count, float* alpha) {
        const Index first_block = begin / kRowSumBlock * kRowSumBlock, n = round_up(end, kRowSumBlock) - first_block;
        Rounding p;
        for (Index r = 0; r < count; ++r) {
            const Visible seen = sees(first + r);
            float* s = room_.scores.data() + r * tile_ + first_block;
            const Index from = std::clamp<Index>(seen.first - start - first_block, 0, n), to = std::clamp(seen.last - start - first_block, from, n);
            if (from == to) {  // the tile lies outside what the row sees: its state stays
                std::fill(s, s + n, 0.0f);
                alpha[r] = 1.0f;
                continue;
            }
            alpha[r] = softmax_step(s, n, from, to, call_.tiling.scale, room_.split.m[first + r], room_.split.l[first + r]);
            p.round<T>(s, n);
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
                              head_ * call_.group + r % call_.group;
            const float* o = state.o.data() + r * dim_;
            T* to = call_.out + row * dim_;
            for (Index d = 0; d < dim_; ++d) to[d] = from_float<T>(o[d] / state.l[r]);
            call_.lse[row] = state.m[r] + log_f32(state.l[r]);
        }
    }
};

using Scratches = std::vector<std::unique_ptr<Scratch>>;  // by key head of an item

template <typename T>
void run_item(const Attention<T>& call, const Item& item, Scratches& scratches) {
    std::vector<HeadRun<T>> heads;
    heads.reserve(item.heads);
    for (Index h = 0; h < item.heads; ++h) {
        if (h == Index(scratches.size())) scratches.push_back(std::make_unique<Scratch>());
        heads.emplace_back(call, item, item.head + h, *scratches[h]);
    }
    const Index tile = call.tiling.kv_tile, last = heads[0].range().last;
    Index start = heads[0].range().first / tile * tile;
    heads[0].locate(start);
    for (; start < last; start += tile)
        for (Index h = 0; h < item.heads; ++h) {
            const bool same_tile = h + 1 < item.heads;
            const Tile<T>* next = same_tile ? &heads[h + 1].locate(start) : start + tile < last ? &heads[0].locate(start + tile) : nullptr;
            heads[h].add_tile(start, next);
        }
    for (const HeadRun<T>& head : heads) head.write();
}

template <typename T>
void attention(const KernelCall& call, const AttentionTiling& tiling) {
    const Attention<T> attention(call, tiling);
    const std::vector<Item> items = items_of(attention, call.threads.count);
    over_items<Scratches>(Index(items.size()), call.threads, work_of(attention),
                          [&](Scratches& scratches, Index i) { run_item(attention, items[i], scratches); });
}

}  // namespace
}  // namespace megatron_ext

MEGATRON_EXT_NATIVE(attention_bf16, megatron_ext::AttentionTiling, megatron_ext::attention<megatron_ext::BFloat16>)
MEGATRON_EXT_NATIVE(attention_f16, megatron_ext::AttentionTiling, megatron_ext::attention<megatron_ext::Float16>)
