// torch.ops.megatron_ext.ordered_sum
#include "binding.h"
#include "differentiable.h"
#include "ordered_sum_tiling.h"

namespace megatron_ext {
namespace {

const char* const kOp = "ordered_sum";

const Kernel& kernel_for(at::ScalarType out) {
    static const Kernel f32("ordered_sum_f32");
    static const ModelDtypeKernels rounded("ordered_sum");
    return out == at::kFloat ? f32 : rounded[out];
}

at::ScalarType out_dtype(const at::Tensor& parts, std::optional<at::ScalarType> dtype) {
    const at::ScalarType out = dtype.value_or(parts.scalar_type());
    TORCH_CHECK_TYPE(out == at::kFloat || is_model_dtype(out), kOp, ": dtype must be float32, bfloat16 or float16, found ", out);
    return out;
}

at::Tensor ordered_sum(const at::Tensor& parts, std::optional<at::ScalarType> dtype) {
    check_same_dtype(kOp, "parts", parts, at::kFloat);
    TORCH_CHECK_VALUE(parts.dim() >= 1, kOp, ": parts must have a first dimension of parts, found a scalar");
    const int64_t count = parts.size(0);
    TORCH_CHECK_VALUE(count > 0 && (count & (count - 1)) == 0 && count <= kOrderedSumMaxParts, kOp, ": a tree needs a power of two of parts, at most ",
                      kOrderedSumMaxParts, ", found ", count);
    const at::Tensor dense = parts.contiguous();
    const int64_t size = parts.numel() / count;
    const at::Tensor sum = at::empty(parts.sizes().slice(1), parts.options().dtype(out_dtype(parts, dtype)));
    if (size == 0) return sum;
    const int64_t tile = std::min(kOrderedSumMaxTile, kOrderedSumUbElements / count);
    const OrderedSumTiling tiling = {count, size, tile};
    kernel_for(sum.scalar_type()).run(parts.device(), {data(dense), mutable_data(sum)}, &tiling,
                                      vector_blocks(parts.device(), (size + tile - 1) / tile, count * size), Path::kNative);
    return sum;
}

at::Tensor ordered_sum_meta(const at::Tensor& parts, std::optional<at::ScalarType> dtype) {
    return at::empty_symint(parts.sym_sizes().slice(1), parts.options().dtype(out_dtype(parts, dtype)));
}

void implement(torch::Library& library) { library.impl("ordered_sum", &ordered_sum); }

}  // namespace
}  // namespace megatron_ext

TORCH_LIBRARY_FRAGMENT(megatron_ext, library) { library.def("ordered_sum(Tensor parts, ScalarType? dtype=None) -> Tensor"); }
TORCH_LIBRARY_IMPL(megatron_ext, Meta, library) { library.impl("ordered_sum", &megatron_ext::ordered_sum_meta); }
TORCH_LIBRARY_IMPL(megatron_ext, Autograd, library) { megatron_ext::refuse_gradients(library, {"ordered_sum"}); }
MEGATRON_EXT_IMPLEMENT(megatron_ext::implement)
