// DataCopy and DataCopyPad between global memory and UB or L1, and the conversion of a matrix to NZ on the way to L1.
#pragma once
#include "deviation.h"
#include "instruction.h"
#include "params.h"

namespace ascendc_host {

template <typename T>
constexpr bool is_copy_element = is_one_of<T, float, half, bfloat16_t, int32_t, uint32_t, int16_t, uint16_t, int8_t, uint8_t>;

// Rows of `bytes`, each side with its own distance between row starts, in bytes.
struct RowCopy {
    uint32_t rows;
    uint64_t bytes, from_step, to_step;
};

// Rows are often shorter than what a call of memcpy costs; local and global memory do not overlap.
inline void copy_row(uint8_t* to, const uint8_t* from, uint64_t bytes) {
    constexpr uint64_t kShort = 1024;
    if (bytes < kBlockBytes || bytes > kShort) {
        std::memcpy(to, from, bytes);
        return;
    }
    const auto block = [=](uint64_t at) { std::memcpy(to + at, from + at, kBlockBytes); };
    for (uint64_t at = 0; at + kBlockBytes <= bytes; at += kBlockBytes) block(at);
    if (bytes % kBlockBytes) block(bytes - kBlockBytes);
}

inline void copy_rows(uint8_t* to, const uint8_t* from, const RowCopy& copy) {
    for (uint32_t r = 0; r < copy.rows; ++r) copy_row(to + r * copy.to_step, from + r * copy.from_step, copy.bytes);
}

template <typename T>
inline void load_rows(const char* name, const AscendC::LocalTensor<T>& dst, const AscendC::GlobalTensor<T>& src, const RowCopy& copy,
                      Site site) {
    const Instruction instruction(name, PIPE_MTE2, site);
    instruction.operand("dst", dst, in(Memory::kUb) | in(Memory::kL1), kBlockBytes);
    for (uint32_t r = 0; kChecked && r < copy.rows; ++r) instruction.read("src", src, r * copy.from_step, copy.bytes);
    for (uint32_t r = 0; kChecked && r < copy.rows; ++r) instruction.write("dst", dst, r * copy.to_step, copy.bytes);
    RowCopy arrived = copy;
    if (deviates(Deviation::copies_are_late)) arrived.bytes /= 2;
    copy_rows(reinterpret_cast<uint8_t*>(dst.host_data()), reinterpret_cast<const uint8_t*>(src.host_data()), arrived);
}

template <typename T>
inline void store_rows(const char* name, const AscendC::GlobalTensor<T>& dst, const AscendC::LocalTensor<T>& src, const RowCopy& copy,
                       Site site) {
    const Instruction instruction(name, PIPE_MTE3, site);
    instruction.operand("src", src, in(Memory::kUb), kBlockBytes);
    for (uint32_t r = 0; kChecked && r < copy.rows; ++r) instruction.read("src", src, r * copy.from_step, copy.bytes);
    for (uint32_t r = 0; kChecked && r < copy.rows; ++r) instruction.write("dst", dst, r * copy.to_step, copy.bytes);
    copy_rows(reinterpret_cast<uint8_t*>(dst.host_data()), reinterpret_cast<const uint8_t*>(src.host_data()), copy);
}

// Limits that hold before any byte moves.
inline void require_copy(const char* name, Site site, bool holds, const char* condition, int64_t value) {
    if constexpr (kChecked)
        if (!holds) fail(name, site, "%s is required, found %lld", condition, (long long)value);
}

template <typename T>
inline RowCopy count_copy(uint32_t count, Site site) {
    require_copy("DataCopy", site, count > 0 && uint64_t(count) * sizeof(T) % kBlockBytes == 0, "a count of whole 32-byte blocks", count);
    return {1, uint64_t(count) * sizeof(T) / kBlockBytes * kBlockBytes, 0, 0};
}

inline RowCopy block_copy(const AscendC::DataCopyParams& p, Site site) {
    require_copy("DataCopy", site, p.blockCount >= 1 && p.blockCount <= 4095, "1 <= blockCount <= 4095", p.blockCount);
    require_copy("DataCopy", site, p.blockLen >= 1, "blockLen >= 1", p.blockLen);
    return {p.blockCount, uint64_t(p.blockLen) * kBlockBytes, uint64_t(p.blockLen + p.srcStride) * kBlockBytes,
            uint64_t(p.blockLen + p.dstStride) * kBlockBytes};
}

template <typename T>
inline void require_pad_copy(const AscendC::DataCopyExtParams& p, Site site) {
    require_copy("DataCopyPad", site, p.blockCount >= 1 && p.blockCount <= 4095, "1 <= blockCount <= 4095", p.blockCount);
    require_copy("DataCopyPad", site, p.blockLen >= 1 && p.blockLen <= 2097151, "1 <= blockLen <= 2097151", p.blockLen);
    require_copy("DataCopyPad", site, p.blockLen % sizeof(T) == 0, "a blockLen of whole elements", p.blockLen);
}

inline uint64_t round_to_block(uint64_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes; }

// One padded row: left padding, data, then padding up to a whole block. Without isPad the filler is documented as the row's first element
// when no padding is asked for, and as arbitrary otherwise; the checked flavour puts NaN where it is arbitrary.
template <typename T>
inline void fill_padding(T* row, uint32_t left, uint32_t data, uint32_t total, uint32_t asked, const AscendC::DataCopyPadExtParams<T>& pad) {
    T filler = pad.isPad ? pad.paddingValue : row[left];
    if (!pad.isPad && asked > 0 && kChecked) std::memset(&filler, 0xFF, sizeof(T));
    for (uint32_t i = 0; i < left; ++i) row[i] = filler;
    for (uint32_t i = left + data; i < total; ++i) row[i] = filler;
}

}  // namespace ascendc_host

namespace AscendC {

template <typename T>
inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const uint32_t count,
                     ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::is_copy_element<T>, "DataCopy: this data type is not modelled");
    ascendc_host::load_rows("DataCopy", dst, src, ascendc_host::count_copy<T>(count, site), site);
}

template <typename T>
inline void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count,
                     ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::is_copy_element<T>, "DataCopy: this data type is not modelled");
    ascendc_host::store_rows("DataCopy", dst, src, ascendc_host::count_copy<T>(count, site), site);
}

template <typename T>
inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& repeatParams,
                     ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::is_copy_element<T>, "DataCopy: this data type is not modelled");
    ascendc_host::load_rows("DataCopy", dst, src, ascendc_host::block_copy(repeatParams, site), site);
}

template <typename T>
inline void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& repeatParams,
                     ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::is_copy_element<T>, "DataCopy: this data type is not modelled");
    ascendc_host::store_rows("DataCopy", dst, src, ascendc_host::block_copy(repeatParams, site), site);
}

template <typename T>
inline void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& dataCopyParams,
                        const DataCopyPadExtParams<T>& padParams, ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::is_copy_element<T>, "DataCopyPad: this data type is not modelled");
    using namespace ascendc_host;
    const DataCopyExtParams& p = dataCopyParams;
    require_pad_copy<T>(p, site);
    require_copy("DataCopyPad", site, padParams.leftPadding * sizeof(T) <= kBlockBytes, "leftPadding of at most 32 bytes", padParams.leftPadding);
    require_copy("DataCopyPad", site, padParams.rightPadding * sizeof(T) <= kBlockBytes, "rightPadding of at most 32 bytes",
                 padParams.rightPadding);
    const uint64_t left = padParams.leftPadding * sizeof(T), row = round_to_block(left + p.blockLen + padParams.rightPadding * sizeof(T));
    const uint64_t step = row + uint64_t(p.dstStride) * kBlockBytes, from_step = uint64_t(p.blockLen) + p.srcStride;
    const Instruction instruction("DataCopyPad", PIPE_MTE2, site);
    instruction.operand("dst", dst, in(Memory::kUb), kBlockBytes);
    for (uint32_t r = 0; kChecked && r < p.blockCount; ++r) instruction.read("src", src, r * from_step, p.blockLen);
    for (uint32_t r = 0; kChecked && r < p.blockCount; ++r) instruction.write("dst", dst, r * step, row);
    for (uint32_t r = 0; r < p.blockCount; ++r) {
        uint8_t* to = reinterpret_cast<uint8_t*>(dst.host_data()) + r * step;
        copy_row(to + left, reinterpret_cast<const uint8_t*>(src.host_data()) + r * from_step, p.blockLen);
        fill_padding(reinterpret_cast<T*>(to), padParams.leftPadding, p.blockLen / sizeof(T), row / sizeof(T),
                     padParams.leftPadding + padParams.rightPadding, padParams);
    }
}

template <typename T>
inline void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& dataCopyParams,
                        ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::is_copy_element<T>, "DataCopyPad: this data type is not modelled");
    using namespace ascendc_host;
    const DataCopyExtParams& p = dataCopyParams;
    require_pad_copy<T>(p, site);
    const uint64_t from_step = round_to_block(p.blockLen) + uint64_t(p.srcStride) * kBlockBytes;
    store_rows("DataCopyPad", dst, src, {p.blockCount, p.blockLen, from_step, uint64_t(p.blockLen) + p.dstStride}, site);
}

// Rows of a matrix in global memory to NZ in L1: DataBlocks of a row go dstNzC0Stride apart, rows dstNzNStride apart. The tail of the last
// DataBlock of a row is zero.
template <typename T>
inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const Nd2NzParams& intriParams,
                     ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::is_one_of<T, half, bfloat16_t, float>, "DataCopy to NZ: this data type is not modelled");
    using namespace ascendc_host;
    const Nd2NzParams& p = intriParams;
    const Instruction instruction("DataCopy to NZ", PIPE_MTE2, site);
    instruction.require(p.ndNum >= 1 && p.ndNum <= 4095, "1 <= ndNum <= 4095", p.ndNum);
    instruction.require(p.nValue >= 1 && p.nValue <= 16384, "1 <= nValue <= 16384", p.nValue);
    instruction.require(p.dValue >= 1, "dValue >= 1", p.dValue);
    instruction.require(p.dstNzC0Stride >= 1 && p.dstNzC0Stride <= 16384, "1 <= dstNzC0Stride <= 16384", p.dstNzC0Stride);
    instruction.require(p.dstNzNStride >= 1 && p.dstNzNStride <= 16384, "1 <= dstNzNStride <= 16384", p.dstNzNStride);
    instruction.operand("dst", dst, in(Memory::kL1), kBlockBytes);
    constexpr uint32_t kC0 = kBlockBytes / sizeof(T);
    const uint32_t blocks = (p.dValue + kC0 - 1) / kC0;
    const auto position = [&](uint32_t nd, uint32_t n, uint32_t b) {  // in elements
        return uint64_t(nd) * p.dstNzMatrixStride + (uint64_t(b) * p.dstNzC0Stride + uint64_t(n) * p.dstNzNStride) * kC0;
    };
    for (uint32_t nd = 0; kChecked && nd < p.ndNum; ++nd)
        for (uint32_t n = 0; n < p.nValue; ++n)
            instruction.read("src", src, (uint64_t(nd) * p.srcNdMatrixStride + uint64_t(n) * p.srcDValue) * sizeof(T), p.dValue * sizeof(T));
    const uint32_t run = p.dstNzNStride == 1 ? p.nValue : 1;  // rows that lie side by side
    for (uint32_t nd = 0; kChecked && nd < p.ndNum; ++nd)
        for (uint32_t b = 0; b < blocks; ++b)
            for (uint32_t n = 0; n < p.nValue; n += run)
                instruction.write("dst", dst, position(nd, n, b) * sizeof(T), uint64_t(run) * kBlockBytes);
    for (uint32_t nd = 0; nd < p.ndNum; ++nd)
        for (uint32_t n = 0; n < p.nValue; ++n) {
            const T* row = src.host_data() + uint64_t(nd) * p.srcNdMatrixStride + uint64_t(n) * p.srcDValue;
            for (uint32_t b = 0; b < blocks; ++b) {
                const uint32_t live = p.dValue - b * kC0 < kC0 ? p.dValue - b * kC0 : kC0;
                T* to = dst.host_data() + position(nd, n, b);
                if (live < kC0) std::memset(to, 0, kBlockBytes);
                std::memcpy(to, row + b * kC0, live * sizeof(T));
            }
        }
}

}  // namespace AscendC
