// Conversions with an explicit rounding mode.
#pragma once
#include <cmath>
#include <limits>

#include "kernel_types.h"

namespace ascendc_host {

using AscendC::RoundMode;

// To the nearest whole number in the direction of the mode.
template <RoundMode mode>
inline float round_whole(float x) {
    if constexpr (mode == RoundMode::CAST_FLOOR) return std::floor(x);
    if constexpr (mode == RoundMode::CAST_CEIL) return std::ceil(x);
    if constexpr (mode == RoundMode::CAST_ROUND) return std::round(x);
    if constexpr (mode == RoundMode::CAST_TRUNC) return std::trunc(x);
    return std::nearbyint(x);  // the rounding mode of the process is nearest even
}

// The neighbour of a 16-bit float in the order of its values; the bits of a sign-magnitude number count away from zero.
template <typename T>
inline T neighbour(T value, bool up) {
    const bool negative = value.bits & 0x8000;
    T result = value;
    if ((value.bits & 0x7FFF) == 0)
        result.bits = up ? 0x0001 : 0x8001;
    else
        result.bits = uint16_t(value.bits + (up != negative ? 1 : -1));
    return result;
}

// fp32 to a 16-bit float. `nearest` is the RINT result; the other modes move to a neighbour where they differ from it.
template <typename T, RoundMode mode>
inline T narrow(float x) {
    const T nearest(x);
    if constexpr (mode == RoundMode::CAST_NONE || mode == RoundMode::CAST_RINT) return nearest;
    const float back(nearest);
    if (back == x || x != x) return nearest;
    const T other = neighbour(nearest, back < x);
    const float other_value(other);
    if constexpr (mode == RoundMode::CAST_ROUND) {  // differs from RINT in ties only
        const bool tie = double(x) - double(back) == double(other_value) - double(x);
        return tie && std::fabs(other_value) > std::fabs(back) ? other : nearest;
    }
    const bool want_lower = mode == RoundMode::CAST_FLOOR || (mode == RoundMode::CAST_TRUNC && x > 0);
    return (back < x) == want_lower ? nearest : other;
}

inline int32_t saturate_int32(float whole) {
    if (whole != whole) return 0;
    if (whole >= 2147483648.0f) return std::numeric_limits<int32_t>::max();
    if (whole < -2147483648.0f) return std::numeric_limits<int32_t>::min();
    return int32_t(whole);
}

inline uint8_t saturate_uint8(float whole) { return whole >= 255.0f ? 255 : whole > 0.0f ? uint8_t(whole) : 0; }

// int32 to fp32: the double is exact, so only its narrowing rounds.
template <RoundMode mode>
inline float widen_int32(int32_t x) {
    const float nearest = float(x);
    if constexpr (mode == RoundMode::CAST_NONE || mode == RoundMode::CAST_RINT) return nearest;
    if (double(nearest) == double(x)) return nearest;
    const float other = std::nextafter(nearest, double(nearest) < double(x) ? HUGE_VALF : -HUGE_VALF);
    if constexpr (mode == RoundMode::CAST_ROUND) {
        const bool tie = double(x) - double(nearest) == double(other) - double(x);
        return tie && std::fabs(other) > std::fabs(nearest) ? other : nearest;
    }
    const bool want_lower = mode == RoundMode::CAST_FLOOR || (mode == RoundMode::CAST_TRUNC && x > 0);
    return (double(nearest) < double(x)) == want_lower ? nearest : other;
}

// Modelled pairs of types and the modes documented for them on A2/A3. No pair, no compilation.
template <typename To, typename From>
struct Conversion {
    static constexpr bool kModelled = false;
};

template <typename To>
struct WideningConversion {
    static constexpr bool kModelled = true;
    static constexpr bool allows(RoundMode mode) { return mode == RoundMode::CAST_NONE; }
    template <RoundMode, typename From>
    static To apply(From x) { return To(x); }
};
template <>
struct Conversion<float, half> : WideningConversion<float> {};
template <>
struct Conversion<float, bfloat16_t> : WideningConversion<float> {};
template <>
struct Conversion<half, uint8_t> : WideningConversion<half> {};

template <>
struct Conversion<half, float> {
    static constexpr bool kModelled = true;
    static constexpr bool allows(RoundMode) { return true; }
    template <RoundMode mode>
    static half apply(float x) { return narrow<half, mode>(x); }
};

template <>
struct Conversion<bfloat16_t, float> {
    static constexpr bool kModelled = true;
    static constexpr bool allows(RoundMode mode) { return mode != RoundMode::CAST_NONE; }
    template <RoundMode mode>
    static bfloat16_t apply(float x) { return narrow<bfloat16_t, mode>(x); }
};

template <>
struct Conversion<int32_t, float> {
    static constexpr bool kModelled = true;
    static constexpr bool allows(RoundMode mode) { return mode != RoundMode::CAST_NONE; }
    template <RoundMode mode>
    static int32_t apply(float x) { return saturate_int32(round_whole<mode>(x)); }
};

template <>
struct Conversion<uint8_t, half> {
    static constexpr bool kModelled = true;
    static constexpr bool allows(RoundMode) { return true; }
    template <RoundMode mode>
    static uint8_t apply(half x) { return saturate_uint8(round_whole<mode>(float(x))); }
};

template <>
struct Conversion<float, int32_t> {
    static constexpr bool kModelled = true;
    static constexpr bool allows(RoundMode) { return true; }
    template <RoundMode mode>
    static float apply(int32_t x) { return widen_int32<mode>(x); }
};

template <>
struct Conversion<float, float> {
    static constexpr bool kModelled = true;
    static constexpr bool allows(RoundMode mode) { return mode != RoundMode::CAST_NONE; }
    template <RoundMode mode>
    static float apply(float x) { return round_whole<mode>(x); }
};

}  // namespace ascendc_host
