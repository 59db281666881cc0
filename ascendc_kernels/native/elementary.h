// exp and log in fp32 with the bits of reference/elementary.py; model-dtype loads and roundings.
// Built with -ffp-contract=off: every operation below is rounded by itself.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace megatron_ext {

template <typename To, typename From>
inline To bit_cast(From value) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
    To result;
    std::memcpy(&result, &value, sizeof(To));
    return result;
}

struct BFloat16 {
    uint16_t bits;
};

struct Float16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }
inline float to_float(Float16 x) {
    const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7FFF;
    if (magnitude >= 0x7C00) return bit_cast<float>(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
    const float value = bit_cast<float>(magnitude << 13) * 0x1p112f;  // exact: it only moves the exponent bias
    return bit_cast<float>(sign | bit_cast<uint32_t>(value));
}

// Round to nearest, ties to even.
template <typename T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
    return x;
}
template <>
inline BFloat16 from_float<BFloat16>(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return {uint16_t(x != x ? 0x7FC0 : rounded)};
}
template <>
inline Float16 from_float<Float16>(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return {uint16_t(sign | 0x7E00)};
    if (magnitude >= 0x477FF000) return {uint16_t(sign | 0x7C00)};
    if (magnitude < 0x38800000) {  // subnormal: adding 0.5 aligns the last bit, the addition rounds ties to even
        const float shifted = bit_cast<float>(magnitude) + 0.5f;
        return {uint16_t(sign | (bit_cast<uint32_t>(shifted) - 0x3F000000))};
    }
    return {uint16_t(sign | ((magnitude + 0xFFF + ((magnitude >> 13) & 1) - 0x38000000) >> 13))};
}

inline float power_of_two(int32_t n) { return bit_cast<float>(uint32_t(n + 127) << 23); }

inline float exp_f32(float x) {
    constexpr float kLn2Hi = 0.693359375f, kLn2Lo = -2.12194440054690583e-4f, kLog2E = 1.44269504088896341f;
    constexpr float kRoundShift = 12582912.0f;
    float clamped = x > 89.0f ? 89.0f : (x < -104.0f ? -104.0f : x);
    clamped = x == x ? clamped : 0.0f;
    const float n = (clamped * kLog2E + kRoundShift) - kRoundShift;
    const float r = (clamped - n * kLn2Hi) - n * kLn2Lo;
    float p = float(1.0 / 5040);
    p = p * r + float(1.0 / 720);
    p = p * r + float(1.0 / 120);
    p = p * r + float(1.0 / 24);
    p = p * r + float(1.0 / 6);
    p = p * r + 0.5f;
    p = (p * (r * r) + r) + 1.0f;
    const int32_t whole = int32_t(n), half = whole >> 1;
    const float result = (p * power_of_two(half)) * power_of_two(whole - half);
    return x == x ? result : x;
}

inline float log_f32(float x) {
    constexpr float kLn2Hi = 0.693359375f, kLn2Lo = -2.12194440054690583e-4f;
    constexpr int32_t kSqrtHalfBits = 0x3F3504F3;
    const bool tiny = x < 0x1p-126f;
    const int32_t bits = bit_cast<int32_t>(tiny ? x * 0x1p24f : x) - kSqrtHalfBits;
    const float e = float((bits >> 23) - (tiny ? 24 : 0));
    const float f = bit_cast<float>((bits & 0x7FFFFF) + kSqrtHalfBits) - 1.0f;
    const float s = f / (f + 2.0f), z = s * s;
    float p = float(2.0 / 11);
    p = p * z + float(2.0 / 9);
    p = p * z + float(2.0 / 7);
    p = p * z + float(2.0 / 5);
    p = p * z + float(2.0 / 3);
    float result = e * kLn2Hi + (e * kLn2Lo + (s * (p * z) + s * 2.0f));
    if (x == std::numeric_limits<float>::infinity()) result = x;
    if (x == 0.0f) result = -std::numeric_limits<float>::infinity();
    return (x == x && x >= 0.0f) ? result : std::numeric_limits<float>::quiet_NaN();
}

}  // namespace megatron_ext
