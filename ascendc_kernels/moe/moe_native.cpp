// MoE combine by the expert tree (reference/moe.py).
#include <numeric>

#include "dispatch.h"
#include "sums.h"

namespace megatron_ext {
namespace {

struct Leaf {
    Index expert, row;
};

// Sums the leaves of experts [first, last) into out[depth]; returns whether there was one. scratch holds one row per depth.
template <typename T>
struct ExpertTree {
    const T* y;
    const float* weights;
    Index hidden, experts_per_segment;
    std::vector<float> scratch;

    float* row_at(Index depth) {
        if (Index(scratch.size()) < (depth + 1) * hidden) scratch.resize((depth + 1) * hidden);
        return scratch.data() + depth * hidden;
    }

    void add_leaf(const Leaf& leaf, float* out, bool present) const {
        const float weight = weights[leaf.row];
        const T* y_row = y + leaf.row * hidden;
        if (present)
            for (Index i = 0; i < hidden; ++i) out[i] = out[i] + weight * to_float(y_row[i]);
        else
            for (Index i = 0; i < hidden; ++i) out[i] = weight * to_float(y_row[i]);
    }

    bool sum(const Leaf* begin, const Leaf* end, Index first, Index last, Index depth) {
        if (begin == end) return false;
        if (last - first <= experts_per_segment) {
            float* out = row_at(depth);
            for (const Leaf* leaf = begin; leaf != end; ++leaf) add_leaf(*leaf, out, leaf != begin);
            return true;
        }
        const Index middle = (first + last) / 2;
        const Leaf* split = std::find_if(begin, end, [&](const Leaf& leaf) { return leaf.expert >= middle; });
        if (begin == split) return sum(split, end, middle, last, depth);
        sum(begin, split, first, middle, depth);
        if (split == end) return true;
        sum(split, end, middle, last, depth + 1);
        const float* right = row_at(depth + 1);
        float* left = row_at(depth);
        for (Index i = 0; i < hidden; ++i) left[i] = left[i] + right[i];
        return true;
    }
};

template <typename T>
void combine(const T* y, const float* weights, const Index* tokens, const Index* experts, Index rows, Index num_tokens, Index hidden,
             Index experts_per_segment, Index first, Index last, float* out) {
    std::vector<Index> order(rows);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](Index a, Index b) {
        return tokens[a] != tokens[b] ? tokens[a] < tokens[b] : experts[a] < experts[b];
    });
    ExpertTree<T> tree{y, weights, hidden, experts_per_segment, {}};
    std::vector<Leaf> leaves;
    std::fill_n(out, num_tokens * hidden, 0.0f);
    for (Index i = 0; i < rows;) {
        const Index token = tokens[order[i]];
        leaves.clear();
        for (; i < rows && tokens[order[i]] == token; ++i) leaves.push_back({experts[order[i]], order[i]});
        tree.sum(leaves.data(), leaves.data() + leaves.size(), first, last, 0);
        std::copy_n(tree.row_at(0), hidden, out + token * hidden);
    }
}

}  // namespace
}  // namespace megatron_ext

using namespace megatron_ext;

extern "C" __attribute__((visibility("default"))) int32_t megatron_ext_combine(int32_t dtype, const void* y, const float* weights, const Index* tokens, const Index* experts,
                                        Index rows, Index num_tokens, Index hidden, Index experts_per_segment, Index first, Index last,
                                        float* out) {
    return dispatch(dtype, [&](auto tag) {
        using T = decltype(tag);
        combine(static_cast<const T*>(y), weights, tokens, experts, rows, num_tokens, hidden, experts_per_segment, first, last, out);
    });
}
