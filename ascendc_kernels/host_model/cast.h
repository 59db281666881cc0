// Cast between element types, always with a rounding mode.
#pragma once
#include "deviation.h"
#include "lanes.h"
#include "repeats.h"
#include "rounding.h"

namespace ascendc_host {

// Calls run with the conversion of a mode known at run time.
template <typename To, typename From, typename Run>
inline void with_conversion(RoundMode mode, Site site, Run run) {
    using C = Conversion<To, From>;
    if (!C::allows(mode)) fail("Cast", site, "this pair of types does not take RoundMode %d", int(mode));
    const auto pick = [&](auto tag) {
        constexpr RoundMode kMode = decltype(tag)::value;
        if constexpr (C::allows(kMode)) run([](From x) { return C::template apply<kMode>(x); });
    };
    switch (mode) {
        case RoundMode::CAST_NONE: return pick(std::integral_constant<RoundMode, RoundMode::CAST_NONE>());
        case RoundMode::CAST_RINT: return pick(std::integral_constant<RoundMode, RoundMode::CAST_RINT>());
        case RoundMode::CAST_FLOOR: return pick(std::integral_constant<RoundMode, RoundMode::CAST_FLOOR>());
        case RoundMode::CAST_CEIL: return pick(std::integral_constant<RoundMode, RoundMode::CAST_CEIL>());
        case RoundMode::CAST_ROUND: return pick(std::integral_constant<RoundMode, RoundMode::CAST_ROUND>());
        case RoundMode::CAST_TRUNC: return pick(std::integral_constant<RoundMode, RoundMode::CAST_TRUNC>());
    }
}

// Pairs whose lanes go through fp32: one of the two is a 16-bit float, the other has lanes as well.
template <typename To, typename From>
constexpr bool has_cast_lanes = (is_one_of<To, half, bfloat16_t> && is_one_of<From, float, half, bfloat16_t>) ||
                                (is_one_of<From, half, bfloat16_t> && std::is_same_v<To, float>);

template <typename To, typename From, typename Convert>
inline void cast_flat(To* to, const From* from, uint32_t count, RoundMode mode, Convert convert) {
    uint32_t i = 0;
    if constexpr (has_cast_lanes<To, From>)
        if (mode == RoundMode::CAST_NONE || mode == RoundMode::CAST_RINT)
            for (; i + kLanes <= count; i += kLanes) store_narrow(to + i, load_wide(from + i));
    for (; i < count; ++i) to[i] = convert(from[i]);
    if constexpr (kMayDeviate && std::is_same_v<To, half>)
        for (uint32_t at = 0; at < count; ++at)
            if (deviates(Deviation::cast_saturates) && (to[at].bits & 0x7FFF) == 0x7C00) to[at].bits -= 1;
}

template <typename To, typename From>
constexpr uint32_t kWiderBytes = sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From);

template <typename To, typename From, typename Mask>
inline void cast_repeat(const AscendC::LocalTensor<To>& dst, const AscendC::LocalTensor<From>& src, RoundMode mode, bool set_mask, Mask mask,
                        int64_t repeats, const AscendC::UnaryRepeatParams& p, Site site) {
    const Instruction instruction("Cast", PIPE_V, site);
    const RepeatPlan plan = plan_mask(instruction, set_mask, kWiderBytes<To, From>, mask, repeats);
    const Stride d = {p.dstBlkStride, p.dstRepStride}, a = {p.srcBlkStride, p.srcRepStride};
    read_operand(instruction, "src", src, plan, a);
    write_operand(instruction, "dst", dst, plan, d);
    with_conversion<To, From>(mode, site, [&](auto convert) {
        for (uint32_t r = 0; r < plan.repeats; ++r)
            for (uint32_t lane = 0; lane < plan.lanes; ++lane)
                if (plan.mask_of(r).has(lane)) *lane_address(dst.host_data(), d, r, lane) = convert(*lane_address(src.host_data(), a, r, lane));
    });
}

}  // namespace ascendc_host

namespace AscendC {

template <typename T, typename U>
inline void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode, const uint32_t count,
                 ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::Conversion<T, U>::kModelled, "Cast: this pair of data types is not modelled");
    using namespace ascendc_host;
    const Instruction instruction("Cast", PIPE_V, site);
    const RepeatPlan plan = plan_count(instruction, kWiderBytes<T, U>, count);
    read_operand(instruction, "src", src, plan, {1, plan.lanes * uint32_t(sizeof(U)) / kBlockBytes});
    write_operand(instruction, "dst", dst, plan, {1, plan.lanes * uint32_t(sizeof(T)) / kBlockBytes});
    T* to = dst.host_data();
    const U* from = src.host_data();
    const RoundMode mode = roundMode;
    with_conversion<T, U>(mode, site, [=](auto convert) { cast_flat(to, from, count, mode, convert); });
}

template <typename T, typename U, bool isSetMask = true>
inline void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode, const uint64_t mask,
                 const ascendc_host::RepeatTime repeatTime, const UnaryRepeatParams& repeatParams,
                 ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::Conversion<T, U>::kModelled, "Cast: this pair of data types is not modelled");
    ascendc_host::cast_repeat(dst, src, roundMode, isSetMask, mask, repeatTime, repeatParams, site);
}

template <typename T, typename U, bool isSetMask = true>
inline void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode, const uint64_t mask[],
                 const ascendc_host::RepeatTime repeatTime, const UnaryRepeatParams& repeatParams,
                 ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::Conversion<T, U>::kModelled, "Cast: this pair of data types is not modelled");
    ascendc_host::cast_repeat(dst, src, roundMode, isSetMask, mask, repeatTime, repeatParams, site);
}

}  // namespace AscendC
