// Entry points that megatron_ext/ops/native.py calls through ctypes until its functions call torch.ops.megatron_ext.
#include "attention_tiling.h"
#include "dispatch.h"
#include "native_call.h"
#include "sums.h"

using namespace megatron_ext;

extern "C" {
const char* megatron_ext_attention_bf16_native(const KernelCall*);
const char* megatron_ext_attention_f16_native(const KernelCall*);
const char* megatron_ext_attention_backward_bf16_native(const KernelCall*);
const char* megatron_ext_attention_backward_f16_native(const KernelCall*);

constexpr int32_t kBf16 = 1, kF16 = 2;  // dtype codes of megatron_ext/ops/native.py

__attribute__((visibility("default"))) int32_t megatron_ext_attention(int32_t dtype, int32_t order, const void* q, const void* k, const void* v, void* out,
                                                                      float* lse, const int32_t* cu_queries, const int32_t* kv_lens,
                                                                      const int32_t* block_tables, Index sequences, Index max_pages, Index page_size,
                                                                      Index page_stride, Index row_stride, Index query_heads, Index key_heads,
                                                                      Index head_dim, Index tile, float scale) {
    if (dtype != kBf16 && dtype != kF16) return 1;
    AttentionTiling tiling{};
    tiling.tokens = cu_queries[sequences], tiling.sequences = sequences;
    tiling.query_heads = query_heads, tiling.key_heads = key_heads, tiling.head_dim = head_dim;
    tiling.q_row = query_heads * head_dim, tiling.q_head = head_dim;
    tiling.k = tiling.v = {page_stride, row_stride, head_dim};
    tiling.page = block_tables ? page_size : 0, tiling.max_pages = max_pages;
    tiling.kv_tile = tile, tiling.causal = 1, tiling.scale = scale;
    void* const operands[] = {const_cast<void*>(q), const_cast<void*>(k), const_cast<void*>(v), const_cast<int32_t*>(block_tables),
                              const_cast<int32_t*>(cu_queries), const_cast<int32_t*>(kv_lens), nullptr, out, lse, nullptr};
    const KernelCall call = {operands, &tiling, 1, 1, order, nullptr};
    (dtype == kBf16 ? megatron_ext_attention_bf16_native : megatron_ext_attention_f16_native)(&call);
    return 0;
}

__attribute__((visibility("default"))) int32_t megatron_ext_attention_backward(int32_t dtype, int32_t order, const void* d_o, const void* q, const void* k,
                                                                               const void* v, const void* o, const float* lse, float* dq, float* dk,
                                                                               float* dv, const int32_t* cu_seqlens, Index sequences,
                                                                               Index query_heads, Index key_heads, Index head_dim, Index tile,
                                                                               float scale) {
    if (dtype != kBf16 && dtype != kF16) return 1;
    AttentionTiling tiling{};
    tiling.tokens = cu_seqlens[sequences], tiling.sequences = sequences;
    tiling.query_heads = query_heads, tiling.key_heads = key_heads, tiling.head_dim = head_dim;
    tiling.q_row = query_heads * head_dim, tiling.q_head = head_dim;
    tiling.k = tiling.v = {0, key_heads * head_dim, head_dim};
    tiling.kv_tile = tile, tiling.causal = 1, tiling.scale = scale;
    void* const operands[] = {const_cast<void*>(d_o), const_cast<void*>(q), const_cast<void*>(k), const_cast<void*>(v), const_cast<void*>(o),
                              const_cast<float*>(lse), const_cast<int32_t*>(cu_seqlens), nullptr, dq, dk, dv, nullptr};
    const KernelCall call = {operands, &tiling, 1, 1, order, nullptr};
    (dtype == kBf16 ? megatron_ext_attention_backward_bf16_native : megatron_ext_attention_backward_f16_native)(&call);
    return 0;
}
}
