// What the softmax operators share: the maximum of a row and exponents of vectors. Lanes are distinct elements; the bits are those of exp_f32.
#pragma once
#include "row_sums.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace megatron_ext {

inline bool any(IntLanes lanes) {
#ifdef __AVX2__
    return _mm256_movemask_ps(__m256(lanes)) != 0;
#else
    int32_t bits = 0;
    for (Index i = 0; i < kLanes; ++i) bits |= lanes[i];
    return bits != 0;
#endif
}

// The larger one, b where either is NaN.
inline Lanes larger(Lanes a, Lanes b) {
#ifdef __AVX2__
    return Lanes(_mm256_max_ps(__m256(a), __m256(b)));
#else
    return a > b ? a : b;
#endif
}

// Lanes where a or b is NaN.
inline IntLanes unordered(Lanes a, Lanes b) {
#ifdef __AVX2__
    return IntLanes(_mm256_cmp_ps(__m256(a), __m256(b), _CMP_UNORD_Q));
#else
    return (a != a) | (b != b);
#endif
}

// exp_f32 of kTogether vectors of x <= 0, -inf and NaN, in place. 2^n is applied as 2^(n + 64), which no such n takes out of the normal
// numbers, so that adding to the exponent is exact, and then 2^-64, which rounds once, as exp_f32 does.
inline void exp_below_zero(Lanes* x) {
    constexpr float kLn2Hi = 0.693359375f, kLn2Lo = -2.12194440054690583e-4f, kLog2E = 1.44269504088896341f;
    constexpr float kRoundShift = 12582912.0f + 64.0f;  // its last bits count whole numbers from 64
    constexpr float kTaylor[] = {float(1.0 / 720), float(1.0 / 120), float(1.0 / 24), float(1.0 / 6), 0.5f};
    Lanes shifted[kTogether], p[kTogether];
    for (Index v = 0; v < kTogether; ++v) x[v] = larger(splat(-104.0f), x[v]);
    for (Index v = 0; v < kTogether; ++v) shifted[v] = x[v] * kLog2E + kRoundShift;
    for (Index v = 0; v < kTogether; ++v) x[v] = (x[v] - (shifted[v] - kRoundShift) * kLn2Hi) - (shifted[v] - kRoundShift) * kLn2Lo;
    for (Index v = 0; v < kTogether; ++v) p[v] = splat(float(1.0 / 5040));
    for (float coefficient : kTaylor)
        for (Index v = 0; v < kTogether; ++v) p[v] = p[v] * x[v] + coefficient;
    for (Index v = 0; v < kTogether; ++v) p[v] = (p[v] * (x[v] * x[v]) + x[v]) + 1.0f;
    for (Index v = 0; v < kTogether; ++v) x[v] = Lanes(IntLanes(p[v]) + (IntLanes(shifted[v]) << 23)) * 0x1p-64f;
}

// The same for any x.
inline void exp_lanes(Lanes* x) {
    IntLanes above = {};
    for (Index v = 0; v < kTogether; ++v) above |= x[v] > 0.0f;
    if (!any(above)) return exp_below_zero(x);
    for (Index v = 0; v < kTogether; ++v)
        for (Index i = 0; i < kLanes; ++i) x[v][i] = exp_f32(x[v][i]);
}

// NaN if there is one. n >= 1.
inline float maximum(const float* x, Index n) {
    Lanes best[kTogether];
    IntLanes bad = {};
    for (Lanes& lanes : best) lanes = splat(x[0]);
    Index i = 0;
    for (; i + kTogether * kLanes <= n; i += kTogether * kLanes)
        for (Index v = 0; v < kTogether; v += 2) {
            const Lanes first = load(x + i + v * kLanes), second = load(x + i + (v + 1) * kLanes);
            best[v] = larger(best[v], first);
            best[v + 1] = larger(best[v + 1], second);
            bad |= unordered(first, second);
        }
    if (any(bad)) return std::numeric_limits<float>::quiet_NaN();
    float result = x[0];
    for (const Lanes& lanes : best)
        for (Index l = 0; l < kLanes; ++l) result = lanes[l] > result ? lanes[l] : result;
    for (; i < n; ++i) result = x[i] > result || x[i] != x[i] ? x[i] : result;
    return result;
}

}  // namespace megatron_ext
