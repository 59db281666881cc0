// torch.ops.megatron_ext: swiglu and its gradient.
#include <torch/csrc/autograd/custom_function.h>

#include "binding.h"
#include "differentiable.h"
#include "strides.h"
#include "swiglu_tiling.h"

namespace megatron_ext {
namespace {

// What needs no size: meta functions check it too.
void check(const char* op, const at::Tensor& gate_up) {
    check_model_dtype(op, "gate_up", gate_up);
    TORCH_CHECK_VALUE(gate_up.dim() >= 1 && gate_up.sym_size(-1) % 2 == 0, op, ": gate_up must be [..., 2I], gates first; found shape ",
                      gate_up.sym_sizes());
}

c10::SymDimVector activated_sizes(const at::Tensor& gate_up) {
    c10::SymDimVector sizes(gate_up.sym_sizes());
    sizes.back() = sizes.back() / 2;
    return sizes;
}

void check_gradient(const char* op, const at::Tensor& da, const at::Tensor& gate_up) {
    check(op, gate_up);
    check_operand(op, "da", da, gate_up.scalar_type(), gate_up.device());
    TORCH_CHECK_VALUE(da.sym_sizes() == c10::SymIntArrayRef(activated_sizes(gate_up)), op, ": da has shape ", da.sym_sizes(), ", gate_up has shape ",
                      gate_up.sym_sizes());
}

// The rows of gate_up, in place where they are equally spaced, and the tiling to read them.
at::Tensor rows_of(const at::Tensor& gate_up, SwigluTiling& tiling) {
    std::array<Walk, 1> rows;
    const bool regular = walk_rows(gate_up, 0, gate_up.dim() - 1, rows);
    const int64_t length = gate_up.size(-1), width = length / 2, count = gate_up.numel() / length;
    const int64_t columns = std::min((width + 15) / 16 * 16, kSwigluTileElements);
    tiling = {count, width, regular && count > 1 ? rows[0].stride : length, std::clamp(kSwigluTileElements / columns, int64_t(1), kSwigluMaxTileRows), columns};
    return regular ? gate_up : gate_up.contiguous();
}

int64_t blocks_of(const at::Device& device, const SwigluTiling& tiling) {
    const int64_t row_tiles = (tiling.rows + tiling.tile_rows - 1) / tiling.tile_rows;
    const int64_t column_tiles = (tiling.width + tiling.tile_columns - 1) / tiling.tile_columns;
    return vector_blocks(device, row_tiles * column_tiles, tiling.rows * tiling.width);
}

at::Tensor swiglu(const at::Tensor& gate_up) {
    static const ModelDtypeKernels kernels("swiglu");
    check("swiglu", gate_up);
    at::Tensor a = at::empty_symint(activated_sizes(gate_up), gate_up.options());
    if (a.numel() == 0) return a;
    SwigluTiling tiling;
    const at::Tensor rows = rows_of(gate_up, tiling);
    kernels[rows.scalar_type()].run(rows.device(), {data(rows), mutable_data(a)}, &tiling, blocks_of(rows.device(), tiling), Path::kNative);
    return a;
}

at::Tensor swiglu_backward(const at::Tensor& da, const at::Tensor& gate_up) {
    static const ModelDtypeKernels kernels("swiglu_backward");
    check_gradient("swiglu_backward", da, gate_up);
    at::Tensor dgate_up = at::empty(gate_up.sizes(), gate_up.options());
    if (dgate_up.numel() == 0) return dgate_up;
    SwigluTiling tiling;
    const at::Tensor rows = rows_of(gate_up, tiling), dense_da = da.contiguous();
    kernels[rows.scalar_type()].run(rows.device(), {data(dense_da), data(rows), mutable_data(dgate_up)}, &tiling, blocks_of(rows.device(), tiling),
                                    Path::kNative);
    return dgate_up;
}

at::Tensor swiglu_meta(const at::Tensor& gate_up) {
    check("swiglu", gate_up);
    return at::empty_symint(activated_sizes(gate_up), gate_up.options());
}

at::Tensor swiglu_backward_meta(const at::Tensor& da, const at::Tensor& gate_up) {
    check_gradient("swiglu_backward", da, gate_up);
    return at::empty_symint(gate_up.sym_sizes(), gate_up.options());
}

using SwigluSchema = at::Tensor(const at::Tensor&);
using SwigluBackwardSchema = at::Tensor(const at::Tensor&, const at::Tensor&);

struct DifferentiableSwiglu : torch::autograd::Function<DifferentiableSwiglu> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& gate_up) {
        static const auto op = typed_op<SwigluSchema>("swiglu");
        at::AutoDispatchBelowADInplaceOrView below;
        context->save_for_backward({gate_up});
        return op.call(gate_up);
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list da) {
        static const auto op = typed_op<SwigluBackwardSchema>("swiglu_backward");
        return {op.call(da[0], context->get_saved_variables()[0])};
    }
};

at::Tensor swiglu_autograd(const at::Tensor& gate_up) {
    static const auto op = typed_op<SwigluSchema>("swiglu");
    if (needs_gradient(gate_up)) return DifferentiableSwiglu::apply(gate_up);
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(gate_up);
}

void implement(torch::Library& library) {
    library.impl("swiglu", &swiglu);
    library.impl("swiglu_backward", &swiglu_backward);
}

}  // namespace
}  // namespace megatron_ext

TORCH_LIBRARY_FRAGMENT(megatron_ext, library) {
    library.def("swiglu(Tensor gate_up) -> Tensor");
    library.def("swiglu_backward(Tensor da, Tensor gate_up) -> Tensor");
}
TORCH_LIBRARY_IMPL(megatron_ext, Meta, library) {
    library.impl("swiglu", &megatron_ext::swiglu_meta);
    library.impl("swiglu_backward", &megatron_ext::swiglu_backward_meta);
}
TORCH_LIBRARY_IMPL(megatron_ext, Autograd, library) {
    library.impl("swiglu", &megatron_ext::swiglu_autograd);
    megatron_ext::refuse_gradients(library, {"swiglu_backward"});
}
MEGATRON_EXT_IMPLEMENT(megatron_ext::implement)
