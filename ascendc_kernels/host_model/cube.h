// The cube core: LoadData, LoadDataWithTranspose, Mmad, Fixpipe, for half and bfloat16_t inputs and fp32 accumulation.
//
// Layouts, in fractals of 512 bytes (16 x 16 elements of 16 bits; L0C: 16 x 16 floats):
//   L0A  ZZ: fractal (mi, ki) at mi * K1 + ki, rows of k inside       L0B  ZN: fractal (ki, ni) at ki * N1 + ni, rows of k for each n inside
//   L0C  NZ: fractal (mi, ni) at ni * M1 + mi, rows of n inside       M1, K1, N1: m, k, n in sixteens, rounded up
#pragma once
#include "deviating.h"
#include "instruction.h"
#include "lanes.h"
#include "params.h"
#include "tiles.h"

namespace ascendc_host {

constexpr uint32_t kFractal = 16;
constexpr uint32_t kFractalElements = kFractal * kFractal;
static_assert(kFractal == megatron_ext::kFractal && kFractal == megatron_ext::kPanel, "a fractal is a group and a panel of the order contract");

template <typename T>
constexpr bool is_cube_input = is_one_of<T, half, bfloat16_t>;

inline uint32_t in_fractals(uint32_t size) { return (size + kFractal - 1) / kFractal; }

// Room for one L0A and one L0B in fp32, per thread.
struct CubeScratch {
    float a[kMemoryBytes[int(Memory::kL0a)] / 2];
    float panels[kMemoryBytes[int(Memory::kL0b)] / 2];
};
CubeScratch& cube_scratch();

template <typename T>
inline void copy_fractal(T* dst, const T* src, bool transpose) {
    if (!transpose) {
        std::memcpy(dst, src, kFractalBytes);
        return;
    }
    T turned[kFractalElements];
    for (uint32_t i = 0; i < kFractal; ++i)
        for (uint32_t j = 0; j < kFractal; ++j) turned[i * kFractal + j] = src[j * kFractal + i];
    std::memcpy(dst, turned, kFractalBytes);
}

struct FractalCopy {
    uint32_t count, first, from_step, to_step;
    bool transpose;
};

template <typename T>
inline void load_fractals(const Instruction& instruction, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src,
                          const FractalCopy& copy) {
    instruction.operand("src", src, in(Memory::kL1), kBlockBytes);
    instruction.operand("dst", dst, in(Memory::kL0a) | in(Memory::kL0b), kFractalBytes);
    const auto from = [&](uint32_t i) { return uint64_t(copy.first + i * copy.from_step); };
    for (uint32_t i = 0; kChecked && i < copy.count; ++i) instruction.read("src", src, from(i) * kFractalBytes, kFractalBytes);
    for (uint32_t i = 0; kChecked && i < copy.count; ++i) instruction.write("dst", dst, uint64_t(i) * copy.to_step * kFractalBytes, kFractalBytes);
    for (uint32_t i = 0; i < copy.count; ++i)
        copy_fractal(dst.host_data() + uint64_t(i) * copy.to_step * kFractalElements, src.host_data() + from(i) * kFractalElements,
                     copy.transpose);
}

// One fractal in fp32: its first `rows` rows and `columns` columns, zero elsewhere: what lies beyond the matrix takes no part.
template <typename T>
inline void widen_fractal(float* to, uint32_t to_step, const T* from, uint32_t rows, uint32_t columns, megatron_ext::Magnitudes& seen) {
    T part[kFractalElements] = {};
    if (columns < kFractal) {
        for (uint32_t i = 0; i < rows; ++i) std::memcpy(part + i * kFractal, from + i * kFractal, columns * sizeof(T));
        from = part;
    }
    for (uint32_t i = 0; i < rows; ++i, from += kFractal, to += to_step) {
        seen.add_panel_row(from);
        store_narrow(to, load_wide(from));
        store_narrow(to + kLanes, load_wide(from + kLanes));
    }
}

// L0A to rows of padded_k in fp32.
template <typename T>
inline void unpack_rows(float* rows, const T* l0a, uint32_t m, uint32_t k, uint32_t padded_k, megatron_ext::Magnitudes& seen) {
    for (uint32_t mi = 0; mi < m; mi += kFractal)
        for (uint32_t ki = 0; ki < k; ki += kFractal, l0a += kFractalElements)
            widen_fractal(rows + uint64_t(mi) * padded_k + ki, padded_k, l0a, std::min(m - mi, kFractal), std::min(k - ki, kFractal), seen);
}

// L0B to panels[ni][padded_k][16] of fp32.
template <typename T>
inline void unpack_panels(float* panels, const T* l0b, uint32_t k, uint32_t n, uint32_t padded_k, megatron_ext::Magnitudes& seen) {
    for (uint32_t ki = 0; ki < k; ki += kFractal)
        for (uint32_t ni = 0; ni < n; ni += kFractal, l0b += kFractalElements) {
            float wide[kFractalElements];
            const uint32_t rows = std::min(n - ni, kFractal);
            widen_fractal(wide, kFractal, l0b, rows, std::min(k - ki, kFractal), seen);
            std::fill(wide + rows * kFractal, wide + kFractalElements, 0.0f);
            float* to = panels + uint64_t(ni) * padded_k + ki * kFractal;
            for (uint32_t i = 0; i < kFractal; i += kLanes)
                for (uint32_t j = 0; j < kFractal; j += kLanes)
                    megatron_ext::transpose8(wide + j * kFractal + i, kFractal, to + i * kFractal + j, kFractal);
        }
}

// The type of the order contract's kernels.
template <typename U>
using ContractType = std::conditional_t<std::is_same_v<U, half>, megatron_ext::Float16, megatron_ext::BFloat16>;

template <typename U>
inline void multiply(float* l0c, const U* l0a, const U* l0b, const AscendC::MmadParams& p) {
    const uint32_t m1 = in_fractals(p.m), padded_k = in_fractals(p.k) * kFractal;
    const megatron_ext::MmadOrder order = megatron_ext::MmadOrder(mmad_order());
    const uint32_t k = deviates(Deviation::mmad_beyond_k) ? padded_k : p.k;
    // A zero product added to -0 would give +0, so the sequential order stops at k.
    const uint32_t length = order == megatron_ext::kGroups16 ? padded_k : k;
    CubeScratch& scratch = cube_scratch();
    megatron_ext::Magnitudes left, right;
    unpack_rows(scratch.a, l0a, p.m, k, padded_k, left);
    unpack_panels(scratch.panels, l0b, k, p.n, padded_k, right);
    const bool exact = megatron_ext::products_are_exact<ContractType<U>>(left, right);
    for (uint32_t ni = 0; ni < p.n; ni += kFractal) {
        float* c = l0c + uint64_t(ni) * m1 * kFractal;
        if (p.cmatrixInitVal) std::memset(c, 0, uint64_t(p.m) * kFractal * sizeof(float));
        const float* panel = scratch.panels + uint64_t(ni) * padded_k;
        if constexpr (kMayDeviate)
            deviating_tiles(order, scratch.a, padded_k, p.m, panel, ni, length, c);
        else
            megatron_ext::tiles(order, exact, scratch.a, padded_k, p.m, panel, length, c, kFractal);
    }
}

template <typename T>
struct FixpipeOutput {
    static constexpr bool kModelled = false;
};
template <>
struct FixpipeOutput<float> {
    static constexpr bool kModelled = true;
    static constexpr QuantMode_t kMode = QuantMode_t::NoQuant;
};
template <>
struct FixpipeOutput<half> {
    static constexpr bool kModelled = true;
    static constexpr QuantMode_t kMode = QuantMode_t::F322F16;
};
template <>
struct FixpipeOutput<bfloat16_t> {
    static constexpr bool kModelled = true;
    static constexpr QuantMode_t kMode = QuantMode_t::F322BF16;
};

// Rows of n in global memory from NZ in L0C.
template <typename T>
inline void store_matrix(T* dst, const float* l0c, const AscendC::FixpipeParamsV220& p) {
    for (uint32_t ni = 0; ni < in_fractals(p.nSize); ++ni) {
        const float* column = l0c + uint64_t(ni) * p.srcStride * kFractal;
        const uint32_t live = p.nSize - ni * kFractal < kFractal ? p.nSize - ni * kFractal : kFractal;
        for (uint32_t m = 0; m < p.mSize; ++m) {
            T* row = dst + uint64_t(m) * p.dstStride + ni * kFractal;
            for (uint32_t n = 0; n < live; ++n) row[n] = T(column[m * kFractal + n]);
        }
    }
}

}  // namespace ascendc_host

namespace AscendC {

template <typename T>
inline void LoadData(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LoadData2DParams& loadDataParams,
                     ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::is_cube_input<T>, "LoadData: this data type is not modelled");
    const LoadData2DParams& p = loadDataParams;
    const ascendc_host::Instruction instruction("LoadData", PIPE_MTE1, site);
    instruction.require(p.repeatTimes >= 1, "repeatTimes >= 1", p.repeatTimes);
    instruction.require(p.addrMode == 0, "addrMode == 0", p.addrMode);
    ascendc_host::load_fractals(instruction, dst, src, {p.repeatTimes, p.startIndex, p.srcStride, uint32_t(p.dstGap) + 1, p.ifTranspose});
}

template <typename T>
inline void LoadDataWithTranspose(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LoadData2dTransposeParams& loadDataParams,
                                  ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(ascendc_host::is_cube_input<T>, "LoadDataWithTranspose: this data type is not modelled");
    const LoadData2dTransposeParams& p = loadDataParams;
    const ascendc_host::Instruction instruction("LoadDataWithTranspose", PIPE_MTE1, site);
    instruction.require(p.repeatTimes >= 1, "repeatTimes >= 1", p.repeatTimes);
    instruction.require(p.addrMode == 0, "addrMode == 0", p.addrMode);
    ascendc_host::load_fractals(instruction, dst, src, {p.repeatTimes, p.startIndex, p.srcStride, uint32_t(p.dstGap) + 1, true});
}

template <typename T, typename U, typename S>
inline void Mmad(const LocalTensor<T>& dst, const LocalTensor<U>& fm, const LocalTensor<S>& filter, const MmadParams& mmadParams,
                 ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(std::is_same_v<T, float> && ascendc_host::is_cube_input<U> && std::is_same_v<U, S>, "Mmad: these data types are not modelled");
    using namespace ascendc_host;
    const MmadParams& p = mmadParams;
    if (p.m == 1 && !deviates(Deviation::mmad_takes_a_lone_row))
        fail("Mmad", site, "m == 1 is GEMV mode on a device, with another layout of L0A: pad m to 16");
    if (p.unitFlag || p.cmatrixSource) fail("Mmad", site, "unitFlag=%d and cmatrixSource=%d are not modelled", p.unitFlag, p.cmatrixSource);
    // Documented: from ten fractals of C on, the hardware orders one Mmad after the other; below, PipeBarrier<PIPE_M> must.
    const Instruction instruction("Mmad", PIPE_M, site, (p.m / kFractal) * (p.n / kFractal) >= 10);
    instruction.require(p.m >= 1 && p.m <= 4095, "1 <= m <= 4095", p.m);
    instruction.require(p.n >= 1 && p.n <= 4095, "1 <= n <= 4095", p.n);
    instruction.require(p.k >= 1 && p.k <= 4095, "1 <= k <= 4095", p.k);
    const uint64_t m1 = in_fractals(p.m), n1 = in_fractals(p.n), k1 = in_fractals(p.k);
    const uint64_t c_bytes = m1 * n1 * kFractalElements * sizeof(float);
    instruction.operand("the left matrix", fm, in(Memory::kL0a), kFractalBytes);
    instruction.operand("the right matrix", filter, in(Memory::kL0b), kFractalBytes);
    instruction.operand("dst", dst, in(Memory::kL0c), 64);
    instruction.read("the left matrix", fm, 0, m1 * k1 * kFractalBytes);
    instruction.read("the right matrix", filter, 0, k1 * n1 * kFractalBytes);
    if (!p.cmatrixInitVal) instruction.read("dst", dst, 0, c_bytes);
    instruction.write("dst", dst, 0, c_bytes);
    multiply(dst.host_data(), fm.host_data(), filter.host_data(), p);
}

template <typename T, typename U, const FixpipeConfig& config = CFG_ROW_MAJOR>
inline void Fixpipe(const GlobalTensor<T>& dst, const LocalTensor<U>& src, const FixpipeParamsV220& intriParams,
                    ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(config.format == CO2Layout::ROW_MAJOR, "Fixpipe: only CFG_ROW_MAJOR is modelled");
    static_assert(std::is_same_v<U, float> && ascendc_host::FixpipeOutput<T>::kModelled, "Fixpipe: these data types are not modelled");
    using namespace ascendc_host;
    const FixpipeParamsV220& p = intriParams;
    if (p.quantPre != FixpipeOutput<T>::kMode) fail("Fixpipe", site, "quantPre=%d does not fit the type of dst", int(p.quantPre));
    if (p.reluEn || p.unitFlag || p.isChannelSplit || p.ndNum != 1)
        fail("Fixpipe", site, "reluEn, unitFlag, isChannelSplit and ndNum != 1 are not modelled");
    const Instruction instruction("Fixpipe", PIPE_FIX, site);
    instruction.require(p.nSize >= 1 && p.nSize <= 4095 && p.nSize % kFractal == 0, "nSize a multiple of 16 up to 4095", p.nSize);
    instruction.require(p.mSize >= 1 && p.mSize <= 8192, "1 <= mSize <= 8192", p.mSize);
    instruction.require(p.srcStride >= p.mSize, "srcStride >= mSize", p.srcStride);
    instruction.require(p.dstStride >= p.nSize, "dstStride >= nSize", p.dstStride);
    instruction.operand("src", src, in(Memory::kL0c), 64);
    for (uint32_t ni = 0; kChecked && ni < in_fractals(p.nSize); ++ni)
        instruction.read("src", src, uint64_t(ni) * p.srcStride * kFractal * sizeof(float), uint64_t(p.mSize) * kFractal * sizeof(float));
    for (uint32_t m = 0; kChecked && m < p.mSize; ++m)
        instruction.write("dst", dst, uint64_t(m) * p.dstStride * sizeof(T), uint64_t(p.nSize) * sizeof(T));
    store_matrix(dst.host_data(), src.host_data(), p);
}

}  // namespace AscendC
