// Elementwise vector functions: Add Sub Mul Div Max Min, Adds Muls Maxs, Exp Ln Sqrt, Duplicate.
//
// Lanes are independent, so vectorisation cannot change a bit. half is computed in fp32 and rounded once, which is exact for + - * /.
// An operation takes and gives a scalar or Lanes.
#pragma once
#include <cmath>

#include "deviating.h"
#include "lanes.h"
#include "repeats.h"

namespace ascendc_host {

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, half>, float, T>;

struct AddOp {
    template <typename V>
    V operator()(V a, V b) const { return V(a + b); }
};
struct SubOp {
    template <typename V>
    V operator()(V a, V b) const { return V(a - b); }
};
struct MulOp {
    template <typename V>
    V operator()(V a, V b) const { return V(a * b); }
};
struct DivOp {
    template <typename V>
    V operator()(V a, V b) const { return a / b; }
};
// NaN if either is NaN; which zero max(-0, +0) gives is not documented, here it is the second operand.
struct MaxOp {
    template <typename V>
    V operator()(V a, V b) const { return pick(greater(a, b) | is_nan(a), a, b); }
};
struct MinOp {
    template <typename V>
    V operator()(V a, V b) const { return pick(greater(b, a) | is_nan(a), a, b); }
};

// A function of one lane, on all of them.
template <typename Function>
inline Lanes for_each_lane(Lanes x, Function function) {
    float values[kLanes];
    megatron_ext::store(values, x);
    for (float& value : values) value = function(value);
    return megatron_ext::load(values);
}
struct ExpOp {
    float operator()(float x) const { return megatron_ext::exp_f32(x); }
    Lanes operator()(Lanes x) const { return for_each_lane(x, megatron_ext::exp_f32); }
};
struct LnOp {
    float operator()(float x) const { return megatron_ext::log_f32(x); }
    Lanes operator()(Lanes x) const { return for_each_lane(x, megatron_ext::log_f32); }
};
struct SqrtOp {
    float operator()(float x) const { return std::sqrt(x); }
    Lanes operator()(Lanes x) const { return for_each_lane(x, [](float value) { return std::sqrt(value); }); }
};

// An operation of two operands with the second one fixed.
template <typename Op, typename W>
inline auto with_scalar(W scalar) {
    return [scalar](auto x) { return Op()(x, spread_like(x, scalar)); };
}

// dst[i] = op(a[i], b[i]). Operands may be the same tensor: a lane is read before it is written.
template <typename T, typename Op>
inline void apply_flat(T* dst, const T* a, const T* b, uint32_t count, Op op) {
    uint32_t i = 0;
    if constexpr (std::is_same_v<T, half>)  // whose conversions the compiler does not vectorise well
        for (; i + kLanes <= count; i += kLanes) store_narrow(dst + i, op(load_wide(a + i), load_wide(b + i)));
#pragma GCC ivdep
    for (; i < count; ++i) dst[i] = T(op(Wide<T>(a[i]), Wide<T>(b[i])));
}

template <typename T, typename Op>
inline void apply_flat(T* dst, const T* a, uint32_t count, Op op) {
    uint32_t i = 0;
    if constexpr (std::is_same_v<T, half>)
        for (; i + kLanes <= count; i += kLanes) store_narrow(dst + i, op(load_wide(a + i)));
#pragma GCC ivdep
    for (; i < count; ++i) dst[i] = T(op(Wide<T>(a[i])));
}

inline bool is_dense(Stride stride) { return stride.block == 1 && stride.repeat == 8; }

template <typename T>
constexpr bool is_float = std::is_same_v<T, float>;

template <typename T>
constexpr uint32_t kBlockElements = kBlockBytes / sizeof(T);
constexpr uint32_t kBlocksPerRepeat = kRepeatBytes / kBlockBytes;
static_assert(kBlockElements<float> == kLanes && kBlocksPerRepeat == kLanes, "a block of floats is a vector, and a repeat eight of them");

// The blocks of one repeat, all read before the first one is written. get(b): block b of the result; selected(b): its mask.
template <bool masked, typename Get, typename Selected>
inline __attribute__((always_inline)) void store_repeat(float* dst, Stride stride, uint32_t repeat, Get get, Selected selected) {
    Lanes results[kBlocksPerRepeat];
#pragma GCC unroll 8
    for (uint32_t b = 0; b < kBlocksPerRepeat; ++b) results[b] = get(b);
#pragma GCC unroll 8
    for (uint32_t b = 0; b < kBlocksPerRepeat; ++b) {
        float* to = lane_address(dst, stride, repeat, b * kLanes);
        if constexpr (masked)
            megatron_ext::store(to, pick(selected(b), results[b], megatron_ext::load(to)));
        else
            megatron_ext::store(to, results[b]);
    }
}

// dst = op(get(repeat, block)) for every selected lane of floats.
template <typename Get>
inline void store_repeats(float* dst, const RepeatPlan& plan, Stride stride, Get get) {
    if (plan.full()) {
        for (uint32_t r = 0; r < plan.repeats; ++r)
            store_repeat<false>(dst, stride, r, [&](uint32_t b) { return get(r, b); }, nullptr);
        return;
    }
    for (uint32_t r = 0; r < plan.repeats; ++r) {
        const LaneMask mask = plan.mask_of(r);
        store_repeat<true>(dst, stride, r, [&](uint32_t b) { return get(r, b); },
                           [&](uint32_t b) { return lanes_of(mask.block(b * kLanes, kLanes)); });
    }
}

// The selected lanes of other types, in blocks: all blocks of a repeat are read before the first one is written.
template <typename T, typename Op>
inline void apply_blocks(T* dst, const T* a, const T* b, const RepeatPlan& plan, Stride dst_stride, Stride a_stride, Stride b_stride, Op op) {
    constexpr uint32_t kElements = kBlockElements<T>;
    for (uint32_t r = 0; r < plan.repeats; ++r) {
        T results[kRepeatBytes / sizeof(T)];
        for (uint32_t first = 0; first < plan.lanes; first += kElements)
            apply_flat(results + first, lane_address(a, a_stride, r, first), lane_address(b, b_stride, r, first), kElements, op);
        for (uint32_t first = 0; first < plan.lanes; first += kElements) {
            T* to = lane_address(dst, dst_stride, r, first);
            const uint32_t bits = plan.mask_of(r).block(first, kElements);
            for (uint32_t l = 0; l < kElements; ++l) to[l] = bits >> l & 1 ? results[first + l] : to[l];
        }
    }
}

template <typename T, typename Op>
inline void apply_binary(T* dst, const T* a, const T* b, const RepeatPlan& plan, Stride dst_stride, Stride a_stride, Stride b_stride, Op op) {
    if (plan.full() && is_dense(dst_stride) && is_dense(a_stride) && is_dense(b_stride))
        return apply_flat(dst, a, b, plan.repeats * plan.lanes, op);
    if constexpr (is_float<T>)
        store_repeats(dst, plan, dst_stride, [=](uint32_t r, uint32_t block) {
            return op(load_wide(lane_address(a, a_stride, r, block * kLanes)), load_wide(lane_address(b, b_stride, r, block * kLanes)));
        });
    else
        apply_blocks(dst, a, b, plan, dst_stride, a_stride, b_stride, op);
}

template <typename T, typename Op>
inline void apply_unary(T* dst, const T* a, const RepeatPlan& plan, Stride dst_stride, Stride a_stride, Op op) {
    if (plan.full() && is_dense(dst_stride) && is_dense(a_stride)) return apply_flat(dst, a, plan.repeats * plan.lanes, op);
    if constexpr (is_float<T>)
        store_repeats(dst, plan, dst_stride,
                      [=](uint32_t r, uint32_t block) { return op(load_wide(lane_address(a, a_stride, r, block * kLanes))); });
    else
        apply_blocks(dst, a, a, plan, dst_stride, a_stride, a_stride, [op](auto x, auto) { return op(x); });
}

template <typename T, typename Op>
inline void binary_count(const char* name, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src0,
                         const AscendC::LocalTensor<T>& src1, int32_t count, Site site, Op op) {
    const Instruction instruction(name, PIPE_V, site);
    const RepeatPlan plan = plan_count(instruction, sizeof(T), count);
    read_operand(instruction, "src0", src0, plan);
    read_operand(instruction, "src1", src1, plan);
    write_operand(instruction, "dst", dst, plan);
    apply_flat(dst.host_data(), src0.host_data(), src1.host_data(), uint32_t(count), op);
    if constexpr (kMayDeviate && std::is_same_v<T, float>) deviate_results(name, dst.host_data(), uint32_t(count));
}

template <typename T, typename Op, typename Mask>
inline void binary_repeat(const char* name, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src0,
                          const AscendC::LocalTensor<T>& src1, bool set_mask, Mask mask, int64_t repeats,
                          const AscendC::BinaryRepeatParams& p, Site site, Op op) {
    const Instruction instruction(name, PIPE_V, site);
    const RepeatPlan plan = plan_mask(instruction, set_mask, sizeof(T), mask, repeats);
    const Stride d = {p.dstBlkStride, p.dstRepStride}, a = {p.src0BlkStride, p.src0RepStride}, b = {p.src1BlkStride, p.src1RepStride};
    read_operand(instruction, "src0", src0, plan, a);
    read_operand(instruction, "src1", src1, plan, b);
    write_operand(instruction, "dst", dst, plan, d);
    apply_binary(dst.host_data(), src0.host_data(), src1.host_data(), plan, d, a, b, op);
}

template <typename T, typename Op>
inline void unary_count(const char* name, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src, int32_t count, Site site,
                        Op op) {
    const Instruction instruction(name, PIPE_V, site);
    const RepeatPlan plan = plan_count(instruction, sizeof(T), count);
    read_operand(instruction, "src", src, plan);
    write_operand(instruction, "dst", dst, plan);
    apply_flat(dst.host_data(), src.host_data(), uint32_t(count), op);
    if constexpr (kMayDeviate && std::is_same_v<T, float>) deviate_results(name, dst.host_data(), uint32_t(count));
}

template <typename T, typename Op, typename Mask>
inline void unary_repeat(const char* name, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src, bool set_mask, Mask mask,
                         int64_t repeats, const AscendC::UnaryRepeatParams& p, Site site, Op op) {
    const Instruction instruction(name, PIPE_V, site);
    const RepeatPlan plan = plan_mask(instruction, set_mask, sizeof(T), mask, repeats);
    const Stride d = {p.dstBlkStride, p.dstRepStride}, a = {p.srcBlkStride, p.srcRepStride};
    read_operand(instruction, "src", src, plan, a);
    write_operand(instruction, "dst", dst, plan, d);
    apply_unary(dst.host_data(), src.host_data(), plan, d, a, op);
}

template <typename T>
constexpr bool is_arithmetic_element = is_one_of<T, float, half, int32_t, int16_t>;
template <typename T>
constexpr bool is_floating_element = is_one_of<T, float, half>;

}  // namespace ascendc_host

namespace AscendC {

// Three forms each: count; mask and repeats; mask bits and repeats.
#define ASCENDC_HOST_BINARY(NAME, ALLOWED)                                                                                              \
    template <typename T>                                                                                                               \
    inline void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count,           \
                     ascendc_host::Site site = ascendc_host::Site::here()) {                                                            \
        static_assert(ascendc_host::ALLOWED<T>, #NAME ": this data type is not modelled");                                              \
        ascendc_host::binary_count(#NAME, dst, src0, src1, count, site, ascendc_host::NAME##Op());                                      \
    }                                                                                                                                   \
    template <typename T, bool isSetMask = true>                                                                                        \
    inline void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask,                  \
                     const ascendc_host::RepeatTime repeatTime, const BinaryRepeatParams& repeatParams,                                 \
                     ascendc_host::Site site = ascendc_host::Site::here()) {                                                            \
        static_assert(ascendc_host::ALLOWED<T>, #NAME ": this data type is not modelled");                                              \
        ascendc_host::binary_repeat(#NAME, dst, src0, src1, isSetMask, mask, repeatTime, repeatParams, site, ascendc_host::NAME##Op()); \
    }                                                                                                                                   \
    template <typename T, bool isSetMask = true>                                                                                        \
    inline void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask[],                \
                     const ascendc_host::RepeatTime repeatTime, const BinaryRepeatParams& repeatParams,                                 \
                     ascendc_host::Site site = ascendc_host::Site::here()) {                                                            \
        static_assert(ascendc_host::ALLOWED<T>, #NAME ": this data type is not modelled");                                              \
        const uint64_t* bits = mask;                                                                                                    \
        ascendc_host::binary_repeat(#NAME, dst, src0, src1, isSetMask, bits, repeatTime, repeatParams, site, ascendc_host::NAME##Op()); \
    }

ASCENDC_HOST_BINARY(Add, is_arithmetic_element)
ASCENDC_HOST_BINARY(Sub, is_arithmetic_element)
ASCENDC_HOST_BINARY(Mul, is_arithmetic_element)
ASCENDC_HOST_BINARY(Div, is_floating_element)
ASCENDC_HOST_BINARY(Max, is_arithmetic_element)
ASCENDC_HOST_BINARY(Min, is_arithmetic_element)
#undef ASCENDC_HOST_BINARY

#define ASCENDC_HOST_UNARY(NAME)                                                                                             \
    template <typename T>                                                                                                    \
    inline void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count,                             \
                     ascendc_host::Site site = ascendc_host::Site::here()) {                                                 \
        static_assert(ascendc_host::is_float<T>, #NAME ": this data type is not modelled");                                  \
        ascendc_host::unary_count(#NAME, dst, src, count, site, ascendc_host::NAME##Op());                                   \
    }                                                                                                                        \
    template <typename T, bool isSetMask = true>                                                                             \
    inline void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint64_t mask,                                    \
                     const ascendc_host::RepeatTime repeatTime, const UnaryRepeatParams& repeatParams,                       \
                     ascendc_host::Site site = ascendc_host::Site::here()) {                                                 \
        static_assert(ascendc_host::is_float<T>, #NAME ": this data type is not modelled");                                  \
        ascendc_host::unary_repeat(#NAME, dst, src, isSetMask, mask, repeatTime, repeatParams, site, ascendc_host::NAME##Op()); \
    }                                                                                                                        \
    template <typename T, bool isSetMask = true>                                                                             \
    inline void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint64_t mask[],                                  \
                     const ascendc_host::RepeatTime repeatTime, const UnaryRepeatParams& repeatParams,                       \
                     ascendc_host::Site site = ascendc_host::Site::here()) {                                                 \
        static_assert(ascendc_host::is_float<T>, #NAME ": this data type is not modelled");                                  \
        const uint64_t* bits = mask;                                                                                         \
        ascendc_host::unary_repeat(#NAME, dst, src, isSetMask, bits, repeatTime, repeatParams, site, ascendc_host::NAME##Op()); \
    }

ASCENDC_HOST_UNARY(Exp)
ASCENDC_HOST_UNARY(Ln)
ASCENDC_HOST_UNARY(Sqrt)
#undef ASCENDC_HOST_UNARY

#define ASCENDC_HOST_SCALAR(NAME, OP)                                                                                        \
    template <typename T>                                                                                                    \
    inline void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, const int32_t& count,       \
                     ascendc_host::Site site = ascendc_host::Site::here()) {                                                 \
        static_assert(ascendc_host::is_arithmetic_element<T>, #NAME ": this data type is not modelled");                     \
        const ascendc_host::Wide<T> scalar(scalarValue);                                                                     \
        const auto op = ascendc_host::with_scalar<ascendc_host::OP>(scalar);                                                 \
        ascendc_host::unary_count(#NAME, dst, src, count, site, op);                                                         \
    }                                                                                                                        \
    template <typename T, bool isSetMask = true>                                                                             \
    inline void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, uint64_t mask,              \
                     const ascendc_host::RepeatTime repeatTime, const UnaryRepeatParams& repeatParams,                       \
                     ascendc_host::Site site = ascendc_host::Site::here()) {                                                 \
        static_assert(ascendc_host::is_arithmetic_element<T>, #NAME ": this data type is not modelled");                     \
        const ascendc_host::Wide<T> scalar(scalarValue);                                                                     \
        const auto op = ascendc_host::with_scalar<ascendc_host::OP>(scalar);                                                 \
        ascendc_host::unary_repeat(#NAME, dst, src, isSetMask, mask, repeatTime, repeatParams, site, op);                    \
    }                                                                                                                        \
    template <typename T, bool isSetMask = true>                                                                             \
    inline void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, uint64_t mask[],            \
                     const ascendc_host::RepeatTime repeatTime, const UnaryRepeatParams& repeatParams,                       \
                     ascendc_host::Site site = ascendc_host::Site::here()) {                                                 \
        static_assert(ascendc_host::is_arithmetic_element<T>, #NAME ": this data type is not modelled");                     \
        const uint64_t* bits = mask;                                                                                         \
        const ascendc_host::Wide<T> scalar(scalarValue);                                                                     \
        const auto op = ascendc_host::with_scalar<ascendc_host::OP>(scalar);                                                 \
        ascendc_host::unary_repeat(#NAME, dst, src, isSetMask, bits, repeatTime, repeatParams, site, op);                    \
    }

ASCENDC_HOST_SCALAR(Adds, AddOp)
ASCENDC_HOST_SCALAR(Muls, MulOp)
ASCENDC_HOST_SCALAR(Maxs, MaxOp)
#undef ASCENDC_HOST_SCALAR

}  // namespace AscendC

namespace ascendc_host {

template <typename T>
constexpr bool is_plain_element = is_one_of<T, float, half, bfloat16_t, int32_t, uint32_t, int16_t, uint16_t>;

template <typename T, typename Mask>
inline void duplicate_repeat(const AscendC::LocalTensor<T>& dst, T value, bool set_mask, Mask mask, int64_t repeats, Stride stride, Site site) {
    const Instruction instruction("Duplicate", PIPE_V, site);
    const RepeatPlan plan = plan_mask(instruction, set_mask, sizeof(T), mask, repeats);
    write_operand(instruction, "dst", dst, plan, stride);
    for (uint32_t r = 0; r < plan.repeats; ++r)
        for (uint32_t lane = 0; lane < plan.lanes; ++lane)
            if (plan.mask_of(r).has(lane)) *lane_address(dst.host_data(), stride, r, lane) = value;
}

}  // namespace ascendc_host

namespace AscendC {

template <typename T>
inline void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, const int32_t& count,
                      ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::is_plain_element<T>, "Duplicate: this data type is not modelled");
    const ascendc_host::Instruction instruction("Duplicate", PIPE_V, site);
    ascendc_host::write_operand(instruction, "dst", dst, ascendc_host::plan_count(instruction, sizeof(T), count));
    const T value = scalarValue;
    for (int32_t i = 0; i < count; ++i) dst.host_data()[i] = value;
}

template <typename T, bool isSetMask = true>
inline void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, uint64_t mask, const ascendc_host::RepeatTime repeatTime,
                      const uint16_t dstBlockStride, const uint8_t dstRepeatStride, ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::is_plain_element<T>, "Duplicate: this data type is not modelled");
    ascendc_host::duplicate_repeat(dst, scalarValue, isSetMask, mask, repeatTime, {dstBlockStride, dstRepeatStride}, site);
}

template <typename T, bool isSetMask = true>
inline void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, uint64_t mask[], const ascendc_host::RepeatTime repeatTime,
                      const uint16_t dstBlockStride, const uint8_t dstRepeatStride, ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::is_plain_element<T>, "Duplicate: this data type is not modelled");
    const uint64_t* bits = mask;
    ascendc_host::duplicate_repeat(dst, scalarValue, isSetMask, bits, repeatTime, {dstBlockStride, dstRepeatStride}, site);
}

}  // namespace AscendC
