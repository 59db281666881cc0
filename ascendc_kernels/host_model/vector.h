// Elementwise vector functions: Add Sub Mul Div Max Min, Adds Muls Maxs, Exp Ln Sqrt, Duplicate.
//
// Lanes are independent, so vectorisation cannot change a bit. half is computed in fp32 and rounded once, which is exact for + - * /.
#pragma once
#include <cmath>

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
    float operator()(float a, float b) const { return a / b; }
};
// NaN if either is NaN; which zero max(-0, +0) gives is not documented, here it is the second operand.
struct MaxOp {
    template <typename V>
    V operator()(V a, V b) const { return a > b || a != a ? a : b; }
};
struct MinOp {
    template <typename V>
    V operator()(V a, V b) const { return a < b || a != a ? a : b; }
};
struct ExpOp {
    float operator()(float x) const { return megatron_ext::exp_f32(x); }
};
struct LnOp {
    float operator()(float x) const { return megatron_ext::log_f32(x); }
};
struct SqrtOp {
    float operator()(float x) const { return std::sqrt(x); }
};

// dst[i] = op(a[i], b[i]). Operands may be the same tensor: a lane is read before it is written.
template <typename T, typename Op>
inline void apply_flat(T* dst, const T* a, const T* b, uint32_t count, Op op) {
#pragma GCC ivdep
    for (uint32_t i = 0; i < count; ++i) dst[i] = T(op(Wide<T>(a[i]), Wide<T>(b[i])));
}

template <typename T, typename Op>
inline void apply_flat(T* dst, const T* a, uint32_t count, Op op) {
#pragma GCC ivdep
    for (uint32_t i = 0; i < count; ++i) dst[i] = T(op(Wide<T>(a[i])));
}

inline bool is_dense(Stride stride) { return stride.block == 1 && stride.repeat == 8; }

template <typename T, typename Op>
inline void apply_block(T* dst, const T* a, const T* b, uint32_t bits, Op op) {
    for (uint32_t l = 0; l < kBlockBytes / sizeof(T); ++l)
        if (bits >> l & 1) dst[l] = T(op(Wide<T>(a[l]), Wide<T>(b[l])));
}

// The lanes of one repeat side by side: where they lie, or copied to `room`.
template <typename T>
inline const T* dense_lanes(const T* src, Stride stride, uint32_t repeat, T* room) {
    constexpr uint32_t kLanes = kBlockBytes / sizeof(T), kBlocks = kRepeatBytes / kBlockBytes;
    const T* first = lane_address(src, stride, repeat, 0);
    if (stride.block == 1) return first;
    for (uint32_t block = 0; block < kBlocks; ++block)
        std::memcpy(room + block * kLanes, first + uint64_t(block) * stride.block * kLanes, kBlockBytes);
    return room;
}

template <typename T>
inline void spread_lanes(T* dst, Stride stride, uint32_t repeat, const T* lanes) {
    constexpr uint32_t kLanes = kBlockBytes / sizeof(T), kBlocks = kRepeatBytes / kBlockBytes;
    T* first = lane_address(dst, stride, repeat, 0);
    for (uint32_t block = 0; block < kBlocks; ++block)
        std::memcpy(first + uint64_t(block) * stride.block * kLanes, lanes + block * kLanes, kBlockBytes);
}

// All lanes of all repeats.
template <typename T, typename Op>
inline void apply_strided(T* dst, const T* a, const T* b, uint32_t repeats, Stride dst_stride, Stride a_stride, Stride b_stride, Op op) {
    constexpr uint32_t kLanes = kRepeatBytes / sizeof(T);
    T x_room[kLanes], y_room[kLanes], z[kLanes];
    for (uint32_t r = 0; r < repeats; ++r) {
        apply_flat(z, dense_lanes(a, a_stride, r, x_room), dense_lanes(b, b_stride, r, y_room), kLanes, op);
        spread_lanes(dst, dst_stride, r, z);
    }
}

template <typename T, typename Op>
inline void apply_binary(T* dst, const T* a, const T* b, const RepeatPlan& plan, Stride dst_stride, Stride a_stride, Stride b_stride, Op op) {
    if (plan.full() && is_dense(dst_stride) && is_dense(a_stride) && is_dense(b_stride))
        return apply_flat(dst, a, b, plan.repeats * plan.lanes, op);
    if (plan.full()) return apply_strided(dst, a, b, plan.repeats, dst_stride, a_stride, b_stride, op);
    constexpr uint32_t kLanes = kBlockBytes / sizeof(T);
    for (uint32_t r = 0; r < plan.repeats; ++r)
        for (uint32_t first = 0; first < plan.lanes; first += kLanes)
            if (const uint32_t bits = plan.mask_of(r).block(first, kLanes))
                apply_block(lane_address(dst, dst_stride, r, first), lane_address(a, a_stride, r, first), lane_address(b, b_stride, r, first),
                            bits, op);
}

template <typename T, typename Op>
inline void apply_unary(T* dst, const T* a, const RepeatPlan& plan, Stride dst_stride, Stride a_stride, Op op) {
    if (plan.full() && is_dense(dst_stride) && is_dense(a_stride)) return apply_flat(dst, a, plan.repeats * plan.lanes, op);
    const auto ignore_second = [op](Wide<T> x, Wide<T>) { return op(x); };
    apply_binary(dst, a, a, plan, dst_stride, a_stride, a_stride, ignore_second);
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
// Bits of half Exp, Ln and Sqrt are not documented.
template <typename T>
constexpr bool is_float = std::is_same_v<T, float>;

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
        const auto op = [scalar](ascendc_host::Wide<T> x) { return ascendc_host::OP()(x, scalar); };                         \
        ascendc_host::unary_count(#NAME, dst, src, count, site, op);                                                         \
    }                                                                                                                        \
    template <typename T, bool isSetMask = true>                                                                             \
    inline void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, uint64_t mask,              \
                     const ascendc_host::RepeatTime repeatTime, const UnaryRepeatParams& repeatParams,                       \
                     ascendc_host::Site site = ascendc_host::Site::here()) {                                                 \
        static_assert(ascendc_host::is_arithmetic_element<T>, #NAME ": this data type is not modelled");                     \
        const ascendc_host::Wide<T> scalar(scalarValue);                                                                     \
        const auto op = [scalar](ascendc_host::Wide<T> x) { return ascendc_host::OP()(x, scalar); };                         \
        ascendc_host::unary_repeat(#NAME, dst, src, isSetMask, mask, repeatTime, repeatParams, site, op);                    \
    }                                                                                                                        \
    template <typename T, bool isSetMask = true>                                                                             \
    inline void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, uint64_t mask[],            \
                     const ascendc_host::RepeatTime repeatTime, const UnaryRepeatParams& repeatParams,                       \
                     ascendc_host::Site site = ascendc_host::Site::here()) {                                                 \
        static_assert(ascendc_host::is_arithmetic_element<T>, #NAME ": this data type is not modelled");                     \
        const uint64_t* bits = mask;                                                                                         \
        const ascendc_host::Wide<T> scalar(scalarValue);                                                                     \
        const auto op = [scalar](ascendc_host::Wide<T> x) { return ascendc_host::OP()(x, scalar); };                         \
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
