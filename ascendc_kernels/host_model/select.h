// Compare, Compares, Select, Gather, Brcb.
#pragma once
#include "lanes.h"
#include "vector.h"

namespace ascendc_host {

// Calls run with the comparison of a mode known at run time, for compare_lanes.
template <typename Run>
inline void with_comparison(AscendC::CMPMODE mode, Run run) {
    switch (mode) {
        case AscendC::CMPMODE::LT: return run([](auto a, auto b) { return a < b; });
        case AscendC::CMPMODE::GT: return run([](auto a, auto b) { return a > b; });
        case AscendC::CMPMODE::EQ: return run([](auto a, auto b) { return a == b; });
        case AscendC::CMPMODE::LE: return run([](auto a, auto b) { return a <= b; });
        case AscendC::CMPMODE::GE: return run([](auto a, auto b) { return a >= b; });
        case AscendC::CMPMODE::NE: return run([](auto a, auto b) { return a != b; });
    }
}

// Bit i of dst, lowest first: src0[i] compared with lane i % 8 of other(i / 8 * 8).
template <typename T, typename Other>
inline void compare_bits(uint8_t* dst, const T* src0, Other other, AscendC::CMPMODE mode, uint32_t count) {
    with_comparison(mode, [=](auto compare) {
        for (uint32_t i = 0; i + kLanes <= count; i += kLanes)
            dst[i / kLanes] = uint8_t(lane_bits(compare_lanes(load_wide(src0 + i), other(i), compare)));
    });
}

// Elements of which a lane's mask chooses one, in vectors of their own width.
inline Lanes choose(uint32_t bits, const float* chosen, Lanes otherwise) { return pick(lanes_of(bits), load_wide(chosen), otherwise); }
inline ShortLanes choose(uint32_t bits, const half* chosen, ShortLanes otherwise) {
    return short_lanes_of(bits) ? *reinterpret_cast<const ShortLanes*>(chosen) : otherwise;
}
inline Lanes stored_lanes(const float* from) { return megatron_ext::load(from); }
inline ShortLanes stored_lanes(const half* from) { return *reinterpret_cast<const ShortLanes*>(from); }
template <typename T>
using StoredLanes = decltype(stored_lanes(static_cast<const T*>(nullptr)));
inline Lanes repeat_stored(float value) { return all_lanes(value); }
inline ShortLanes repeat_stored(half value) { return value.bits - ShortLanes{}; }

template <typename T>
inline RepeatPlan plan_compare(const Instruction& instruction, uint32_t count) {
    instruction.require(uint64_t(count) * sizeof(T) % kRepeatBytes == 0, "a count of whole repeats of 256 bytes", count);
    return plan_count(instruction, sizeof(T), count);
}

// other(i): eight elements from i on, as they are stored.
template <typename T, typename U, typename Other>
inline void select(const Instruction& instruction, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<U>& selMask,
                   const AscendC::LocalTensor<T>& src0, Other other, uint32_t count) {
    instruction.operand("selMask", selMask, in(Memory::kUb), kBlockBytes);
    instruction.read("selMask", selMask, 0, (count + 7) / 8);
    read_operand(instruction, "src0", src0, plan_count(instruction, sizeof(T), count));
    write_operand(instruction, "dst", dst, plan_count(instruction, sizeof(T), count));
    const uint8_t* bits = reinterpret_cast<const uint8_t*>(selMask.host_data());
    const T* chosen = src0.host_data();
    T* to = dst.host_data();
    uint32_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const auto elements = choose(bits[i / kLanes], chosen + i, other(i));
        std::memcpy(to + i, &elements, sizeof(elements));
    }
    if (i == count) return;
    T last[kLanes] = {};  // fewer than eight: what lies beyond count stays
    std::memcpy(last, chosen + i, (count - i) * sizeof(T));
    const auto rest = choose(bits[i / kLanes], last, other(i));
    std::memcpy(to + i, &rest, (count - i) * sizeof(T));
}

template <typename U>
constexpr bool is_mask_element = is_one_of<U, uint8_t, uint16_t, uint32_t, uint64_t>;

}  // namespace ascendc_host

namespace AscendC {

template <typename T, typename U>
inline void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, CMPMODE cmpMode, uint32_t count,
                    ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::is_floating_element<T> && std::is_same_v<U, uint8_t>, "Compare: these data types are not modelled");
    using namespace ascendc_host;
    const Instruction instruction("Compare", PIPE_V, site);
    const RepeatPlan plan = plan_compare<T>(instruction, count);
    read_operand(instruction, "src0", src0, plan);
    read_operand(instruction, "src1", src1, plan);
    instruction.operand("dst", dst, in(Memory::kUb), kBlockBytes);
    instruction.write("dst", dst, 0, count / 8);
    const T* second = src1.host_data();
    compare_bits(dst.host_data(), src0.host_data(), [second](uint32_t i) { return load_wide(second + i); }, cmpMode, count);
}

template <typename T, typename U>
inline void Compares(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const T src1Scalar, CMPMODE cmpMode, uint32_t count,
                     ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::is_floating_element<T> && std::is_same_v<U, uint8_t>, "Compares: these data types are not modelled");
    using namespace ascendc_host;
    const Instruction instruction("Compares", PIPE_V, site);
    read_operand(instruction, "src0", src0, plan_compare<T>(instruction, count));
    instruction.operand("dst", dst, in(Memory::kUb), kBlockBytes);
    instruction.write("dst", dst, 0, count / 8);
    const Lanes scalar = all_lanes(float(src1Scalar));
    compare_bits(dst.host_data(), src0.host_data(), [scalar](uint32_t) { return scalar; }, cmpMode, count);
}

// A set bit takes src0.
template <typename T, typename U>
inline void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0, const LocalTensor<T>& src1,
                   SELMODE selMode, uint32_t count, ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::is_floating_element<T> && ascendc_host::is_mask_element<U>, "Select: these data types are not modelled");
    using namespace ascendc_host;
    const Instruction instruction("Select", PIPE_V, site);
    if (selMode != SELMODE::VSEL_TENSOR_TENSOR_MODE) fail("Select", site, "two tensors are modelled with VSEL_TENSOR_TENSOR_MODE only");
    read_operand(instruction, "src1", src1, plan_count(instruction, sizeof(T), count));
    const T* second = src1.host_data();
    select(instruction, dst, selMask, src0, [second](uint32_t i) { return stored_lanes(second + i); }, count);
}

template <typename T, typename U>
inline void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0, T src1, SELMODE selMode,
                   uint32_t count, ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::is_floating_element<T> && ascendc_host::is_mask_element<U>, "Select: these data types are not modelled");
    using namespace ascendc_host;
    const Instruction instruction("Select", PIPE_V, site);
    if (selMode != SELMODE::VSEL_TENSOR_SCALAR_MODE) fail("Select", site, "a tensor and a scalar need VSEL_TENSOR_SCALAR_MODE");
    const auto otherwise = repeat_stored(src1);
    select(instruction, dst, selMask, src0, [otherwise](uint32_t) { return otherwise; }, count);
}

// dst[i] = the element of src at byte srcBaseOffset + srcOffset[i].
template <typename T>
inline void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& srcOffset, const uint32_t srcBaseOffset,
                   const uint32_t count, ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::is_plain_element<T>, "Gather: this data type is not modelled");
    using namespace ascendc_host;
    const Instruction instruction("Gather", PIPE_V, site);
    instruction.operand("src", src, in(Memory::kUb), kBlockBytes);
    read_operand(instruction, "srcOffset", srcOffset, plan_count(instruction, sizeof(uint32_t), count));
    const uint32_t* offsets = srcOffset.host_data();
    for (uint32_t i = 0; kChecked && i < count; ++i) {
        instruction.require(offsets[i] % sizeof(T) == 0, "an offset of whole elements", offsets[i]);
        instruction.read("src", src, uint64_t(srcBaseOffset) + offsets[i], sizeof(T));
    }
    write_operand(instruction, "dst", dst, plan_count(instruction, sizeof(T), count));
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(src.host_data()) + srcBaseOffset;
    T* to = dst.host_data();
#pragma GCC unroll 4
    for (uint32_t i = 0; i < count; ++i) std::memcpy(to + i, bytes + offsets[i], sizeof(T));
}

// Every element of src fills a DataBlock of dst; a repeat takes eight.
template <typename T>
inline void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src, const ascendc_host::RepeatTime repeatTime,
                 const BrcbRepeatParams& repeatParams, ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::is_plain_element<T>, "Brcb: this data type is not modelled");
    using namespace ascendc_host;
    constexpr uint32_t kElements = 8, kBlock = kBlockElements<T>;
    const Instruction instruction("Brcb", PIPE_V, site);
    require_repeat(instruction, repeatTime);
    const uint32_t repeats = uint32_t(repeatTime), block = repeatParams.dstBlkStride ? repeatParams.dstBlkStride : 1;
    const auto position = [&](uint32_t r, uint32_t e) { return (uint64_t(r) * repeatParams.dstRepStride + uint64_t(e) * block) * kBlock; };
    instruction.operand("src", src, in(Memory::kUb), kBlockBytes);
    instruction.operand("dst", dst, in(Memory::kUb), kBlockBytes);
    instruction.require(!kChecked || src.host_data() != dst.host_data(), "src and dst apart", 0);
    instruction.read("src", src, 0, uint64_t(repeats) * kElements * sizeof(T));
    for (uint32_t i = 0; kChecked && i < repeats * kElements; ++i)
        instruction.write("dst", dst, position(i / kElements, i % kElements) * sizeof(T), kBlockBytes);
    const T* from = src.host_data();
    T* to = dst.host_data();
    for (uint32_t r = 0; r < repeats; ++r)
        for (uint32_t e = 0; e < kElements; ++e) std::fill_n(to + position(r, e), kBlock, from[r * kElements + e]);
}

}  // namespace AscendC
