// Native twin of attention_backward (reference/attention.py). An item is a sequence and a key head: it owns dq of the heads that share the
// key head, and dk and dv, so every sum runs in the order of the loops here. Memory is linear in the length of a sequence.
#include "attention_native.h"

namespace megatron_ext {
namespace {

template <typename T>
struct Backward {
    const AttentionTiling& tiling;
    MmadOrder order;
    const T *d_out, *q, *k, *v, *out;
    const float* lse;
    const int32_t* cu_seqlens;
    float *dq, *dk, *dv;
    Index group;

    Backward(const KernelCall& call, const AttentionTiling& t)
        : tiling(t),
          order(MmadOrder(call.mmad_order)),
          d_out(static_cast<const T*>(call.operands[0])),
          q(static_cast<const T*>(call.operands[1])),
          k(static_cast<const T*>(call.operands[2])),
          v(static_cast<const T*>(call.operands[3])),
          out(static_cast<const T*>(call.operands[4])),
          lse(static_cast<const float*>(call.operands[5])),
          cu_seqlens(static_cast<const int32_t*>(call.operands[6])),
          dq(static_cast<float*>(call.operands[8])),
          dk(static_cast<float*>(call.operands[9])),
          dv(static_cast<float*>(call.operands[10])),
          group(t.query_heads / t.key_heads) {}
};

// One matrix [n][dim] of a head: widened rows, and how large its values are.
template <typename T>
struct Head {
    Buffer rows;
    Extremes size;

    void load(const T* from, Index stride, Index n, Index dim) {
        Magnitudes seen;
        rows.reserve(n * dim);
        for (Index i = 0; i < n; ++i) {
            seen.add(from + i * stride, dim);
            widen(from + i * stride, dim, rows.data() + i * dim);
        }
        size = seen;
    }
};

template <typename T>
struct BackwardScratch {
    Head<T> q, d_out;
    Extremes k_size, v_size;
    Buffer keys_transposed, values_transposed, keys;  // panels of every key tile
    Buffer queries, d_outs;                           // panels of one query tile
    Buffer p, ds, turned, delta;
    std::vector<float> dq, dk, dv;
};

template <typename T>
class BackwardRun {
 public:
    BackwardRun(const Backward<T>& call, Index sequence, Index head, BackwardScratch<T>& scratch)
        : call_(call),
          room_(scratch),
          head_(head),
          first_row_(call.cu_seqlens[sequence]),
          n_(call.cu_seqlens[sequence + 1] - first_row_),
          tile_(call.tiling.kv_tile),
          dim_(call.tiling.head_dim) {}

    void run() {
        const AttentionTiling& t = call_.tiling;
        load_keys();
        for (float* total : {call_.dk, call_.dv})
            for (Index i = 0; i < n_; ++i) std::fill_n(total + key_row(i), dim_, 0.0f);
        room_.p.reserve(tile_ * tile_), room_.ds.reserve(tile_ * tile_), room_.turned.reserve(tile_ * tile_);
        room_.queries.reserve(tile_ * dim_), room_.d_outs.reserve(tile_ * dim_);
        for (Index g = 0; g < call_.group; ++g) {
            const Index head = head_ * call_.group + g;
            room_.q.load(call_.q + first_row_ * t.q_row + head * t.q_head, t.q_row, n_, dim_);
            room_.d_out.load(call_.d_out + query_row(0, head), t.query_heads * dim_, n_, dim_);
            load_delta(head);
            for (std::vector<float>* sum : {&room_.dq, &room_.dk, &room_.dv}) sum->assign(n_ * dim_, 0.0f);
            for (Index i = 0; i < n_; i += tile_) query_tile(i, head);
            store(head);
        }
    }

 private:
    const Backward<T>& call_;
    BackwardScratch<T>& room_;
    const Index head_, first_row_, n_, tile_, dim_;

    Index query_row(Index i, Index head) const { return ((first_row_ + i) * call_.tiling.query_heads + head) * dim_; }
    Index key_row(Index i) const { return ((first_row_ + i) * call_.tiling.key_heads + head_) * dim_; }
    Index in_tile(Index first) const { return std::min(tile_, n_ - first); }

    // Pointers to `count` rows of 16-bit values, the ones from `live` on to zeros.
    static void rows_of(const T** rows, const T* from, Index stride, Index live, Index count) {
        static const T zeros[kAttentionMaxHeadDim] = {};
        for (Index j = 0; j < count; ++j) rows[j] = j < live ? from + j * stride : zeros;
    }

    void load_keys() {
        const AttentionTiling& t = call_.tiling;
        const Index tiles = (n_ + tile_ - 1) / tile_;
        for (Buffer* panels : {&room_.keys_transposed, &room_.values_transposed, &room_.keys}) panels->reserve(tiles * tile_ * dim_);
        const T* k = call_.k + first_row_ * t.k.row + head_ * t.k.head;
        const T* v = call_.v + first_row_ * t.v.row + head_ * t.v.head;
        Magnitudes k_seen, v_seen;
        for (Index j = 0; j < n_; j += tile_) {
            const T* rows[kAttentionMaxTile];
            const Index count = round_up(in_tile(j), kPanel);
            rows_of(rows, k + j * t.k.row, t.k.row, in_tile(j), count);
            pack_all_transposed(room_.keys_transposed.data() + j * dim_, rows, count, dim_, k_seen);
            pack_all_natural(room_.keys.data() + j * dim_, rows, count, dim_, k_seen);
            rows_of(rows, v + j * t.v.row, t.v.row, in_tile(j), count);
            pack_all_transposed(room_.values_transposed.data() + j * dim_, rows, count, dim_, v_seen);
        }
        room_.k_size = k_seen, room_.v_size = v_seen;
    }

    void load_delta(Index head) {
        room_.delta.reserve(n_);
        for (Index i = 0; i < n_; ++i) {
            const T* out = call_.out + query_row(i, head);
            const float* d_out = room_.d_out.rows.data() + i * dim_;
            room_.delta.data()[i] = row_sum(dim_, [&](Index d) { return d_out[d] * to_float(out[d]); });
        }
    }

    void query_tile(Index i, Index head) {
        const AttentionTiling& t = call_.tiling;
        const Index rows = in_tile(i), length = round_up(rows, kPanel);
        const T* from[kAttentionMaxTile];
        rows_of(from, call_.q + (first_row_ + i) * t.q_row + head * t.q_head, t.q_row, rows, length);
        Magnitudes known;  // from Head
        pack_all_natural(room_.queries.data(), from, length, dim_, known);
        rows_of(from, call_.d_out + query_row(i, head), t.query_heads * dim_, rows, length);
        pack_all_natural(room_.d_outs.data(), from, length, dim_, known);
        const Index first = visible(t, i, n_).first / tile_ * tile_, last = visible(t, i + rows - 1, n_).last;
        for (Index j = first; j < last; j += tile_) pair(i, j, head);
    }

    // A query tile with a key tile.
    void pair(Index i, Index j, Index head) {
        const Index rows = in_tile(i), keys = in_tile(j), columns = round_up(keys, kPanel), length = round_up(rows, kPanel);
        float *p = room_.p.data(), *ds = room_.ds.data(), *turned = room_.turned.data();
        std::fill_n(p, tile_ * tile_, 0.0f), std::fill_n(ds, tile_ * tile_, 0.0f);
        product(products_are_exact<T>(room_.q.size, room_.k_size), room_.q.rows.data() + i * dim_, dim_, rows,
                room_.keys_transposed.data() + j * dim_, dim_, columns, p, tile_);
        product(products_are_exact<T>(room_.d_out.size, room_.v_size), room_.d_out.rows.data() + i * dim_, dim_, rows,
                room_.values_transposed.data() + j * dim_, dim_, columns, ds, tile_);
        Rounding p_size, ds_size;
        for (Index r = 0; r < rows; ++r) softmax_gradient(p + r * tile_, ds + r * tile_, i + r, j, columns, head, p_size, ds_size);
        product(ds_size.products_are_exact_with<T>(room_.k_size), ds, tile_, rows, room_.keys.data() + j * dim_, columns, dim_,
                room_.dq.data() + i * dim_, dim_);
        turn(ds, turned, length, columns);
        product(ds_size.products_are_exact_with<T>(room_.q.size), turned, tile_, keys, room_.queries.data(), length, dim_,
                room_.dk.data() + j * dim_, dim_);
        turn(p, turned, length, columns);
        product(p_size.products_are_exact_with<T>(room_.d_out.size), turned, tile_, keys, room_.d_outs.data(), length, dim_,
                room_.dv.data() + j * dim_, dim_);
    }

    void product(bool exact, const float* a, Index a_stride, Index rows, const float* panels, Index length, Index columns, float* c,
                 Index c_stride) const {
        panel_product(call_.order, exact, a, a_stride, rows, panels, length, columns, c, c_stride);
    }

    // Scores and dp of a row become p and ds, both rounded; what the row does not see is +0.
    void softmax_gradient(float* p, float* ds, Index row, Index start, Index columns, Index head, Rounding& p_size, Rounding& ds_size) const {
        const Visible seen = visible(call_.tiling, row, n_);
        const Index first = std::clamp<Index>(seen.first - start, 0, columns), last = std::clamp<Index>(seen.last - start, first, columns);
        const float lse = call_.lse[(first_row_ + row) * call_.tiling.query_heads + head], delta = room_.delta.data()[row];
        constexpr Index kStep = kTogether * kLanes;
        std::fill(p, p + first, kNegativeInfinity);
        std::fill(p + last, p + round_up(columns, kStep), kNegativeInfinity);
        for (Index c = 0; c < columns; c += kStep) {
            Lanes probabilities[kTogether];
            for (Index v = 0; v < kTogether; ++v) probabilities[v] = load(p + c + v * kLanes) * call_.tiling.scale - lse;
            exp_lanes(probabilities);
            for (Index v = 0; v < kTogether; ++v) {
                megatron_ext::store(p + c + v * kLanes, probabilities[v]);
                megatron_ext::store(ds + c + v * kLanes, probabilities[v] * (load(ds + c + v * kLanes) - delta));
            }
        }
        std::fill(ds, ds + first, 0.0f);
        std::fill(ds + last, ds + columns, 0.0f);
        p_size.round<T>(p, columns);
        ds_size.round<T>(ds, columns);
    }

    void turn(const float* from, float* to, Index rows, Index columns) const {
        for (Index r = 0; r < rows; r += kLanes)
            for (Index c = 0; c < columns; c += kLanes) transpose8(from + r * tile_ + c, tile_, to + c * tile_ + r, tile_);
    }

    void store(Index head) const {
        const float scale = call_.tiling.scale;
        for (Index i = 0; i < n_; ++i) {
            const float *dq = room_.dq.data() + i * dim_, *dk = room_.dk.data() + i * dim_, *dv = room_.dv.data() + i * dim_;
            float *to_dq = call_.dq + query_row(i, head), *to_dk = call_.dk + key_row(i), *to_dv = call_.dv + key_row(i);
            for (Index d = 0; d < dim_; ++d) to_dq[d] = dq[d] * scale;
            for (Index d = 0; d < dim_; ++d) to_dk[d] = to_dk[d] + dk[d] * scale;
            for (Index d = 0; d < dim_; ++d) to_dv[d] = to_dv[d] + dv[d];
        }
    }
};

template <typename T>
void attention_backward(const KernelCall& call, const AttentionTiling& tiling) {
    const Backward<T> backward(call, tiling);
    double pairs = 0;
    for (Index b = 0; b < tiling.sequences; ++b) {
        const double n = backward.cu_seqlens[b + 1] - backward.cu_seqlens[b];
        pairs += n * n;
    }
    over_items<BackwardScratch<T>>(tiling.sequences * tiling.key_heads, call.threads, pairs * tiling.query_heads * tiling.head_dim * 2,
                                   [&](BackwardScratch<T>& scratch, Index item) {
                                       BackwardRun<T>(backward, item / tiling.key_heads, item % tiling.key_heads, scratch).run();
                                   });
}

}  // namespace
}  // namespace megatron_ext

MEGATRON_EXT_NATIVE(attention_backward_bf16, megatron_ext::AttentionTiling, megatron_ext::attention_backward<megatron_ext::BFloat16>)
MEGATRON_EXT_NATIVE(attention_backward_f16, megatron_ext::AttentionTiling, megatron_ext::attention_backward<megatron_ext::Float16>)
