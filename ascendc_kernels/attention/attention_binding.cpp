// torch.ops.megatron_ext: attention_varlen, attention_paged, attention_backward. Legend: T tokens, B sequences, D head size.
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "attention_tiling.h"
#include "binding.h"
#include "differentiable.h"

namespace megatron_ext {
namespace {

using Size = std::optional<int64_t>;

// What decides the order and the visible keys of a call.
struct Settings {
    double scale;
    int64_t kv_tile, mmad_order;
    bool causal;
    Size window, kv_split;
};

// ---- checks of shapes and settings: for meta tensors too

void check_settings(const char* op, const Settings& settings) {
    TORCH_CHECK_VALUE(settings.scale > 0 && std::isfinite(settings.scale), op, ": scale must be positive and finite, found ", settings.scale);
    TORCH_CHECK_VALUE(settings.kv_tile == 64 || settings.kv_tile == kAttentionMaxTile, op, ": kv_tile must be 64 or ", kAttentionMaxTile, ", found ",
                      settings.kv_tile);
    TORCH_CHECK_VALUE(!settings.window || *settings.window > 0, op, ": window must be at least one key, found ", settings.window.value_or(0));
    TORCH_CHECK_VALUE(!settings.window || settings.causal, op, ": a window needs causal=True: it ends at the row's own position");
    TORCH_CHECK_VALUE(!settings.kv_split || (*settings.kv_split > 0 && *settings.kv_split % settings.kv_tile == 0), op,
                      ": kv_split must be a multiple of kv_tile=", settings.kv_tile, ", found ", settings.kv_split.value_or(0));
}

// q [T, Hq, D]; keys and values [..., Hkv, D].
void check_heads(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t key_dims) {
    check_model_dtype(op, "q", q);
    check_operand(op, "k", k, q.scalar_type(), q.device());
    check_operand(op, "v", v, q.scalar_type(), q.device());
    TORCH_CHECK_VALUE(q.dim() == 3, op, ": q must be [T, heads, D], found shape ", q.sym_sizes());
    TORCH_CHECK_VALUE(k.dim() == key_dims && k.sym_sizes() == v.sym_sizes(), op, ": k and v must have the same ", key_dims,
                      " dimensions, found shapes ", k.sym_sizes(), " and ", v.sym_sizes());
    TORCH_CHECK_VALUE(q.sym_size(2) == k.sym_size(-1), op, ": the head size of q is ", q.sym_size(2), ", that of k ", k.sym_size(-1));
    const int64_t dim = q.size(2), heads = q.size(1), key_heads = k.size(-2);
    TORCH_CHECK_VALUE(dim >= 16 && dim <= kAttentionMaxHeadDim && dim % 16 == 0, op, ": the head size must be a multiple of 16 up to ",
                      kAttentionMaxHeadDim, ", found ", dim);
    TORCH_CHECK_VALUE(key_heads > 0 && heads > 0 && heads % key_heads == 0 && heads / key_heads <= kAttentionMaxGroup, op, ": ", heads,
                      " query heads must be a multiple of ", key_heads, " key heads, at most ", kAttentionMaxGroup, " for each");
}

void check_indices(const char* op, const char* name, const at::Tensor& tensor, int64_t dims, const at::Device& device) {
    check_operand(op, name, tensor, at::kInt, device);
    TORCH_CHECK_VALUE(tensor.dim() == dims, op, ": ", name, " must have ", dims, " dimension(s), found shape ", tensor.sym_sizes());
}

// ---- checks of values, which only a CPU can read without waiting

void check_offsets(const char* op, const char* name, const at::Tensor& offsets, int64_t rows) {
    TORCH_CHECK_VALUE(offsets.size(0) >= 1, op, ": ", name, " must hold at least one offset");
    if (!offsets.device().is_cpu()) return;
    const int32_t* at = offsets.const_data_ptr<int32_t>();
    const int64_t last = offsets.size(0) - 1;
    TORCH_CHECK_VALUE(at[0] == 0 && at[last] == rows, op, ": ", name, " must start at 0 and end at the ", rows, " rows of q, found ", at[0], " and ",
                      at[last]);
    for (int64_t b = 0; b < last; ++b)
        TORCH_CHECK_VALUE(at[b] <= at[b + 1], op, ": ", name, " must not decrease, found ", at[b], " before ", at[b + 1], " at ", b);
}

void check_pages(const char* op, const at::Tensor& tables, const at::Tensor& cu_query_lens, const at::Tensor& kv_lens, int64_t page, int64_t pages) {
    if (!kv_lens.device().is_cpu()) return;
    const int32_t *cu = cu_query_lens.const_data_ptr<int32_t>(), *lens = kv_lens.const_data_ptr<int32_t>(), *table = tables.const_data_ptr<int32_t>();
    for (int64_t b = 0; b < kv_lens.size(0); ++b) {
        TORCH_CHECK_VALUE(lens[b] >= cu[b + 1] - cu[b], op, ": sequence ", b, " has ", cu[b + 1] - cu[b], " queries but kv_lens says ", lens[b],
                          " keys");
        const int64_t needed = cu[b + 1] == cu[b] ? 0 : (lens[b] + page - 1) / page;
        TORCH_CHECK_VALUE(needed <= tables.size(1), op, ": sequence ", b, " needs ", needed, " pages, block_tables has ", tables.size(1), " columns");
        for (int64_t p = 0; p < needed; ++p) {
            const int32_t found = table[b * tables.size(1) + p];
            TORCH_CHECK_VALUE(found >= 0 && found < pages, op, ": page ", p, " of sequence ", b, " is block ", found, ", the cache has ", pages);
        }
    }
}

// ---- one call

// Rows that the kernels can address; anything else is copied.
at::Tensor regular(const at::Tensor& x) {
    const int64_t rows = x.dim() - 3, heads = x.dim() - 2;
    const bool fits = x.stride(-1) == 1 && x.stride(rows) <= kNd2NzMaxStride && x.stride(heads) % 16 == 0 && x.stride(rows) % 16 == 0;
    return fits && x.stride(rows) > 0 && x.stride(heads) > 0 ? x : x.contiguous();
}

KeyStrides strides_of(const at::Tensor& x) { return {x.dim() == 4 ? x.stride(0) : 0, x.stride(-3), x.stride(-2)}; }

AttentionTiling tiling_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t sequences, const Settings& settings) {
    AttentionTiling tiling{};
    tiling.tokens = q.size(0), tiling.query_heads = q.size(1), tiling.head_dim = q.size(2);
    tiling.sequences = sequences, tiling.key_heads = k.size(-2);
    tiling.q_row = q.stride(0), tiling.q_head = q.stride(1);
    tiling.k = strides_of(k), tiling.v = strides_of(v);
    tiling.kv_tile = settings.kv_tile, tiling.kv_split = settings.kv_split.value_or(0), tiling.window = settings.window.value_or(0);
    tiling.causal = settings.causal;
    tiling.tile_rows = tiling.head_dim <= kAttentionWideHead ? kAttentionMaxTile : kAttentionMaxTile / 2;
    tiling.block_bytes = attention_block_bytes(tiling);
    tiling.scale = float(settings.scale);
    return tiling;
}

// A tile of zeros, which pads what the kernels load. Standing memory on a CPU, where a decode call is short.
struct Zeros {
    at::Tensor owner;
    const void* at;

    Zeros(int64_t dim, const at::TensorOptions& options) {
        alignas(64) static const uint16_t zeros[kAttentionMaxTile * kAttentionMaxHeadDim] = {};
        if (!options.device().is_cpu()) owner = at::zeros({kAttentionMaxTile, dim}, options);
        at = owner.defined() ? data(owner) : zeros;
    }
};

// Query tiles of all sequences and key heads: at most one more per sequence than the rows fill.
int64_t tiles_at_most(const AttentionTiling& tiling) {
    const int64_t group = tiling.query_heads / tiling.key_heads, queries = tiling.tile_rows / group;
    return (tiling.tokens / queries + tiling.sequences) * tiling.key_heads;
}

std::tuple<at::Tensor, at::Tensor> run_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor* block_tables,
                                               const at::Tensor& cu_query_lens, const at::Tensor* kv_lens, const AttentionTiling& tiling,
                                               int64_t mmad_order) {
    static const ModelDtypeKernels kernels("attention");
    const at::Tensor out = at::empty(q.sizes(), q.options());
    const at::Tensor lse = at::empty(q.sizes().slice(0, 2), q.options().dtype(at::kFloat));
    if (q.numel() == 0) return {out, lse};
    const Zeros zeros(tiling.head_dim, q.options());
    const int64_t blocks = cube_blocks(q.device(), tiles_at_most(tiling), tiling.tokens * tiling.query_heads * tiling.head_dim * kAttentionMaxTile);
    const at::Tensor workspace = at::empty({blocks * tiling.block_bytes}, q.options().dtype(at::kByte));
    const void *tables = block_tables ? data(*block_tables) : nullptr, *lens = kv_lens ? data(*kv_lens) : nullptr;
    kernels[q.scalar_type()].run(q.device(),
                                 {data(q), data(k), data(v), tables, data(cu_query_lens), lens, zeros.at, mutable_data(out), mutable_data(lse),
                                  mutable_data(workspace)},
                                 &tiling, blocks, Path::kNative, mmad_order);
    return {out, lse};
}

std::tuple<at::Tensor, at::Tensor> attention_varlen(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_seqlens,
                                                    double scale, int64_t kv_tile, int64_t mmad_order, bool causal, Size window, Size kv_split) {
    const char* const op = "attention_varlen";
    const Settings settings = {scale, kv_tile, mmad_order, causal, window, kv_split};
    check_settings(op, settings);
    check_heads(op, q, k, v, 3);
    check_indices(op, "cu_seqlens", cu_seqlens, 1, q.device());
    TORCH_CHECK_VALUE(q.size(0) == k.size(0), op, ": q has ", q.size(0), " rows, k has ", k.size(0));
    const at::Tensor offsets = cu_seqlens.contiguous(), rows = regular(q), keys = regular(k), values = regular(v);
    check_offsets(op, "cu_seqlens", offsets, q.size(0));
    return run_forward(rows, keys, values, nullptr, offsets, nullptr, tiling_of(rows, keys, values, offsets.size(0) - 1, settings), mmad_order);
}

std::tuple<at::Tensor, at::Tensor> attention_paged(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                                                   const at::Tensor& block_tables, const at::Tensor& cu_query_lens, const at::Tensor& kv_lens,
                                                   double scale, int64_t kv_tile, int64_t mmad_order, bool causal, Size window, Size kv_split) {
    const char* const op = "attention_paged";
    const Settings settings = {scale, kv_tile, mmad_order, causal, window, kv_split};
    check_settings(op, settings);
    check_heads(op, q, k_cache, v_cache, 4);
    check_indices(op, "block_tables", block_tables, 2, q.device());
    check_indices(op, "cu_query_lens", cu_query_lens, 1, q.device());
    check_indices(op, "kv_lens", kv_lens, 1, q.device());
    const int64_t page = k_cache.size(1);
    TORCH_CHECK_VALUE(page > 0 && kv_tile % page == 0, op, ": page size ", page, " does not divide kv_tile=", kv_tile);
    TORCH_CHECK_VALUE(kv_lens.size(0) + 1 == cu_query_lens.size(0) && block_tables.size(0) == kv_lens.size(0), op, ": block_tables has ",
                      block_tables.size(0), " sequences, cu_query_lens ", cu_query_lens.size(0) - 1, ", kv_lens ", kv_lens.size(0));
    for (const at::Tensor& cache : {k_cache, v_cache})  // a cache is never copied
        TORCH_CHECK_VALUE(regular(cache).is_same(cache), op, ": the last dimension of a cache must be dense and rows at most ", kNd2NzMaxStride,
                          " elements apart, found strides ", cache.strides(), "; permute the view to [blocks, page, heads, D]");
    const at::Tensor tables = block_tables.contiguous(), offsets = cu_query_lens.contiguous(), lens = kv_lens.contiguous(), rows = regular(q);
    check_offsets(op, "cu_query_lens", offsets, q.size(0));
    check_pages(op, tables, offsets, lens, page, k_cache.size(0));
    AttentionTiling tiling = tiling_of(rows, k_cache, v_cache, lens.size(0), settings);
    tiling.page = page, tiling.max_pages = tables.size(1);
    return run_forward(rows, k_cache, v_cache, &tables, offsets, &lens, tiling, mmad_order);
}

// fp32 gradients of q, k and v.
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

void check_backward(const char* op, const at::Tensor& d_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                    const at::Tensor& lse, const at::Tensor& cu_seqlens, const Settings& settings) {
    check_settings(op, settings);
    check_heads(op, q, k, v, 3);
    check_operand(op, "d_out", d_out, q.scalar_type(), q.device());
    check_operand(op, "out", out, q.scalar_type(), q.device());
    check_operand(op, "lse", lse, at::kFloat, q.device());
    check_indices(op, "cu_seqlens", cu_seqlens, 1, q.device());
    TORCH_CHECK_VALUE(d_out.sym_sizes() == q.sym_sizes() && out.sym_sizes() == q.sym_sizes(), op, ": q has shape ", q.sym_sizes(), ", d_out ",
                      d_out.sym_sizes(), ", out ", out.sym_sizes());
    TORCH_CHECK_VALUE(lse.sym_sizes() == q.sym_sizes().slice(0, 2), op, ": lse must be [T, heads], found shape ", lse.sym_sizes());
    TORCH_CHECK_VALUE(q.sym_size(0) == k.sym_size(0), op, ": q has ", q.sym_size(0), " rows, k has ", k.sym_size(0));
}

Gradients attention_backward(const at::Tensor& d_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                             const at::Tensor& lse, const at::Tensor& cu_seqlens, double scale, int64_t kv_tile, int64_t mmad_order, bool causal,
                             Size window) {
    static const ModelDtypeKernels kernels("attention_backward");
    const char* const op = "attention_backward";
    const Settings settings = {scale, kv_tile, mmad_order, causal, window, {}};
    check_backward(op, d_out, q, k, v, out, lse, cu_seqlens, settings);
    const at::Tensor offsets = cu_seqlens.contiguous();
    check_offsets(op, "cu_seqlens", offsets, q.size(0));
    const auto fp32 = q.options().dtype(at::kFloat);
    const at::Tensor dq = at::empty(q.sizes(), fp32), dk = at::empty(k.sizes(), fp32), dv = at::empty(v.sizes(), fp32);
    if (q.numel() == 0) return {dq, dk, dv};
    const at::Tensor rows = regular(q), keys = regular(k), values = regular(v), gradient = d_out.contiguous(), output = out.contiguous();
    const at::Tensor dense_lse = lse.contiguous();
    const Zeros zeros(q.size(2), q.options());
    AttentionTiling tiling = tiling_of(rows, keys, values, offsets.size(0) - 1, settings);
    tiling.block_bytes = attention_backward_block_bytes();
    const int64_t pieces = (tiling.tokens / kAttentionBackwardStep + tiling.sequences) * tiling.query_heads;
    const int64_t blocks = cube_blocks(q.device(), pieces, tiling.tokens * tiling.query_heads * tiling.head_dim * kAttentionMaxTile);
    const at::Tensor delta = at::empty(lse.sizes(), fp32), workspace = at::empty({blocks * tiling.block_bytes}, q.options().dtype(at::kByte));
    kernels[q.scalar_type()].run(q.device(),
                                 {data(gradient), data(rows), data(keys), data(values), data(output), data(dense_lse), data(offsets), zeros.at,
                                  mutable_data(dq), mutable_data(dk), mutable_data(dv), mutable_data(delta), mutable_data(workspace)},
                                 &tiling, blocks, Path::kNative, mmad_order);
    return {dq, dk, dv};
}

// ---- shapes for tracing

std::tuple<at::Tensor, at::Tensor> forward_meta(const at::Tensor& q) {
    return {at::empty_symint(q.sym_sizes(), q.options()), at::empty_symint(q.sym_sizes().slice(0, 2), q.options().dtype(at::kFloat))};
}

std::tuple<at::Tensor, at::Tensor> attention_varlen_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor&, double scale,
                                                         int64_t kv_tile, int64_t mmad_order, bool causal, Size window, Size kv_split) {
    check_settings("attention_varlen", {scale, kv_tile, mmad_order, causal, window, kv_split});
    check_heads("attention_varlen", q, k, v, 3);
    return forward_meta(q);
}

std::tuple<at::Tensor, at::Tensor> attention_paged_meta(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache, const at::Tensor&,
                                                        const at::Tensor&, const at::Tensor&, double scale, int64_t kv_tile, int64_t mmad_order,
                                                        bool causal, Size window, Size kv_split) {
    check_settings("attention_paged", {scale, kv_tile, mmad_order, causal, window, kv_split});
    check_heads("attention_paged", q, k_cache, v_cache, 4);
    return forward_meta(q);
}

Gradients attention_backward_meta(const at::Tensor& d_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                                  const at::Tensor& lse, const at::Tensor& cu_seqlens, double scale, int64_t kv_tile, int64_t mmad_order, bool causal,
                                  Size window) {
    check_backward("attention_backward", d_out, q, k, v, out, lse, cu_seqlens, {scale, kv_tile, mmad_order, causal, window, {}});
    const auto fp32 = q.options().dtype(at::kFloat);
    return {at::empty_symint(q.sym_sizes(), fp32), at::empty_symint(k.sym_sizes(), fp32), at::empty_symint(v.sym_sizes(), fp32)};
}

// ---- gradient of attention_varlen

using VarlenSchema = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, double, int64_t,
                                                        int64_t, bool, Size, Size);
using BackwardSchema = Gradients(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                 const at::Tensor&, double, int64_t, int64_t, bool, Size);

struct DifferentiableAttention : torch::autograd::Function<DifferentiableAttention> {
    static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                  const at::Tensor& cu_seqlens, const Settings& settings) {
        static const auto op = typed_op<VarlenSchema>("attention_varlen");
        at::AutoDispatchBelowADInplaceOrView below;
        auto [out, lse] = op.call(q, k, v, cu_seqlens, settings.scale, settings.kv_tile, settings.mmad_order, settings.causal, settings.window,
                                  settings.kv_split);
        context->save_for_backward({q, k, v, out, lse, cu_seqlens});
        context->mark_non_differentiable({lse});
        context->saved_data["scale"] = settings.scale;
        context->saved_data["kv_tile"] = settings.kv_tile;
        context->saved_data["mmad_order"] = settings.mmad_order;
        context->saved_data["causal"] = settings.causal;
        context->saved_data["window"] = settings.window;
        return {out, lse};
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
        static const auto op = typed_op<BackwardSchema>("attention_backward");
        const auto saved = context->get_saved_variables();
        auto& data = context->saved_data;
        const auto [dq, dk, dv] = op.call(gradients[0], saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], data["scale"].toDouble(),
                                          data["kv_tile"].toInt(), data["mmad_order"].toInt(), data["causal"].toBool(),
                                          data["window"].toOptional<int64_t>());
        const auto dtype = saved[0].scalar_type();
        return {dq.to(dtype), dk.to(dtype), dv.to(dtype), at::Tensor(), at::Tensor()};
    }
};

std::tuple<at::Tensor, at::Tensor> attention_varlen_autograd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                             const at::Tensor& cu_seqlens, double scale, int64_t kv_tile, int64_t mmad_order,
                                                             bool causal, Size window, Size kv_split) {
    static const auto op = typed_op<VarlenSchema>("attention_varlen");
    if (needs_gradient(q, k, v)) {
        const auto results = DifferentiableAttention::apply(q, k, v, cu_seqlens, Settings{scale, kv_tile, mmad_order, causal, window, kv_split});
        return {results[0], results[1]};
    }
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(q, k, v, cu_seqlens, scale, kv_tile, mmad_order, causal, window, kv_split);
}

void implement(torch::Library& library) {
    library.impl("attention_varlen", &attention_varlen);
    library.impl("attention_paged", &attention_paged);
    library.impl("attention_backward", &attention_backward);
}

}  // namespace
}  // namespace megatron_ext

TORCH_LIBRARY_FRAGMENT(megatron_ext, library) {
    library.def("attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, float scale, int kv_tile=128, int mmad_order=0, bool causal=True, "
                "int? window=None, int? kv_split=None) -> (Tensor out, Tensor lse)");
    library.def("attention_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor cu_query_lens, Tensor kv_lens, float scale, "
                "int kv_tile=128, int mmad_order=0, bool causal=True, int? window=None, int? kv_split=None) -> (Tensor out, Tensor lse)");
    library.def("attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens, float scale, "
                "int kv_tile=128, int mmad_order=0, bool causal=True, int? window=None) -> (Tensor dq, Tensor dk, Tensor dv)");
}
TORCH_LIBRARY_IMPL(megatron_ext, Meta, library) {
    library.impl("attention_varlen", &megatron_ext::attention_varlen_meta);
    library.impl("attention_paged", &megatron_ext::attention_paged_meta);
    library.impl("attention_backward", &megatron_ext::attention_backward_meta);
}
TORCH_LIBRARY_IMPL(megatron_ext, Autograd, library) {
    library.impl("attention_varlen", &megatron_ext::attention_varlen_autograd);
    megatron_ext::refuse_gradients(library, {"attention_paged", "attention_backward"});
}
MEGATRON_EXT_IMPLEMENT(megatron_ext::implement)
