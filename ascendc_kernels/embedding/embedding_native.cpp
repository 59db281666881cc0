// Native twins of the kernels of this folder (reference/embedding.py).
#include "embedding_tiling.h"
#include "native_call.h"
#include "parallel.h"

namespace megatron_ext {
namespace {

constexpr double kWorkOfElement = 4;  // an element costs about as much as so many multiply-adds of a contraction

void embedding(const KernelCall& call, const EmbeddingTiling& tiling) {
    const int64_t* ids = static_cast<const int64_t*>(call.operands[0]);
    const uint16_t* weight = static_cast<const uint16_t*>(call.operands[1]);
    uint16_t* y = static_cast<uint16_t*>(call.operands[2]);
    const Index hidden = tiling.hidden;
    parallel_ranges(tiling.tokens, call.threads, kWorkOfElement * tiling.tokens * hidden, [=](Index first, Index last) {
        for (Index token = first; token < last; ++token)
            if (ids[token] >= 0)
                std::copy_n(weight + ids[token] * hidden, hidden, y + token * hidden);
            else
                std::fill_n(y + token * hidden, hidden, uint16_t(0));
    });
}

// A thread owns columns and runs through all tokens in order: equal shares, whatever the ids are.
template <typename T>
void embedding_wgrad(const KernelCall& call, const EmbeddingTiling& tiling) {
    const int64_t* ids = static_cast<const int64_t*>(call.operands[0]);
    const T* dy = static_cast<const T*>(call.operands[1]);
    float* grad = static_cast<float*>(call.operands[2]);
    const Index hidden = tiling.hidden;
    parallel_ranges(hidden, call.threads, kWorkOfElement * tiling.tokens * hidden, [=](Index first, Index last) {
        for (Index token = 0; token < tiling.tokens; ++token) {
            if (ids[token] < 0) continue;
            float* row = grad + ids[token] * hidden;
            const T* upstream = dy + token * hidden;
#pragma GCC ivdep
            for (Index i = first; i < last; ++i) row[i] = row[i] + to_float(upstream[i]);
        }
    });
}

}  // namespace
}  // namespace megatron_ext

MEGATRON_EXT_NATIVE(embedding_b16, megatron_ext::EmbeddingTiling, megatron_ext::embedding)
MEGATRON_EXT_NATIVE(embedding_wgrad_bf16, megatron_ext::EmbeddingTiling, megatron_ext::embedding_wgrad<megatron_ext::BFloat16>)
MEGATRON_EXT_NATIVE(embedding_wgrad_f16, megatron_ext::EmbeddingTiling, megatron_ext::embedding_wgrad<megatron_ext::Float16>)
