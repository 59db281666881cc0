// Cube side of a product c[M, N] (+)= a[M, K] x b[K, N], one L0A tile and as many L0B chunks as it takes. Legend: M1, N1, K1 in fractals of 16.
#pragma once
#include "fractals.h"
#include "kernel_operator.h"

namespace megatron_ext {

constexpr uint32_t kAttentionL0Elements = 16384;  // half of L0A or L0B, so that loading overlaps with multiplying

// rows x columns of a matrix in global memory, whose rows are `stride` apart, to NZ in L1 with `height` rows, every `step`-th one from dst on.
template <typename T>
__aicore__ inline void AttentionLoadRows(const AscendC::LocalTensor<T>& dst, const AscendC::GlobalTensor<T>& src, int64_t rows, int64_t columns,
                                         int64_t stride, int64_t height, int64_t step = 1) {
    AscendC::DataCopy(dst, src, AscendC::Nd2NzParams(1, uint16_t(rows), uint16_t(columns), 0, uint16_t(stride), uint16_t(height), uint16_t(step), 0));
}

// How an operand lies in L1: its rows run along k, or across it (a row for each k).
enum class AttentionOperand { kAlongK, kAcrossK };

template <typename T>
class AttentionProduct {
 public:
    __aicore__ inline void Init(AscendC::TPipe* pipe) {
        pipe->InitBuffer(a_, 2, kAttentionL0Elements * sizeof(T));
        pipe->InitBuffer(b_, 2, kAttentionL0Elements * sizeof(T));
    }

    // Alignment 2, reduce order: one accumulator through k, in one Mmad. first: c starts at +0; otherwise its accumulators continue.
    template <AttentionOperand a_form, AttentionOperand b_form>
    __aicore__ inline void Multiply(const AscendC::LocalTensor<float>& c, const AscendC::LocalTensor<T>& a, const AscendC::LocalTensor<T>& b,
                                    uint32_t m, uint32_t n, uint32_t k, bool first) {
        LoadA<a_form>(a, m / kSide, k / kSide);
        AscendC::LocalTensor<T> left = a_.template DeQue<T>();
        const uint32_t chunk = kAttentionL0Elements / k / kSide * kSide;
        for (uint32_t at = 0; at < n; at += chunk) {
            const uint32_t columns = n - at < chunk ? n - at : chunk;
            LoadB<b_form>(b, n / kSide, k / kSide, at / kSide, columns / kSide);
            AscendC::LocalTensor<T> right = b_.template DeQue<T>();
            if (!first && m / kSide * (columns / kSide) < kMmadOrderedFrom)
                AscendC::PipeBarrier<PIPE_M>();
            AscendC::Mmad(c[at * m], left, right, AscendC::MmadParams(uint16_t(m), uint16_t(columns), uint16_t(k), 0, false, first));
            b_.FreeTensor(right);
        }
        a_.FreeTensor(left);
    }

 private:
    AscendC::TQue<AscendC::TPosition::A2, 2> a_;
    AscendC::TQue<AscendC::TPosition::B2, 2> b_;

    template <AttentionOperand form>
    __aicore__ inline void LoadA(const AscendC::LocalTensor<T>& a, uint32_t m1, uint32_t k1) {
        AscendC::LocalTensor<T> to = a_.template AllocTensor<T>();
        for (uint32_t i = 0; i < m1; ++i) {
            const AscendC::LocalTensor<T> row = to[i * k1 * kFractalSize];
            if constexpr (form == AttentionOperand::kAlongK)
                AscendC::LoadData(row, a, AscendC::LoadData2DParams(uint16_t(i), uint8_t(k1), uint16_t(m1), 0, 0, false, 0));
            else
                AscendC::LoadData(row, a, AscendC::LoadData2DParams(uint16_t(i * k1), uint8_t(k1), 1, 0, 0, true, 0));
        }
        a_.EnQue(to);
    }

    template <AttentionOperand form>
    __aicore__ inline void LoadB(const AscendC::LocalTensor<T>& b, uint32_t n1, uint32_t k1, uint32_t first, uint32_t count) {
        AscendC::LocalTensor<T> to = b_.template AllocTensor<T>();
        for (uint32_t i = 0; i < k1; ++i) {
            const AscendC::LocalTensor<T> row = to[i * count * kFractalSize];
            if constexpr (form == AttentionOperand::kAlongK)
                AscendC::LoadData(row, b, AscendC::LoadData2DParams(uint16_t(i * n1 + first), uint8_t(count), 1, 0, 0, false, 0));
            else
                AscendC::LoadDataWithTranspose(
                    row, b, AscendC::LoadData2dTransposeParams(uint16_t(i + first * k1), uint8_t(count), uint16_t(k1), 0, 0));
        }
        b_.EnQue(to);
    }
};

}  // namespace megatron_ext
