// torch.ops.megatron_ext: embedding and embedding_wgrad_. Legend: T tokens, V vocabulary rows of this rank, H hidden.
#include <ATen/ops/max.h>

#include "binding.h"
#include "differentiable.h"
#include "embedding_tiling.h"

namespace megatron_ext {
namespace {

void check_ids(const char* op, const at::Tensor& ids, const at::Device& device) {
    TORCH_CHECK_TYPE(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt, op, ": ids must be int64 or int32, found ", ids.scalar_type());
    check_same_device(op, "ids", ids, device);
}

void check_lookup(const at::Tensor& ids, const at::Tensor& weight) {
    check_model_dtype("embedding", "weight", weight);
    TORCH_CHECK_VALUE(weight.dim() == 2, "embedding: weight must be [V, H], found shape ", weight.sym_sizes());
    check_ids("embedding", ids, weight.device());
}

void check_gradient(const at::Tensor& main_grad, const at::Tensor& ids, const at::Tensor& dy) {
    check_model_dtype("embedding_wgrad_", "dy", dy);
    check_accumulator("embedding_wgrad_", "main_grad", main_grad, dy.device());
    TORCH_CHECK_VALUE(main_grad.dim() == 2, "embedding_wgrad_: main_grad must be [V, H], found shape ", main_grad.sym_sizes());
    check_ids("embedding_wgrad_", ids, dy.device());
    c10::SymDimVector expected(ids.sym_sizes());
    expected.push_back(main_grad.sym_size(1));
    TORCH_CHECK_VALUE(dy.sym_sizes() == c10::SymIntArrayRef(expected), "embedding_wgrad_: dy must be [", ids.sym_sizes(), ", H = ",
                      main_grad.sym_size(1), "], found shape ", dy.sym_sizes());
}

// Dense int64 ids, the largest of which is below `rows`. On a device the check waits for it.
at::Tensor checked_ids(const char* op, const at::Tensor& ids, int64_t rows) {
    const at::Tensor dense = ids.to(at::kLong).contiguous();
    const int64_t* values = dense.const_data_ptr<int64_t>();
    const int64_t largest = dense.is_cpu() ? *std::max_element(values, values + dense.numel()) : dense.max().item<int64_t>();
    TORCH_CHECK_INDEX(largest < rows, op, ": id ", largest, " of ", rows, " rows; ids of other ranks are negative");
    return dense;
}

EmbeddingTiling tiling_of(int64_t tokens, int64_t hidden) {
    return {tokens, hidden, std::min((hidden + 63) / 64 * 64, kEmbeddingMaxTileColumns), 1};
}

at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight) {
    static const Kernel kernel("embedding_b16");
    check_lookup(ids, weight);
    at::DimVector sizes(ids.sizes());
    sizes.push_back(weight.size(1));
    at::Tensor y = at::empty(sizes, weight.options());
    if (y.numel() == 0) return y;
    const at::Tensor dense_ids = checked_ids("embedding", ids, weight.size(0)), dense_weight = weight.contiguous();
    const EmbeddingTiling tiling = tiling_of(ids.numel(), weight.size(1));
    const int64_t pieces = (tiling.tokens + kEmbeddingTokensTogether - 1) / kEmbeddingTokensTogether;
    kernel.run(weight.device(), {data(dense_ids), data(dense_weight), mutable_data(y)}, &tiling, vector_blocks(weight.device(), pieces, y.numel()),
               Path::kNative);
    return y;
}

void embedding_wgrad_(const at::Tensor& main_grad, const at::Tensor& ids, const at::Tensor& dy) {
    static const ModelDtypeKernels kernels("embedding_wgrad");
    check_gradient(main_grad, ids, dy);
    if (dy.numel() == 0) return;
    const at::Tensor dense_ids = checked_ids("embedding_wgrad_", ids, main_grad.size(0)), dense_dy = dy.contiguous();
    EmbeddingTiling tiling = tiling_of(ids.numel(), main_grad.size(1));
    const int64_t column_tiles = (tiling.hidden + tiling.tile_columns - 1) / tiling.tile_columns;
    const int64_t blocks = vector_blocks(dy.device(), column_tiles * main_grad.size(0), dy.numel());
    tiling.owners = std::max<int64_t>(blocks / column_tiles, 1);
    kernels[dy.scalar_type()].run(dy.device(), {data(dense_ids), data(dense_dy), mutable_data(main_grad)}, &tiling, blocks, Path::kNative);
}

at::Tensor embedding_meta(const at::Tensor& ids, const at::Tensor& weight) {
    check_lookup(ids, weight);
    c10::SymDimVector sizes(ids.sym_sizes());
    sizes.push_back(weight.sym_size(1));
    return at::empty_symint(sizes, weight.options());
}

void embedding_wgrad_meta_(const at::Tensor& main_grad, const at::Tensor& ids, const at::Tensor& dy) { check_gradient(main_grad, ids, dy); }

void implement(torch::Library& library) {
    library.impl("embedding", &embedding);
    library.impl("embedding_wgrad_", &embedding_wgrad_);
}

}  // namespace
}  // namespace megatron_ext

TORCH_LIBRARY_FRAGMENT(megatron_ext, library) {
    library.def("embedding(Tensor ids, Tensor weight) -> Tensor");
    library.def("embedding_wgrad_(Tensor(a!) main_grad, Tensor ids, Tensor dy) -> ()");
}
TORCH_LIBRARY_IMPL(megatron_ext, Meta, library) {
    library.impl("embedding", &megatron_ext::embedding_meta);
    library.impl("embedding_wgrad_", &megatron_ext::embedding_wgrad_meta_);
}
TORCH_LIBRARY_IMPL(megatron_ext, Autograd, library) { megatron_ext::refuse_gradients(library, {"embedding", "embedding_wgrad_"}); }
MEGATRON_EXT_IMPLEMENT(megatron_ext::implement)
