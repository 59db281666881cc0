// Which elements a vector instruction touches: repeats of 256 bytes, DataBlocks of 32, a mask over the elements of a repeat.
#pragma once
#include <cstring>

#include "instruction.h"
#include "params.h"

namespace ascendc_host {

// The documented type is uint8_t, into which 256 narrows to 0 without a word; the checked flavour keeps the value.
struct CheckedRepeat {
    int64_t value;
    template <typename Integer, typename = std::enable_if_t<std::is_integral_v<Integer>>>
    CheckedRepeat(Integer number) : value(number) {}
    operator int64_t() const { return value; }
};
using RepeatTime = std::conditional_t<kChecked, CheckedRepeat, uint8_t>;

struct LaneMask {
    uint64_t low, high;
    bool has(uint32_t lane) const { return ((lane < 64 ? low : high) >> (lane % 64)) & 1; }
    uint32_t block(uint32_t first, uint32_t lanes) const { return uint32_t((first < 64 ? low : high) >> (first % 64)) & ((1u << lanes) - 1); }
};

inline uint64_t low_bits(int64_t count) { return count >= 64 ? ~uint64_t(0) : count <= 0 ? 0 : (uint64_t(1) << count) - 1; }
inline LaneMask first_lanes(int64_t count) { return {low_bits(count), low_bits(count - 64)}; }

// Repeats of an instruction whose widest element has `width` bytes. All repeats use `mask`; in counter mode the last one has its own.
struct RepeatPlan {
    uint32_t lanes;  // of a full repeat
    uint32_t repeats;
    LaneMask mask, last_mask;
    const LaneMask& mask_of(uint32_t repeat) const { return repeat + 1 == repeats ? last_mask : mask; }
    bool full() const {
        const LaneMask all = first_lanes(lanes);
        return mask.low == all.low && mask.high == all.high && last_mask.low == all.low && last_mask.high == all.high;
    }
};

inline RepeatPlan plan_count(const Instruction& instruction, uint32_t width, int64_t count) {
    instruction.require(count >= 1, "count >= 1", count);
    const uint32_t lanes = kRepeatBytes / width;
    const uint32_t repeats = uint32_t((count + lanes - 1) / lanes);
    return {lanes, repeats, first_lanes(lanes), first_lanes(count - int64_t(repeats - 1) * lanes)};
}

inline RepeatPlan plan_stored(const Instruction& instruction, uint32_t width, int64_t repeats) {
    const VectorMask& stored = core().mask;
    if (stored.counter) return plan_count(instruction, width, int64_t(stored.low));
    const LaneMask mask = {stored.low, width == 2 ? stored.high : 0};
    return {kRepeatBytes / width, uint32_t(repeats), mask, mask};
}

inline void require_repeat(const Instruction& instruction, int64_t repeats) {
    instruction.require(repeats >= 1 && repeats <= kMaxRepeat, "1 <= repeatTime <= 255", repeats);
}

inline RepeatPlan plan_mask(const Instruction& instruction, bool set_mask, uint32_t width, uint64_t mask, int64_t repeats) {
    require_repeat(instruction, repeats);
    if (!set_mask) return plan_stored(instruction, width, repeats);
    const uint32_t lanes = kRepeatBytes / width;
    instruction.require(mask >= 1 && mask <= lanes, width == 2 ? "1 <= mask <= 128" : "1 <= mask <= 64", int64_t(mask));
    return {lanes, uint32_t(repeats), first_lanes(mask), first_lanes(mask)};
}

inline RepeatPlan plan_mask(const Instruction& instruction, bool set_mask, uint32_t width, const uint64_t mask[], int64_t repeats) {
    require_repeat(instruction, repeats);
    if (!set_mask) return plan_stored(instruction, width, repeats);
    const LaneMask lanes = {mask[0], width == 2 ? mask[1] : 0};
    instruction.require((lanes.low | lanes.high) != 0, "a mask with at least one bit", 0);
    instruction.require(width == 2 || mask[1] == 0, "mask[1] == 0 for 32-bit elements", int64_t(width == 2 ? 0 : mask[1]));
    return {kRepeatBytes / width, uint32_t(repeats), lanes, lanes};
}

// Strides of one operand, in DataBlocks.
struct Stride {
    uint32_t block = 1, repeat = 8;
};

// Calls touch(byte offset, bytes) for the parts of an operand of T that the plan selects, neighbouring parts joined.
template <typename T, typename Touch>
inline void for_each_span(const RepeatPlan& plan, Stride stride, Touch touch) {
    constexpr uint32_t kLanes = kBlockBytes / sizeof(T);
    uint64_t begin = 0, end = 0;
    for (uint32_t r = 0; r < plan.repeats; ++r)
        for (uint32_t first = 0; first < plan.lanes; first += kLanes) {
            const uint32_t bits = plan.mask_of(r).block(first, kLanes);
            if (bits == 0) continue;
            const uint64_t block = (uint64_t(r) * stride.repeat + uint64_t(first / kLanes) * stride.block) * kBlockBytes;
            const uint64_t from = block + __builtin_ctz(bits) * sizeof(T), to = block + (32 - __builtin_clz(bits)) * sizeof(T);
            if (from == end) {
                end = to;
                continue;
            }
            if (end > begin) touch(begin, end - begin);
            begin = from;
            end = to;
        }
    if (end > begin) touch(begin, end - begin);
}

template <typename T>
inline void read_operand(const Instruction& instruction, const char* role, const AscendC::LocalTensor<T>& tensor, const RepeatPlan& plan,
                         Stride stride = {1, 8}) {
    if constexpr (kChecked) {
        instruction.operand(role, tensor, in(Memory::kUb), kBlockBytes);
        for_each_span<T>(plan, stride, [&](uint64_t offset, uint64_t bytes) { instruction.read(role, tensor, offset, bytes); });
    }
}

template <typename T>
inline void write_operand(const Instruction& instruction, const char* role, const AscendC::LocalTensor<T>& tensor, const RepeatPlan& plan,
                          Stride stride = {1, 8}) {
    if constexpr (kChecked) {
        instruction.operand(role, tensor, in(Memory::kUb), kBlockBytes);
        for_each_span<T>(plan, stride, [&](uint64_t offset, uint64_t bytes) { instruction.write(role, tensor, offset, bytes); });
    }
}

// Address of a lane of an operand of T.
template <typename T>
inline T* lane_address(T* start, Stride stride, uint32_t repeat, uint32_t lane) {
    constexpr uint32_t kLanes = kBlockBytes / sizeof(T);
    return start + (uint64_t(repeat) * stride.repeat + uint64_t(lane / kLanes) * stride.block) * kLanes + lane % kLanes;
}

}  // namespace ascendc_host
