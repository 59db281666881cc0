// Products on the cube core: C[m][n] += A[m][k] x B[k][n] for matrices in global memory, one accumulator in L0C in ascending k.
//
// How k is cut into loads does not show in a result; cuts are at multiples of 16, so that groups of 16 stay whole. m and n are padded to 16: a
// single row would switch the hardware to another mode, and a row's bits must not depend on how many rows there are.
#pragma once
#include "fractals.h"
#include "kernel_operator.h"

namespace megatron_ext {

constexpr uint32_t kCubeL1Depth = 256;  // k of a load to L1: rows of 512 bytes
constexpr uint32_t kCubeL0Depth = 128;  // k of an Mmad: 32 KB of a tile of 128, so that L0A and L0B hold two

__aicore__ inline uint32_t InFractals(uint32_t size) { return (size + kSide - 1) / kSide; }
__aicore__ inline uint32_t Padded(uint32_t size) { return InFractals(size) * kSide; }

// A matrix in global memory. rows_are_k: its rows run along k, its columns along m or n.
template <typename T>
struct CubeOperand {
    AscendC::GlobalTensor<T> data;
    int64_t stride;
    bool rows_are_k;

    __aicore__ inline AscendC::GlobalTensor<T> At(int64_t outer, int64_t k) const {
        return data[uint64_t(rows_are_k ? k * stride + outer : outer * stride + k)];
    }
};

// rows x columns to L1 in NZ; rows beyond, up to a whole fractal, repeat the first if `pad`. Columns beyond are zero.
template <typename T>
__aicore__ inline void LoadMatrix(const AscendC::LocalTensor<T>& dst, const AscendC::GlobalTensor<T>& src, uint32_t rows, uint32_t columns,
                                  int64_t stride, bool pad) {
    const uint16_t padded = uint16_t(Padded(rows));
    if (stride <= kNd2NzMaxStride)
        AscendC::DataCopy(dst, src, AscendC::Nd2NzParams(1, uint16_t(rows), uint16_t(columns), 0, uint16_t(stride), padded, 1, 0));
    else
        for (uint32_t i = 0; i < rows; ++i)
            AscendC::DataCopy(dst[i * kSide], src[uint64_t(i) * uint64_t(stride)],
                              AscendC::Nd2NzParams(1, 1, uint16_t(columns), 0, uint16_t(columns), padded, 1, 0));
    if (pad && rows < padded)
        AscendC::DataCopy(dst[rows * kSide], src,
                          AscendC::Nd2NzParams(uint16_t(padded - rows), 1, uint16_t(columns), 0, uint16_t(columns), padded, 1, uint16_t(kSide)));
}

template <typename T>
class CubeProduct {
 public:
    // Tiles of up to tile_m x tile_n.
    __aicore__ inline void Init(uint32_t tile_m, uint32_t tile_n, AscendC::TPipe* pipe) {
        pipe->InitBuffer(a1_, 2, tile_m * kCubeL1Depth * sizeof(T));
        pipe->InitBuffer(b1_, 2, tile_n * kCubeL1Depth * sizeof(T));
        pipe->InitBuffer(a2_, 2, tile_m * kCubeL0Depth * sizeof(T));
        pipe->InitBuffer(b2_, 2, tile_n * kCubeL0Depth * sizeof(T));
    }

    // The tile at row m0 of A and column n0 of B, through k in [k0, k0 + length). starts: C begins at +0.
    __aicore__ inline void Accumulate(const AscendC::LocalTensor<float>& c, const CubeOperand<T>& a, const CubeOperand<T>& b, int64_t m0, uint32_t m,
                                      int64_t n0, uint32_t n, int64_t k0, int64_t length, bool starts) {
        for (int64_t k = 0; k < length; k += kCubeL1Depth) {
            const uint32_t depth = uint32_t(length - k < kCubeL1Depth ? length - k : kCubeL1Depth);
            CopyIn(a1_, a, m0, m, k0 + k, depth);
            CopyIn(b1_, b, n0, n, k0 + k, depth);
            AscendC::LocalTensor<T> a1 = a1_.template DeQue<T>();
            AscendC::LocalTensor<T> b1 = b1_.template DeQue<T>();
            for (uint32_t at = 0; at < depth; at += kCubeL0Depth) {
                const uint32_t here = depth - at < kCubeL0Depth ? depth - at : kCubeL0Depth;
                SplitA(a1, a.rows_are_k, InFractals(m), InFractals(depth), at / kSide, InFractals(here));
                SplitB(b1, b.rows_are_k, InFractals(n), InFractals(depth), at / kSide, InFractals(here));
                Multiply(c, Padded(m), Padded(n), here, starts && k + at == 0);
            }
            a1_.FreeTensor(a1);
            b1_.FreeTensor(b1);
        }
    }

    // L0A and L0B, also for products that a kernel puts together itself: see LinearWgradSum.
    AscendC::TQue<AscendC::TPosition::A2, 2> a2_;
    AscendC::TQue<AscendC::TPosition::B2, 2> b2_;

 private:
    AscendC::TQue<AscendC::TPosition::A1, 2> a1_;
    AscendC::TQue<AscendC::TPosition::B1, 2> b1_;

    template <typename Queue>
    __aicore__ inline void CopyIn(Queue& queue, const CubeOperand<T>& operand, int64_t outer0, uint32_t outer, int64_t k, uint32_t depth) {
        AscendC::LocalTensor<T> tile = queue.template AllocTensor<T>();
        if (operand.rows_are_k)
            LoadMatrix(tile, operand.At(outer0, k), depth, outer, operand.stride, false);  // Mmad takes no row of k beyond its depth
        else
            LoadMatrix(tile, operand.At(outer0, k), outer, depth, operand.stride, true);
        queue.EnQue(tile);
    }

    // Fractals [first, first + k1) of k, of k1_loaded in L1, to L0A: row of fractals after row of fractals.
    __aicore__ inline void SplitA(const AscendC::LocalTensor<T>& a1, bool rows_are_k, uint32_t m1, uint32_t k1_loaded, uint32_t first, uint32_t k1) {
        AscendC::LocalTensor<T> a2 = a2_.template AllocTensor<T>();
        for (uint32_t i = 0; i < m1; ++i) {
            const uint32_t from = rows_are_k ? i * k1_loaded + first : first * m1 + i;
            const uint16_t step = uint16_t(rows_are_k ? 1 : m1);
            AscendC::LoadData(a2[i * k1 * kFractalSize], a1, AscendC::LoadData2DParams(uint16_t(from), uint8_t(k1), step, 0, 0, rows_are_k, 0));
        }
        a2_.EnQue(a2);
    }

    // To L0B: the fractals of a k side by side.
    __aicore__ inline void SplitB(const AscendC::LocalTensor<T>& b1, bool rows_are_k, uint32_t n1, uint32_t k1_loaded, uint32_t first, uint32_t k1) {
        AscendC::LocalTensor<T> b2 = b2_.template AllocTensor<T>();
        if (!rows_are_k)
            AscendC::LoadData(b2, b1, AscendC::LoadData2DParams(uint16_t(first * n1), uint8_t(k1 * n1), 1, 0, 0, false, 0));
        else
            for (uint32_t i = 0; i < k1; ++i)
                AscendC::LoadDataWithTranspose(b2[i * n1 * kFractalSize], b1,
                                               AscendC::LoadData2dTransposeParams(uint16_t(first + i), uint8_t(n1), uint16_t(k1_loaded), 0, 0));
        b2_.EnQue(b2);
    }

    __aicore__ inline void Multiply(const AscendC::LocalTensor<float>& c, uint32_t m, uint32_t n, uint32_t k, bool starts) {
        AscendC::LocalTensor<T> a2 = a2_.template DeQue<T>();
        AscendC::LocalTensor<T> b2 = b2_.template DeQue<T>();
        AscendC::Mmad(c, a2, b2, AscendC::MmadParams(uint16_t(m), uint16_t(n), uint16_t(k), 0, false, starts));
        if (InFractals(m) * InFractals(n) < kMmadOrderedFrom)
            AscendC::PipeBarrier<PIPE_M>();
        a2_.FreeTensor(a2);
        b2_.FreeTensor(b2);
    }
};

}  // namespace megatron_ext
