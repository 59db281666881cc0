// Native twins of the kernels of this folder (reference/moe.py). Legend: T tokens, R rows (token copies), H hidden.
#include "../embedding/embedding_tiling.h"
#include "moe_tiling.h"
#include "native_call.h"
#include "parallel.h"
#include "row_sums.h"

namespace megatron_ext {
namespace {

constexpr double kWorkOfElement = 4;  // an element costs about as much as so many multiply-adds of a contraction
constexpr Index kTogether = 256;      // columns whose waiting sums stay in the nearest cache

// What becomes of a leaf: it begins a sum, or is added to the one that runs; before that, the last `joins` waiting sums are joined into their neighbours.
struct Leaf {
    Index row, joins;
    bool begins;
};

// The leaves of a token, in ascending experts; see combine_kernel.h for when sums are joined. Returns how many sums wait at the end.
class Leaves {
 public:
    Leaves(const int64_t* order, const int64_t* experts, Index experts_per_segment) : order_(order), experts_(experts), per_segment_(experts_per_segment) {}

    Index find(Index first, Index last, std::vector<Leaf>& leaves) const {
        Index segments[kCombineMaxDepth], waiting = 0;
        leaves.clear();
        for (Index i = first; i < last; ++i) {
            const Index row = order_[i], segment = experts_[row] / per_segment_;
            const bool begins = waiting == 0 || segments[waiting - 1] != segment;
            Index joins = 0;
            for (; begins && waiting > 1 && (segments[waiting - 2] ^ segments[waiting - 1]) < (segments[waiting - 1] ^ segment); --waiting) ++joins;
            if (begins) segments[waiting++] = segment;
            leaves.push_back({row, joins, begins});
        }
        return waiting;
    }

 private:
    const int64_t *order_, *experts_;
    Index per_segment_;
};

inline void add_to(float* sum, const float* x, Index count) {
#pragma GCC ivdep
    for (Index i = 0; i < count; ++i) sum[i] = sum[i] + x[i];
}

// The root over `leaves` of up to kTogether columns from y on; sums is room for those that wait, the root is left in the first.
template <typename T>
inline void root(const std::vector<Leaf>& leaves, Index waiting_at_end, const T* y, Index stride, const float* weights, Index count, float* sums) {
    float* top = sums - kTogether;
    if (leaves.empty()) std::fill_n(sums, count, 0.0f);
    for (const Leaf& leaf : leaves) {
        for (Index i = 0; i < leaf.joins; ++i, top -= kTogether) add_to(top - kTogether, top, count);
        const T* from = y + leaf.row * stride;
        const float weight = weights[leaf.row];
        if (leaf.begins) {
            top += kTogether;
#pragma GCC ivdep
            for (Index i = 0; i < count; ++i) top[i] = weight * to_float(from[i]);
        } else {
#pragma GCC ivdep
            for (Index i = 0; i < count; ++i) top[i] = top[i] + weight * to_float(from[i]);
        }
    }
    for (; waiting_at_end > 1; --waiting_at_end, top -= kTogether) add_to(top - kTogether, top, count);
}

template <typename T, typename Out, bool finish>
void combine(const KernelCall& call, const CombineTiling& tiling) {
    const T* y = static_cast<const T*>(call.operands[0]);
    const float* weights = static_cast<const float*>(call.operands[1]);
    const Leaves tree(static_cast<const int64_t*>(call.operands[2]), static_cast<const int64_t*>(call.operands[3]), tiling.experts_per_segment);
    const int64_t* starts = static_cast<const int64_t*>(call.operands[4]);
    Out* out = static_cast<Out*>(call.operands[5]);
    const double work = kWorkOfElement * (tiling.rows + tiling.tokens) * tiling.hidden;
    parallel_ranges(tiling.tokens, call.threads, work, [=](Index first_token, Index last_token) {
        std::vector<Leaf> leaves;
        std::vector<float> sums(tiling.depth * kTogether);
        for (Index token = first_token; token < last_token; ++token) {
            const Index waiting = tree.find(starts[token], starts[token + 1], leaves);
            for (Index first = 0; first < tiling.hidden; first += kTogether) {
                const Index count = std::min(kTogether, tiling.hidden - first);
                root(leaves, waiting, y + first, tiling.hidden, weights, count, sums.data());
                Out* to = out + token * tiling.hidden + first;
                for (Index i = 0; i < count; ++i) to[i] = from_float<Out>(finish ? sums[i] + 0.0f : sums[i]);
            }
        }
    });
}

// dy of a block of a row; returns the sum of its products.
template <typename T>
inline float backward_block(const float* dout, const T* y, float weight, Index count, T* dy) {
    float products[kRowSumBlock] = {};
#pragma GCC ivdep
    for (Index i = 0; i < count; ++i) products[i] = dout[i] * to_float(y[i]);
#pragma GCC ivdep
    for (Index i = 0; i < count; ++i) dy[i] = from_float<T>(dout[i] * weight);
    return block_sum(products);
}

template <typename T>
void combine_backward(const KernelCall& call, const CombineBackwardTiling& tiling) {
    const float *dout = static_cast<const float*>(call.operands[0]), *weights = static_cast<const float*>(call.operands[2]);
    const T* y = static_cast<const T*>(call.operands[1]);
    const int64_t* tokens = static_cast<const int64_t*>(call.operands[3]);
    T* dy = static_cast<T*>(call.operands[4]);
    float* dweights = static_cast<float*>(call.operands[5]);
    const Index hidden = tiling.hidden;
    parallel_ranges(tiling.rows, call.threads, 2 * kWorkOfElement * tiling.rows * hidden, [=](Index first, Index last) {
        for (Index row = first; row < last; ++row) {
            const float* upstream = dout + tokens[row] * hidden;
            float total = 0.0f;
            for (Index at = 0; at < hidden; at += kRowSumBlock) {
                const Index here = row * hidden + at, count = std::min(kRowSumBlock, hidden - at);
                total = total + backward_block(upstream + at, y + here, weights[row], count, dy + here);
            }
            dweights[row] = total;
        }
    });
}

void unpermute(const KernelCall& call, const EmbeddingTiling& tiling) {
    const int64_t* index = static_cast<const int64_t*>(call.operands[0]);
    const uint16_t* rows = static_cast<const uint16_t*>(call.operands[1]);
    uint16_t* out = static_cast<uint16_t*>(call.operands[2]);
    const Index hidden = tiling.hidden;
    parallel_ranges(tiling.tokens, call.threads, kWorkOfElement * tiling.tokens * hidden, [=](Index first, Index last) {
        for (Index row = first; row < last; ++row) std::copy_n(rows + row * hidden, hidden, out + index[row] * hidden);
    });
}

}  // namespace
}  // namespace megatron_ext

using namespace megatron_ext;

MEGATRON_EXT_NATIVE(combine_bf16, CombineTiling, combine<BFloat16, float, false>)
MEGATRON_EXT_NATIVE(combine_f16, CombineTiling, combine<Float16, float, false>)
MEGATRON_EXT_NATIVE(combine_rows_bf16, CombineTiling, combine<BFloat16, BFloat16, true>)
MEGATRON_EXT_NATIVE(combine_rows_f16, CombineTiling, combine<Float16, Float16, true>)
MEGATRON_EXT_NATIVE(combine_backward_bf16, CombineBackwardTiling, combine_backward<BFloat16>)
MEGATRON_EXT_NATIVE(combine_backward_f16, CombineBackwardTiling, combine_backward<Float16>)
MEGATRON_EXT_NATIVE(unpermute_b16, EmbeddingTiling, unpermute)
