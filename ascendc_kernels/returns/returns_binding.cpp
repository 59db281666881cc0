// torch.ops.megatron_ext: gae, discounted_returns, masked_mean, masked_whiten. Legend: N sequences, L tokens.
#include <ATen/ops/div.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include "binding.h"
#include "differentiable.h"
#include "returns_tiling.h"

namespace megatron_ext {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

void check_sequences(const char* op, const char* name, const at::Tensor& x) {
    check_same_dtype(op, name, x, at::kFloat);
    TORCH_CHECK_VALUE(x.dim() == 2, op, ": ", name, " must have shape [N, L], found ", x.sym_sizes());
}

void check_like(const char* op, const char* name, const at::Tensor& tensor, at::ScalarType dtype, const char* like_name, const at::Tensor& like) {
    check_operand(op, name, tensor, dtype, like.device());
    TORCH_CHECK_VALUE(tensor.sym_sizes() == like.sym_sizes(), op, ": ", name, " has shape ", tensor.sym_sizes(), ", ", like_name, " has shape ",
                      like.sym_sizes());
}

void check_factor(const char* op, const char* name, double factor) {
    TORCH_CHECK_VALUE(factor >= 0 && factor <= 1, op, ": ", name, " must be 0 to 1, found ", factor);
}

void check_bootstrap(const char* op, const OptionalTensor& bootstrap, const at::Tensor& rewards) {
    if (!bootstrap) return;
    check_operand(op, "bootstrap", *bootstrap, at::kFloat, rewards.device());
    TORCH_CHECK_VALUE(bootstrap->dim() == 1 && bootstrap->sym_size(0) == rewards.sym_size(0), op, ": bootstrap must have shape [", rewards.sym_size(0),
                      "], one value for each sequence, found ", bootstrap->sym_sizes());
}

// What a scan reads: sequences side by side, so that they are the lanes of a vector. Only bytes move.
at::Tensor time_major(const at::Tensor& x) { return x.t().to(at::kFloat).contiguous(); }
at::Tensor sequence_major(const at::Tensor& x) { return x.t().contiguous(); }

at::Tensor start_of(const OptionalTensor& bootstrap, const at::Tensor& rewards) {
    return bootstrap ? bootstrap->contiguous() : at::zeros({rewards.size(0)}, rewards.options());
}

ScanTiling scan_tiling(const at::Tensor& rewards, double gamma, double lam) {
    const float rounded = float(gamma);
    return {rewards.size(0), rewards.size(1), rounded, rounded * float(lam)};
}

int64_t scan_blocks(const at::Tensor& rewards) {
    return vector_blocks(rewards.device(), (rewards.size(0) + kScanLanes - 1) / kScanLanes, rewards.numel());
}

using Advantages = std::tuple<at::Tensor, at::Tensor>;

void check_gae(const at::Tensor& rewards, const at::Tensor& values, const at::Tensor& mask, double gamma, double lam, const OptionalTensor& bootstrap) {
    check_sequences("gae", "rewards", rewards);
    check_like("gae", "values", values, at::kFloat, "rewards", rewards);
    check_like("gae", "mask", mask, at::kBool, "rewards", rewards);
    check_factor("gae", "gamma", gamma);
    check_factor("gae", "lam", lam);
    check_bootstrap("gae", bootstrap, rewards);
}

Advantages gae(const at::Tensor& rewards, const at::Tensor& values, const at::Tensor& mask, double gamma, double lam, const OptionalTensor& bootstrap) {
    static const Kernel kernel("gae_f32");
    check_gae(rewards, values, mask, gamma, lam, bootstrap);
    if (rewards.numel() == 0) return {at::empty_like(rewards), at::empty_like(rewards)};
    const at::Tensor r = time_major(rewards), v = time_major(values), kept = time_major(mask), start = start_of(bootstrap, rewards);
    const at::Tensor advantages = at::empty_like(r), returns = at::empty_like(r);
    const ScanTiling tiling = scan_tiling(rewards, gamma, lam);
    kernel.run(r.device(), {data(r), data(v), data(kept), data(start), mutable_data(advantages), mutable_data(returns)}, &tiling, scan_blocks(rewards),
               Path::kNative);
    return {sequence_major(advantages), sequence_major(returns)};
}

Advantages gae_meta(const at::Tensor& rewards, const at::Tensor& values, const at::Tensor& mask, double gamma, double lam,
                    const OptionalTensor& bootstrap) {
    check_gae(rewards, values, mask, gamma, lam, bootstrap);
    return {at::empty_symint(rewards.sym_sizes(), rewards.options()), at::empty_symint(rewards.sym_sizes(), rewards.options())};
}

void check_returns(const at::Tensor& rewards, const at::Tensor& mask, double gamma, const OptionalTensor& bootstrap) {
    check_sequences("discounted_returns", "rewards", rewards);
    check_like("discounted_returns", "mask", mask, at::kBool, "rewards", rewards);
    check_factor("discounted_returns", "gamma", gamma);
    check_bootstrap("discounted_returns", bootstrap, rewards);
}

at::Tensor discounted_returns(const at::Tensor& rewards, const at::Tensor& mask, double gamma, const OptionalTensor& bootstrap) {
    static const Kernel kernel("discounted_returns_f32");
    check_returns(rewards, mask, gamma, bootstrap);
    if (rewards.numel() == 0) return at::empty_like(rewards);
    const at::Tensor r = time_major(rewards), kept = time_major(mask), start = start_of(bootstrap, rewards), returns = at::empty_like(r);
    const ScanTiling tiling = scan_tiling(rewards, gamma, 1.0);
    kernel.run(r.device(), {data(r), data(kept), data(start), mutable_data(returns)}, &tiling, scan_blocks(rewards), Path::kNative);
    return sequence_major(returns);
}

at::Tensor discounted_returns_meta(const at::Tensor& rewards, const at::Tensor& mask, double gamma, const OptionalTensor& bootstrap) {
    check_returns(rewards, mask, gamma, bootstrap);
    return at::empty_symint(rewards.sym_sizes(), rewards.options());
}

void check_masked(const char* op, const at::Tensor& x, const at::Tensor& mask) {
    check_sequences(op, "x", x);
    check_like(op, "mask", mask, at::kBool, "x", x);
}

// The tokens that a mask keeps, counted exactly. On a CPU too few of them are refused; on a device, where looking would wait, they give NaN.
at::Tensor count_of(const char* op, const at::Tensor& mask, int64_t least) {
    const at::Tensor count = mask.sum();
    if (count.is_cpu())
        TORCH_CHECK_VALUE(*count.const_data_ptr<int64_t>() >= least, op, ": at least ", least, " tokens are needed, the mask keeps ",
                          *count.const_data_ptr<int64_t>());
    return count;
}

// Dense operands: fp32 [N, L], the mask as 0 and 1; of x, or with a centre of (x - centre)^2 -> a scalar.
at::Tensor masked_sum(const at::Tensor& x, const at::Tensor& kept, const at::Tensor& centre) {
    static const Kernel sums_kernel("masked_sum_f32"), total_kernel("total_f32");
    const at::Tensor sums = at::empty({x.size(0)}, x.options()), total = at::empty({}, x.options());
    const MaskedSumTiling tiling = {x.size(0), x.size(1), centre.defined()};
    sums_kernel.run(x.device(), {data(x), data(kept), centre.defined() ? data(centre) : nullptr, mutable_data(sums)}, &tiling,
                    vector_blocks(x.device(), x.size(0), x.numel()), Path::kNative);
    const TotalTiling rows = {x.size(0)};
    total_kernel.run(x.device(), {data(sums), mutable_data(total)}, &rows, 1, Path::kNative);
    return total;
}

at::Tensor masked_mean(const at::Tensor& x, const at::Tensor& mask) {
    check_masked("masked_mean", x, mask);
    const at::Tensor count = count_of("masked_mean", mask, 1);
    return at::div(masked_sum(x.contiguous(), mask.to(at::kFloat).contiguous(), at::Tensor()), count.to(at::kFloat));
}

at::Tensor masked_mean_meta(const at::Tensor& x, const at::Tensor& mask) {
    check_masked("masked_mean", x, mask);
    return at::empty({}, x.options());
}

void check_whiten(const at::Tensor& x, const at::Tensor& mask, double eps) {
    check_masked("masked_whiten", x, mask);
    TORCH_CHECK_VALUE(eps >= 0, "masked_whiten: eps must be at least 0, found ", eps);
}

at::Tensor masked_whiten(const at::Tensor& x, const at::Tensor& mask, double eps) {
    static const Kernel kernel("whiten_f32");
    check_whiten(x, mask, eps);
    const at::Tensor count = count_of("masked_whiten", mask, 2), dense = x.contiguous(), kept = mask.to(at::kFloat).contiguous();
    const at::Tensor mean = at::div(masked_sum(dense, kept, at::Tensor()), count.to(at::kFloat));
    const at::Tensor variance = at::div(masked_sum(dense, kept, mean), count.sub(1).to(at::kFloat)), y = at::empty_like(dense);
    const WhitenTiling tiling = {dense.numel(), float(eps)};
    const int64_t tiles = (tiling.size + kReturnsTile - 1) / kReturnsTile;
    kernel.run(x.device(), {data(dense), data(kept), data(mean), data(variance), mutable_data(y)}, &tiling,
               vector_blocks(x.device(), tiles, tiling.size), Path::kNative);
    return y;
}

at::Tensor masked_whiten_meta(const at::Tensor& x, const at::Tensor& mask, double eps) {
    check_whiten(x, mask, eps);
    return at::empty_symint(x.sym_sizes(), x.options());
}

void implement(torch::Library& library) {
    library.impl("gae", &gae);
    library.impl("discounted_returns", &discounted_returns);
    library.impl("masked_mean", &masked_mean);
    library.impl("masked_whiten", &masked_whiten);
}

}  // namespace
}  // namespace megatron_ext

TORCH_LIBRARY_FRAGMENT(megatron_ext, library) {
    library.def("gae(Tensor rewards, Tensor values, Tensor mask, float gamma, float lam, Tensor? bootstrap=None) -> (Tensor, Tensor)");
    library.def("discounted_returns(Tensor rewards, Tensor mask, float gamma, Tensor? bootstrap=None) -> Tensor");
    library.def("masked_mean(Tensor x, Tensor mask) -> Tensor");
    library.def("masked_whiten(Tensor x, Tensor mask, float eps=1e-8) -> Tensor");
}
TORCH_LIBRARY_IMPL(megatron_ext, Meta, library) {
    library.impl("gae", &megatron_ext::gae_meta);
    library.impl("discounted_returns", &megatron_ext::discounted_returns_meta);
    library.impl("masked_mean", &megatron_ext::masked_mean_meta);
    library.impl("masked_whiten", &megatron_ext::masked_whiten_meta);
}
TORCH_LIBRARY_IMPL(megatron_ext, Autograd, library) {
    megatron_ext::refuse_gradients(library, {"gae", "discounted_returns", "masked_mean", "masked_whiten"});
}
MEGATRON_EXT_IMPLEMENT(megatron_ext::implement)
