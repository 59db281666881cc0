// What decides on a token, for the kernel and for its native twin: integers, comparisons, and fp32 sums one after another, as in
// megatron_ext/reference/sampling.py. Sums over a row are the row's own: see SamplingRow in either file.
#pragma once
#include "sampling_tiling.h"
#ifndef __aicore__
#define __aicore__  // a native twin is plain C++
#endif

namespace megatron_ext {

constexpr float kLowestLogit = -3.40282347e38f;  // of the tokens that can be drawn
constexpr float kNoLimit = -__builtin_inff();    // logarithm of a min-p that is off

// Philox4x32-10: four words from a key of 64 bits and a counter of 128.
struct PhiloxWords {
    uint32_t word[4];
};

__aicore__ inline PhiloxWords Philox(uint64_t key, uint64_t counter) {
    constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
    constexpr uint32_t kStep0 = 0x9E3779B9, kStep1 = 0xBB67AE85;
    PhiloxWords c = {{uint32_t(counter), uint32_t(counter >> 32), 0, 0}};
    uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
    for (int32_t round = 0; round < 10; ++round) {
        const uint64_t left = kMultiplier0 * c.word[0], right = kMultiplier1 * c.word[2];
        c = {{uint32_t(right >> 32) ^ c.word[1] ^ k0, uint32_t(right), uint32_t(left >> 32) ^ c.word[3] ^ k1, uint32_t(left)}};
        k0 += kStep0;
        k1 += kStep1;
    }
    return c;
}

// Index of the weight in which `word` falls: the first running sum above u * total, u = the upper 24 bits / 2^24, or equal to the total.
// weights.At(i) is an fp32 number.
template <typename Weights>
__aicore__ inline uint32_t Choose(const Weights& weights, uint32_t count, uint32_t word) {
    float total = 0.0f, running = 0.0f;
    for (uint32_t i = 0; i < count; ++i) total = total + weights.At(i);
    const float threshold = float(word >> 8) * 0x1p-24f * total;
    for (uint32_t i = 0; i < count; ++i) {
        running = running + weights.At(i);
        if (running > threshold || running == total) return i;
    }
    return 0;  // not reached: the last running sum is the total
}

// Tokens by descending logit, equal ones by ascending id: a prefix is named by its last token.
struct SamplingCut {
    float value;    // its logit
    int64_t index;  // its id
};

// Integers in the order of finite fp32 numbers.
__aicore__ inline int32_t KeyOf(float value) {
    const int32_t bits = __builtin_bit_cast(int32_t, value);
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}
__aicore__ inline float ValueOf(int32_t key) { return __builtin_bit_cast(float, key ^ ((key >> 31) & 0x7FFFFFFF)); }

// What a token adds to the mass of a prefix: 1; 1 if min-p keeps it; its weight.
enum class SamplingLeaf { kOne, kAboveMinP, kWeight };

// The shortest prefix inside `outer` that has a mass of at least `target`, which `outer` has. A mass never falls where a prefix grows, so two
// bisections find its end: over logits, then over the ids of equal ones.
template <typename Row>
__aicore__ inline SamplingCut ShortestPrefix(Row& row, const SamplingCut& outer, SamplingLeaf leaf, float target) {
    int64_t low = KeyOf(outer.value), high = int64_t(KeyOf(row.Largest())) + 1;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (row.Mass({ValueOf(int32_t(middle)), row.Columns() - 1}, leaf) >= target)
            low = middle;
        else
            high = middle;
    }
    const float value = ValueOf(int32_t(low));
    int64_t below = -1, last = value == outer.value ? outer.index : row.Columns() - 1;
    while (last - below > 1) {
        const int64_t middle = below + (last - below) / 2;
        if (row.Mass({value, middle}, leaf) >= target)
            last = middle;
        else
            below = middle;
    }
    return {value, last};
}

struct SamplingFilters {
    int64_t top_k;     // 0: off
    float top_p;       // 1: off
    float log_min_p;   // kNoLimit: off
    __aicore__ inline bool Count() const { return top_k > 0 || log_min_p > kNoLimit; }
    __aicore__ inline bool Mass() const { return top_p < 1.0f; }
};

// The support of a row whose largest logit is finite.
template <typename Row>
__aicore__ inline SamplingCut Support(Row& row, const SamplingFilters& filters) {
    SamplingCut cut = {kLowestLogit, row.Columns() - 1};
    if (filters.Count()) {
        const float left = row.Mass(cut, filters.log_min_p > kNoLimit ? SamplingLeaf::kAboveMinP : SamplingLeaf::kOne);
        const float wanted = filters.top_k > 0 && filters.top_k < row.Columns() ? float(filters.top_k) : float(row.Columns());
        cut = ShortestPrefix(row, cut, SamplingLeaf::kOne, wanted < left ? wanted : left);
    }
    if (filters.Mass()) cut = ShortestPrefix(row, cut, SamplingLeaf::kWeight, filters.top_p * row.Mass(cut, SamplingLeaf::kWeight));
    return cut;
}

// The token in which the words fall, down the tree of the sum: a segment, a block of 64 in it, a token of that.
template <typename Row>
__aicore__ inline int64_t Draw(Row& row, const SamplingCut& cut, const PhiloxWords& words) {
    const int64_t segment = row.ChooseSegment(cut, words.word[0]);
    const int64_t block = row.ChooseBlock(cut, segment, words.word[1]);
    return row.ChooseToken(cut, segment, block, words.word[2]);
}

}  // namespace megatron_ext
