// Reductions. Sums follow the order documented for A2/A3: adjacent pairs form a tree inside a repeat (block, pair); ReduceSum by count adds
// the repeats one after another, its mask forms (a tree across repeats) are not modelled. Maxima do not depend on an order; ties give the
// lowest index.
//
// What a masked lane adds to a tree is not documented. The checked flavour refuses masks that cut a tree; pad with +0 instead.
#pragma once
#include "sums.h"
#include "vector.h"

namespace ascendc_host {

// The tree of megatron_ext::pair_tree, unrolled.
template <int count>
inline float pair_sum(const float* values) {
    if constexpr (count == 1) {
        return values[0];
    } else {
        float sums[count / 2];
        for (int i = 0; i < count / 2; ++i) sums[i] = values[2 * i] + values[2 * i + 1];
        return pair_sum<count / 2>(sums);
    }
}

constexpr int kFloatsPerRepeat = kRepeatBytes / sizeof(float);
static_assert(kFloatsPerRepeat == megatron_ext::kRowSumBlock, "row_sum of the order contract is ReduceSum by count");

// Sums of the eight blocks of a repeat that lies in one piece.
inline Lanes block_sums(const float* repeat) {
    return pair_trees([repeat](int block) { return load_wide(repeat + block * kLanes); }, AddOp());
}

// Sums of eight repeats, `step` floats apart.
inline Lanes repeat_sums(const float* first, uint64_t step) {
    return pair_trees([first, step](int repeat) { return block_sums(first + repeat * step); }, AddOp());
}

// Sums of the adjacent pairs of sixteen floats.
inline Lanes pair_sums(const float* from) {
    const TwoLanes halves = lower_and_upper(load_wide(from), load_wide(from + kLanes));
    return combine_pairs(halves.first, halves.second, AddOp());
}

// The results of all repeats, each repeat in one piece; results[r * dst_step ...].
template <int group>
inline void sum_dense_groups(float* dst, uint64_t dst_step, const float* src, uint64_t src_step, uint32_t repeats) {
    uint32_t r = 0;
    if constexpr (group == kFloatsPerRepeat) {
        // Eight repeats are read before the first result is written, so that no result may lie in a repeat that follows it.
        const bool apart = dst + repeats * dst_step <= src || src + repeats * src_step + kFloatsPerRepeat <= dst;
        const bool behind = dst <= src && dst_step <= src_step;
        for (; (apart || behind) && r + kLanes <= repeats; r += kLanes) {
            const Lanes sums = repeat_sums(src + r * src_step, src_step);
            for (uint32_t i = 0; i < kLanes; ++i) dst[(r + i) * dst_step] = sums[i];
        }
        for (; r < repeats; ++r) {
            float blocks[kLanes];
            megatron_ext::store(blocks, block_sums(src + r * src_step));
            dst[r * dst_step] = pair_sum<kLanes>(blocks);
        }
    } else if constexpr (group == kLanes) {
        for (; r < repeats; ++r) megatron_ext::store(dst + r * dst_step, block_sums(src + r * src_step));
    } else {
        for (; r < repeats; ++r) {
            const float* from = src + r * src_step;
            const Lanes sums[] = {pair_sums(from), pair_sums(from + 16), pair_sums(from + 32), pair_sums(from + 48)};
            for (uint32_t i = 0; i < 4; ++i) megatron_ext::store(dst + r * dst_step + i * kLanes, sums[i]);
        }
    }
}

// Lanes of one repeat, gathered through the block stride; masked lanes are +0.
inline void gather_repeat(float* lanes, const float* src, const RepeatPlan& plan, Stride stride, uint32_t repeat) {
    for (uint32_t lane = 0; lane < plan.lanes; ++lane)
        lanes[lane] = plan.mask_of(repeat).has(lane) || deviates(Deviation::masked_lanes_enter) ? *lane_address(src, stride, repeat, lane) : 0.0f;
}

// Every group of `size` lanes is either selected as a whole or not at all.
inline void require_whole_trees(const Instruction& instruction, const RepeatPlan& plan, uint32_t size) {
    if constexpr (kChecked)
        for (const LaneMask& mask : {plan.mask, plan.last_mask})
            for (uint32_t first = 0; first < plan.lanes; first += size) {
                uint32_t selected = 0;
                for (uint32_t lane = first; lane < first + size; ++lane) selected += mask.has(lane);
                instruction.require(selected == 0 || selected == size, "a mask that does not cut a sum tree (masked lanes are undocumented)",
                                    selected);
            }
}

template <typename T, typename Mask>
inline RepeatPlan plan_reduction(const Instruction& instruction, bool set_mask, Mask mask, int32_t repeats, int32_t dst_stride,
                                 int32_t block_stride, int32_t repeat_stride) {
    for (int32_t stride : {dst_stride, block_stride, repeat_stride})
        instruction.require(stride >= 0 && stride <= 65535, "0 <= stride <= 65535", stride);
    return plan_mask(instruction, set_mask, sizeof(T), mask, repeats);
}

// WholeReduceSum: a repeat gives one element. PairReduceSum and BlockReduceSum: every group of `group` lanes gives one.
template <int group, typename Mask>
inline void sum_groups(const char* name, const AscendC::LocalTensor<float>& dst, const AscendC::LocalTensor<float>& src, bool set_mask,
                       Mask mask, int32_t repeats, int32_t dst_stride, int32_t block_stride, int32_t repeat_stride, Site site) {
    const Instruction instruction(name, PIPE_V, site);
    const RepeatPlan plan = plan_reduction<float>(instruction, set_mask, mask, repeats, dst_stride, block_stride, repeat_stride);
    const Stride stride = {uint32_t(block_stride), uint32_t(repeat_stride)};
    constexpr uint32_t kResults = kFloatsPerRepeat / group;
    require_whole_trees(instruction, plan, group);
    read_operand(instruction, "src", src, plan, stride);
    instruction.operand("dst", dst, in(Memory::kUb), kResults == 1 ? sizeof(float) : kBlockBytes);
    for (uint32_t r = 0; r < plan.repeats; ++r)
        for (uint32_t g = 0; kChecked && g < kResults; ++g)
            if (plan.mask_of(r).has(g * group))
                instruction.write("dst", dst, (uint64_t(r) * dst_stride * kResults + g) * sizeof(float), sizeof(float));
    if (plan.full() && stride.block == 1 && !kMayDeviate)
        return sum_dense_groups<group>(dst.host_data(), uint64_t(dst_stride) * kResults, src.host_data(), uint64_t(stride.repeat) * kLanes,
                                       plan.repeats);
    for (uint32_t r = 0; r < plan.repeats; ++r) {
        float lanes[kFloatsPerRepeat];
        gather_repeat(lanes, src.host_data(), plan, stride, r);
        for (uint32_t g = 0; g < kResults; ++g)
            if (plan.mask_of(r).has(g * group))
                dst.host_data()[uint64_t(r) * dst_stride * kResults + g] =
                    kMayDeviate && kResults == 1 ? deviating_repeat(lanes) : pair_sum<group>(lanes + g * group);
    }
}

template <typename T>
using IndexBits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;

template <typename T>
struct Maximum {
    T value = T(0);
    uint32_t index = 0;
    bool found = false;
    Maximum() = default;
    Maximum(T value_in, uint32_t index_in, bool found_in) : value(value_in), index(index_in), found(found_in) {}
    void offer(T candidate, uint32_t at) {
        if (found && !(Wide<T>(candidate) > Wide<T>(value)) && Wide<T>(candidate) == Wide<T>(candidate)) return;
        if (found && Wide<T>(value) != Wide<T>(value)) return;  // the first NaN stays
        value = candidate;
        index = at;
        found = true;
    }
};

// The first of two that Maximum::offer would keep: the larger one, the earlier of equals, NaN before all.
struct FirstMaxOp {
    Lanes operator()(Lanes earlier, Lanes later) const { return pick(greater(later, earlier) | (is_nan(later) & ~is_nan(earlier)), later, earlier); }
};

// Where `value` stands first; lanes beyond count are not looked at. NaN finds NaN.
template <typename T>
inline uint32_t first_index(const T* values, uint32_t count, float value) {
    const Lanes wanted = all_lanes(value);
    const bool nan = is_nan(value);
    const auto equal = [](auto x, auto y) { return x == y; };
    uint32_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const Lanes x = load_wide(values + i);
        const uint32_t found = lane_bits(nan ? is_nan(x) : compare_lanes(x, wanted, equal));
        if (found) return i + uint32_t(__builtin_ctz(found));
    }
    while (nan ? !is_nan(float(values[i])) : float(values[i]) != value) ++i;
    return i;
}

// The same for contiguous elements: the value in lanes first, then the first place where it stands.
template <typename T>
inline Maximum<T> first_maximum(const T* values, uint32_t count) {
    constexpr uint32_t kTogether = 4;
    Lanes best[kTogether];
    for (Lanes& lanes : best) lanes = all_lanes(float(values[0]));
    uint32_t i = 0;
    for (; i + kTogether * kLanes <= count; i += kTogether * kLanes)
        for (uint32_t l = 0; l < kTogether; ++l) best[l] = MaxOp()(load_wide(values + i + l * kLanes), best[l]);
    for (; i + kLanes <= count; i += kLanes) best[0] = MaxOp()(load_wide(values + i), best[0]);
    const Lanes together = MaxOp()(MaxOp()(best[0], best[1]), MaxOp()(best[2], best[3]));
    float value = float(values[0]);
    for (uint32_t l = 0; l < kLanes; ++l) value = MaxOp()(together[l], value);
    for (; i < count; ++i) value = MaxOp()(float(values[i]), value);
    const uint32_t at = first_index(values, count, value);
    return {values[at], at, true};
}

// The maxima of the eight blocks of a repeat of floats that lies in one piece.
inline Lanes block_maxima(const float* repeat) {
    return pair_trees([repeat](int block) { return load_wide(repeat + block * kLanes); }, FirstMaxOp());
}

inline Maximum<float> repeat_maximum(const float* repeat, bool with_index) {
    float blocks[kLanes];
    megatron_ext::store(blocks, block_maxima(repeat));
    Maximum<float> first;
    for (uint32_t b = 0; b < kLanes; ++b) first.offer(blocks[b], 0);
    if (with_index) first.index = first_index(repeat, kFloatsPerRepeat, first.value);
    return first;
}
inline Maximum<half> repeat_maximum(const half* repeat, bool) { return first_maximum(repeat, kRepeatBytes / sizeof(half)); }

// An index is stored as the bits of an element.
template <typename T>
inline T index_element(uint32_t index) {
    const IndexBits<T> bits = IndexBits<T>(index);
    T element;
    std::memcpy(&element, &bits, sizeof(T));
    return element;
}

template <typename T>
inline void store_maximum(T* dst, const Maximum<T>& maximum, AscendC::ReduceOrder order) {
    using AscendC::ReduceOrder;
    if (order == ReduceOrder::ORDER_ONLY_INDEX) {
        std::memcpy(dst, &maximum.index, sizeof(uint32_t));
        return;
    }
    const bool index_first = order == ReduceOrder::ORDER_INDEX_VALUE;
    dst[index_first ? 1 : 0] = maximum.value;
    if (order != ReduceOrder::ORDER_ONLY_VALUE) dst[index_first ? 0 : 1] = index_element<T>(maximum.index);
}

template <typename T>
inline uint32_t maximum_bytes(AscendC::ReduceOrder order) {
    if (order == AscendC::ReduceOrder::ORDER_ONLY_INDEX) return sizeof(uint32_t);
    return order == AscendC::ReduceOrder::ORDER_ONLY_VALUE ? sizeof(T) : 2 * sizeof(T);
}

template <typename T, typename Mask>
inline void whole_maximum(const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src, bool set_mask, Mask mask, int32_t repeats,
                          int32_t dst_stride, int32_t block_stride, int32_t repeat_stride, AscendC::ReduceOrder order, Site site) {
    const Instruction instruction("WholeReduceMax", PIPE_V, site);
    const RepeatPlan plan = plan_reduction<T>(instruction, set_mask, mask, repeats, dst_stride, block_stride, repeat_stride);
    const Stride stride = {uint32_t(block_stride), uint32_t(repeat_stride)};
    const uint32_t bytes = maximum_bytes<T>(order);
    read_operand(instruction, "src", src, plan, stride);
    instruction.operand("dst", dst, in(Memory::kUb), bytes);
    for (uint32_t r = 0; r < plan.repeats; ++r) instruction.write("dst", dst, uint64_t(r) * dst_stride * bytes, bytes);
    for (uint32_t r = 0; r < plan.repeats; ++r) {
        Maximum<T> maximum;
        if (plan.full() && stride.block == 1)
            maximum = repeat_maximum(lane_address(src.host_data(), stride, r, 0), order != AscendC::ReduceOrder::ORDER_ONLY_VALUE);
        else
            for (uint32_t lane = 0; lane < plan.lanes; ++lane)
                if (plan.mask_of(r).has(lane)) maximum.offer(*lane_address(src.host_data(), stride, r, lane), lane);
        store_maximum(reinterpret_cast<T*>(reinterpret_cast<uint8_t*>(dst.host_data()) + uint64_t(r) * dst_stride * bytes), maximum, order);
    }
}

template <typename T, typename Mask>
inline void block_maximum(const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src, bool set_mask, Mask mask, int32_t repeats,
                          int32_t dst_stride, int32_t block_stride, int32_t repeat_stride, Site site) {
    const Instruction instruction("BlockReduceMax", PIPE_V, site);
    const RepeatPlan plan = plan_reduction<T>(instruction, set_mask, mask, repeats, dst_stride, block_stride, repeat_stride);
    const Stride stride = {uint32_t(block_stride), uint32_t(repeat_stride)};
    constexpr uint32_t kElements = kBlockElements<T>, kBlocks = kBlocksPerRepeat;
    read_operand(instruction, "src", src, plan, stride);
    instruction.operand("dst", dst, in(Memory::kUb), kBlocks * sizeof(T));
    if constexpr (is_float<T> && !kChecked)
        if (plan.full() && stride.block == 1) {
            for (uint32_t r = 0; r < plan.repeats; ++r)
                megatron_ext::store(dst.host_data() + uint64_t(r) * dst_stride * kBlocks, block_maxima(lane_address(src.host_data(), stride, r, 0)));
            return;
        }
    for (int pass = kChecked ? 0 : 1; pass < 2; ++pass)  // all writes are announced before the first one happens
        for (uint32_t r = 0; r < plan.repeats; ++r)
            for (uint32_t b = 0; b < kBlocks; ++b) {
                const uint64_t at = uint64_t(r) * dst_stride * kBlocks + b;
                Maximum<T> maximum;
                for (uint32_t lane = b * kElements; lane < (b + 1) * kElements; ++lane)
                    if (plan.mask_of(r).has(lane)) maximum.offer(*lane_address(src.host_data(), stride, r, lane), lane);
                if (!maximum.found) continue;
                if (pass == 0)
                    instruction.write("dst", dst, at * sizeof(T), sizeof(T));
                else
                    dst.host_data()[at] = maximum.value;
            }
}

template <typename T>
constexpr bool is_summable = std::is_same_v<T, float>;

}  // namespace ascendc_host

namespace AscendC {

template <typename T, bool isSetMask = true>
inline void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& sharedTmpBuffer, const int32_t count,
                      ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::is_summable<T>, "ReduceSum: this data type is not modelled");
    static_assert(isSetMask, "ReduceSum: isSetMask = false is not modelled");
    using namespace ascendc_host;
    const Instruction instruction("ReduceSum", PIPE_V, site);
    const RepeatPlan plan = plan_count(instruction, sizeof(T), count);
    require_whole_trees(instruction, plan, kFloatsPerRepeat);
    read_operand(instruction, "src", src, plan);
    instruction.operand("sharedTmpBuffer", sharedTmpBuffer, in(Memory::kUb), kBlockBytes);
    instruction.operand("dst", dst, in(Memory::kUb), sizeof(T));
    instruction.write("dst", dst, 0, sizeof(T));
    if constexpr (kMayDeviate) {
        dst.host_data()[0] = deviating_sum(src.host_data(), count);
        return;
    }
    float total = 0.0f;
    int32_t first = 0;
    for (; first + 8 * kFloatsPerRepeat <= count; first += 8 * kFloatsPerRepeat) {
        const Lanes sums = repeat_sums(src.host_data() + first, kFloatsPerRepeat);
        for (uint32_t i = 0; i < kLanes; ++i) total = total + sums[i];
    }
    for (; first + kFloatsPerRepeat <= count; first += kFloatsPerRepeat) total = total + pair_sum<kFloatsPerRepeat>(src.host_data() + first);
    if (first < count) {
        float tail[kFloatsPerRepeat] = {};
        std::memcpy(tail, src.host_data() + first, (count - first) * sizeof(float));
        total = total + pair_sum<kFloatsPerRepeat>(tail);
    }
    dst.host_data()[0] = total;
}

template <typename T>
inline void ReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& sharedTmpBuffer, const int32_t count,
                      bool calIndex = 0, ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::is_floating_element<T>, "ReduceMax: this data type is not modelled");
    using namespace ascendc_host;
    const Instruction instruction("ReduceMax", PIPE_V, site);
    instruction.require(sizeof(T) == 4 || !calIndex || count <= 65536, "an index below 65536 for 16-bit elements", count);
    // The documented size of the temporary buffer: a block-rounded element per repeat, two with indices.
    const uint64_t repeats = (uint64_t(count) * sizeof(T) + kRepeatBytes - 1) / kRepeatBytes;
    const uint64_t scratch = (repeats * (calIndex ? 2 : 1) * sizeof(T) + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    read_operand(instruction, "src", src, plan_count(instruction, sizeof(T), count));
    instruction.operand("sharedTmpBuffer", sharedTmpBuffer, in(Memory::kUb), kBlockBytes);
    instruction.operand("dst", dst, in(Memory::kUb), sizeof(T));
    instruction.write("sharedTmpBuffer", sharedTmpBuffer, 0, scratch);
    instruction.write("dst", dst, 0, (calIndex ? 2 : 1) * sizeof(T));
    if (count < 1) return;
    const Maximum<T> maximum = first_maximum(src.host_data(), uint32_t(count));
    store_maximum(dst.host_data(), maximum, calIndex ? ReduceOrder::ORDER_VALUE_INDEX : ReduceOrder::ORDER_ONLY_VALUE);
}

#define ASCENDC_HOST_REDUCTION_ARGUMENTS \
    const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride, ascendc_host::Site site = ascendc_host::Site::here()

template <typename T, bool isSetMask = true>
inline void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask, const int32_t repeatTime,
                           ASCENDC_HOST_REDUCTION_ARGUMENTS) {
    static_assert(ascendc_host::is_summable<T>, "WholeReduceSum: this data type is not modelled");
    ascendc_host::sum_groups<ascendc_host::kFloatsPerRepeat>("WholeReduceSum", dst, src, isSetMask, uint64_t(mask), repeatTime, dstRepStride,
                                                             srcBlkStride, srcRepStride, site);
}

template <typename T, bool isSetMask = true>
inline void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint64_t mask[], const int32_t repeatTime,
                           ASCENDC_HOST_REDUCTION_ARGUMENTS) {
    static_assert(ascendc_host::is_summable<T>, "WholeReduceSum: this data type is not modelled");
    ascendc_host::sum_groups<ascendc_host::kFloatsPerRepeat>("WholeReduceSum", dst, src, isSetMask, mask, repeatTime, dstRepStride,
                                                             srcBlkStride, srcRepStride, site);
}

template <typename T, bool isSetMask = true>
inline void BlockReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime, const int32_t mask,
                           ASCENDC_HOST_REDUCTION_ARGUMENTS) {
    static_assert(ascendc_host::is_summable<T>, "BlockReduceSum: this data type is not modelled");
    ascendc_host::sum_groups<8>("BlockReduceSum", dst, src, isSetMask, uint64_t(mask), repeatTime, dstRepStride, srcBlkStride, srcRepStride,
                                site);
}

template <typename T, bool isSetMask = true>
inline void BlockReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime, const uint64_t mask[],
                           ASCENDC_HOST_REDUCTION_ARGUMENTS) {
    static_assert(ascendc_host::is_summable<T>, "BlockReduceSum: this data type is not modelled");
    ascendc_host::sum_groups<8>("BlockReduceSum", dst, src, isSetMask, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride, site);
}

template <typename T, bool isSetMask = true>
inline void PairReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime, const int32_t mask,
                          ASCENDC_HOST_REDUCTION_ARGUMENTS) {
    static_assert(ascendc_host::is_summable<T>, "PairReduceSum: this data type is not modelled");
    ascendc_host::sum_groups<2>("PairReduceSum", dst, src, isSetMask, uint64_t(mask), repeatTime, dstRepStride, srcBlkStride, srcRepStride,
                                site);
}

template <typename T, bool isSetMask = true>
inline void PairReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime, const uint64_t mask[],
                          ASCENDC_HOST_REDUCTION_ARGUMENTS) {
    static_assert(ascendc_host::is_summable<T>, "PairReduceSum: this data type is not modelled");
    ascendc_host::sum_groups<2>("PairReduceSum", dst, src, isSetMask, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride, site);
}

template <typename T, bool isSetMask = true>
inline void WholeReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask, const int32_t repeatTime,
                           const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,
                           ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX, ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::is_floating_element<T>, "WholeReduceMax: this data type is not modelled");
    ascendc_host::whole_maximum(dst, src, isSetMask, uint64_t(mask), repeatTime, dstRepStride, srcBlkStride, srcRepStride, order, site);
}

template <typename T, bool isSetMask = true>
inline void WholeReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint64_t mask[], const int32_t repeatTime,
                           const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,
                           ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX, ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::is_floating_element<T>, "WholeReduceMax: this data type is not modelled");
    ascendc_host::whole_maximum(dst, src, isSetMask, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride, order, site);
}

template <typename T, bool isSetMask = true>
inline void BlockReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime, const int32_t mask,
                           ASCENDC_HOST_REDUCTION_ARGUMENTS) {
    static_assert(ascendc_host::is_floating_element<T>, "BlockReduceMax: this data type is not modelled");
    ascendc_host::block_maximum(dst, src, isSetMask, uint64_t(mask), repeatTime, dstRepStride, srcBlkStride, srcRepStride, site);
}

template <typename T, bool isSetMask = true>
inline void BlockReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime, const uint64_t mask[],
                           ASCENDC_HOST_REDUCTION_ARGUMENTS) {
    static_assert(ascendc_host::is_floating_element<T>, "BlockReduceMax: this data type is not modelled");
    ascendc_host::block_maximum(dst, src, isSetMask, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride, site);
}
#undef ASCENDC_HOST_REDUCTION_ARGUMENTS

enum class ReduceType { NONE = -1, SUM = 0, MAX, MIN };

// What CANN 9.1.0 calls WholeReduceSum and WholeReduceMax.
template <ReduceType reduceType, typename T, typename U, bool isSetMask = true>
inline void ReduceRepeat(const LocalTensor<T>& dst, const LocalTensor<U>& src, const int32_t mask, const int32_t repeatTime,
                         const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride, ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX,
                         ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(std::is_same_v<T, U> && (reduceType == ReduceType::SUM || reduceType == ReduceType::MAX),
                  "ReduceRepeat: this form is not modelled");
    if constexpr (reduceType == ReduceType::SUM)
        WholeReduceSum<T, isSetMask>(dst, src, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride, site);
    else
        WholeReduceMax<T, isSetMask>(dst, src, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride, order, site);
}

}  // namespace AscendC
