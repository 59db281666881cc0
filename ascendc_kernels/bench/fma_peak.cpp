// fp32 multiply-adds per second of one thread with AVX2 and FMA: twelve independent chains, as many as hide the latency. For harness.py.
#include <immintrin.h>

#include <cstdint>

extern "C" float fma_chains(int64_t rounds) {
    __m256 chains[12], factor = _mm256_set1_ps(0.999f), term = _mm256_set1_ps(0.001f);
    for (int i = 0; i < 12; ++i) chains[i] = _mm256_set1_ps(float(i));
    for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 12
        for (int i = 0; i < 12; ++i) chains[i] = _mm256_fmadd_ps(chains[i], factor, term);
    float sum = 0.0f, lanes[8];
    for (int i = 0; i < 12; ++i) {
        _mm256_storeu_ps(lanes, chains[i]);
        sum += lanes[0];
    }
    return sum;  // keeps the chains alive
}
