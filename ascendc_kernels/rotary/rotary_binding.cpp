// torch.ops.megatron_ext: apply_rope and apply_rope_qk. Legend: T positions, D size of a head, r pairs.
#include <torch/csrc/autograd/custom_function.h>

#include "binding.h"
#include "differentiable.h"
#include "rotary_tiling.h"
#include "strides.h"

namespace megatron_ext {
namespace {

void check_table(const char* op, const char* name, const at::Tensor& table, const at::Tensor& x) {
    check_operand(op, name, table, x.scalar_type(), x.device());
    TORCH_CHECK_VALUE(table.dim() == 2 && table.sym_size(0) == x.sym_size(0), op, ": ", name, " must be [T, r] for x [T, ..., D], found shape ",
                      table.sym_sizes(), " for ", x.sym_sizes());
    TORCH_CHECK_VALUE(table.sym_size(1) >= 1 && table.sym_size(1) * 2 <= x.sym_size(-1), op, ": ", name, " has r = ", table.sym_size(1),
                      " columns; 2r must be 2 to D = ", x.sym_size(-1));
}

// What needs no concrete size: meta functions check it too.
void check(const char* op, const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
    check_model_dtype(op, "x", x);
    TORCH_CHECK_VALUE(x.dim() >= 2, op, ": x must be [T, ..., D], found shape ", x.sym_sizes());
    check_table(op, "cos", cos, x);
    check_table(op, "sin", sin, x);
    TORCH_CHECK_VALUE(cos.sym_sizes() == sin.sym_sizes(), op, ": cos has shape ", cos.sym_sizes(), ", sin ", sin.sym_sizes());
}

void check_keys(const char* op, const at::Tensor& q, const at::Tensor& k) {
    check_operand(op, "k", k, q.scalar_type(), q.device());
    TORCH_CHECK_VALUE(k.dim() >= 2 && k.sym_size(0) == q.sym_size(0) && k.sym_size(-1) == q.sym_size(-1), op, ": k has shape ", k.sym_sizes(),
                      ", q has shape ", q.sym_sizes(), "; positions and head size must be equal");
}

void check_head_dim(const char* op, int64_t head_dim) {
    TORCH_CHECK_VALUE(head_dim <= kRotaryMaxHeadDim, op, ": a head may have ", kRotaryMaxHeadDim, " elements (reach of a vector instruction), found ",
                      head_dim);
}

// The heads of x [T, ..., D], read in place where two strides reach them between position and head; otherwise of a copy.
at::Tensor heads_of(const at::Tensor& x, RotaryHeads& heads) {
    std::array<Walk, 2> walks;
    const int64_t last = x.dim() - 1;
    const bool regular = walk_rows(x, 1, last, walks) && (x.size(0) == 1 || x.stride(0) > 0);
    const at::Tensor rows = regular ? x : x.contiguous();
    if (!regular) {
        walks = {};
        walk_rows(rows, 1, last, walks);
    }
    heads = {walks[0].size, walks[1].size, rows.stride(0), walks[0].stride, std::max(walks[1].stride, x.size(last))};
    return rows;
}

// Tables whose rows are dense are read in place.
at::Tensor table_rows(const at::Tensor& table) {
    return table.stride(1) == 1 && table.stride(0) >= table.size(1) ? table : table.contiguous();
}

void set_tiles(RotaryTiling& tiling) {
    const int64_t row = (tiling.head_dim + 15) / 16 * 16, table = (2 * tiling.pairs + 15) / 16 * 16;
    const int64_t heads = std::max(tiling.heads[0].inner, tiling.heads[1].inner);
    tiling.tile_heads = std::clamp<int64_t>(kRotaryTileElements / row, 1, std::min(heads, kRotaryMaxTileRows));
    const int64_t rows = std::min(kRotaryTileElements / (row * tiling.tile_heads), kRotaryMaxTileRows / tiling.tile_heads);
    tiling.tile_positions = std::clamp<int64_t>(std::min(rows, kRotaryTileElements / table), 1, kRotaryMaxTilePositions);
}

// Rotates q and, where given, k, in one launch.
void rotate(const char* op, const at::Tensor& q, const at::Tensor* k, const at::Tensor& cos, const at::Tensor& sin, bool interleaved, at::Tensor& y,
            at::Tensor* rotated_k) {
    static const ModelDtypeKernels kernels("rotary");
    check_head_dim(op, q.size(-1));
    const at::Tensor cos_rows = table_rows(cos), sin_rows = table_rows(sin);
    RotaryTiling tiling{};
    tiling.positions = q.size(0);
    tiling.head_dim = q.size(-1);
    tiling.pairs = cos.size(1);
    tiling.cos_stride = cos_rows.stride(0);
    tiling.sin_stride = sin_rows.stride(0);
    tiling.interleaved = interleaved;
    const at::Tensor queries = heads_of(q, tiling.heads[0]), keys = k ? heads_of(*k, tiling.heads[1]) : at::Tensor();
    set_tiles(tiling);
    const int64_t work = q.numel() + (k ? k->numel() : 0), tiles = (tiling.positions + tiling.tile_positions - 1) / tiling.tile_positions;
    kernels[q.scalar_type()].run(q.device(),
                                 {data(queries), k ? data(keys) : nullptr, data(cos_rows), data(sin_rows), mutable_data(y),
                                  k ? mutable_data(*rotated_k) : nullptr},
                                 &tiling, vector_blocks(q.device(), tiles, work), Path::kNative);
}

at::Tensor apply_rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool interleaved) {
    check("apply_rope", x, cos, sin);
    at::Tensor y = at::empty(x.sizes(), x.options());
    if (x.numel() > 0) rotate("apply_rope", x, nullptr, cos, sin, interleaved, y, nullptr);
    return y;
}

std::tuple<at::Tensor, at::Tensor> apply_rope_qk(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin,
                                                 bool interleaved) {
    check("apply_rope_qk", q, cos, sin);
    check_keys("apply_rope_qk", q, k);
    if (q.numel() == 0 || k.numel() == 0) return {apply_rope(q, cos, sin, interleaved), apply_rope(k, cos, sin, interleaved)};
    at::Tensor rotated_q = at::empty(q.sizes(), q.options()), rotated_k = at::empty(k.sizes(), k.options());
    rotate("apply_rope_qk", q, &k, cos, sin, interleaved, rotated_q, &rotated_k);
    return {rotated_q, rotated_k};
}

at::Tensor apply_rope_meta(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool) {
    check("apply_rope", x, cos, sin);
    return at::empty_symint(x.sym_sizes(), x.options());
}

std::tuple<at::Tensor, at::Tensor> apply_rope_qk_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin, bool) {
    check("apply_rope_qk", q, cos, sin);
    check_keys("apply_rope_qk", q, k);
    return {at::empty_symint(q.sym_sizes(), q.options()), at::empty_symint(k.sym_sizes(), k.options())};
}

using RopeSchema = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, bool);
using RopeQkSchema = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, bool);
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void refuse_table_gradients(const char* op, const at::Tensor& cos, const at::Tensor& sin) {
    TORCH_CHECK_NOT_IMPLEMENTED(!needs_gradient(cos, sin), op, ": cos and sin are constants; there is no gradient for them");
}

// The gradient of a rotation is the rotation back.
struct DifferentiableRope : torch::autograd::Function<DifferentiableRope> {
    static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool interleaved) {
        static const auto op = typed_op<RopeSchema>("apply_rope");
        at::AutoDispatchBelowADInplaceOrView below;
        context->save_for_backward({cos, sin});
        context->saved_data["interleaved"] = interleaved;
        return op.call(x, cos, sin, interleaved);
    }
    static variable_list backward(AutogradContext* context, variable_list dy) {
        static const auto op = typed_op<RopeSchema>("apply_rope");
        const auto saved = context->get_saved_variables();
        return {op.call(dy[0], saved[0], saved[1].neg(), context->saved_data["interleaved"].toBool()), at::Tensor(), at::Tensor(), at::Tensor()};
    }
};

struct DifferentiableRopeQk : torch::autograd::Function<DifferentiableRopeQk> {
    static variable_list forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin,
                                 bool interleaved) {
        static const auto op = typed_op<RopeQkSchema>("apply_rope_qk");
        at::AutoDispatchBelowADInplaceOrView below;
        context->save_for_backward({cos, sin});
        context->saved_data["interleaved"] = interleaved;
        auto [rotated_q, rotated_k] = op.call(q, k, cos, sin, interleaved);
        return {rotated_q, rotated_k};
    }
    static variable_list backward(AutogradContext* context, variable_list dy) {
        static const auto op = typed_op<RopeQkSchema>("apply_rope_qk");
        const auto saved = context->get_saved_variables();
        auto [dq, dk] = op.call(dy[0], dy[1], saved[0], saved[1].neg(), context->saved_data["interleaved"].toBool());
        return {dq, dk, at::Tensor(), at::Tensor(), at::Tensor()};
    }
};

at::Tensor apply_rope_autograd(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool interleaved) {
    static const auto op = typed_op<RopeSchema>("apply_rope");
    refuse_table_gradients("apply_rope", cos, sin);
    if (needs_gradient(x)) return DifferentiableRope::apply(x, cos, sin, interleaved);
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(x, cos, sin, interleaved);
}

std::tuple<at::Tensor, at::Tensor> apply_rope_qk_autograd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin,
                                                          bool interleaved) {
    static const auto op = typed_op<RopeQkSchema>("apply_rope_qk");
    refuse_table_gradients("apply_rope_qk", cos, sin);
    if (needs_gradient(q, k)) {
        const variable_list rotated = DifferentiableRopeQk::apply(q, k, cos, sin, interleaved);
        return {rotated[0], rotated[1]};
    }
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(q, k, cos, sin, interleaved);
}

void implement(torch::Library& library) {
    library.impl("apply_rope", &apply_rope);
    library.impl("apply_rope_qk", &apply_rope_qk);
}

}  // namespace
}  // namespace megatron_ext

TORCH_LIBRARY_FRAGMENT(megatron_ext, library) {
    library.def("apply_rope(Tensor x, Tensor cos, Tensor sin, bool interleaved=False) -> Tensor");
    library.def("apply_rope_qk(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved=False) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(megatron_ext, Meta, library) {
    library.impl("apply_rope", &megatron_ext::apply_rope_meta);
    library.impl("apply_rope_qk", &megatron_ext::apply_rope_qk_meta);
}
TORCH_LIBRARY_IMPL(megatron_ext, Autograd, library) {
    library.impl("apply_rope", &megatron_ext::apply_rope_autograd);
    library.impl("apply_rope_qk", &megatron_ext::apply_rope_qk_autograd);
}
MEGATRON_EXT_IMPLEMENT(megatron_ext::implement)
