// Masked sums and whitening (megatron_ext/reference/returns.py). Blocks of 64 from a sequence's first token, an adjacent-pair tree inside a block,
// blocks one after another from +0: ReduceSum by count on A2/A3. Sequences are added by one block, in their order.
#pragma once
#include "kernel_operator.h"
#include "returns_tiling.h"

namespace megatron_ext {

constexpr uint32_t kReturnsRepeat = MEGATRON_EXT_ROW_SUM_BLOCK;  // fp32 lanes of a repeat, which ReduceSum adds as one tree
constexpr uint32_t kReturnsOne = 8;                              // fp32 elements of the smallest buffer, one DataBlock

__aicore__ inline AscendC::DataCopyExtParams FloatRow(uint32_t count) {
    return AscendC::DataCopyExtParams(1, uint32_t(count * sizeof(float)), 0, 0, 0);
}

// A tile of numbers and of their mask: which of them count.
class MaskedTile {
 public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR mask, uint64_t size, AscendC::TPipe* pipe) {
        x_.SetGlobalBuffer((__gm__ float*)x, size);
        mask_.SetGlobalBuffer((__gm__ float*)mask, size);
        pipe->InitBuffer(in_, 2, 2 * kReturnsTile * sizeof(float));
        pipe->InitBuffer(mask_buffer_, kReturnsTile * sizeof(float));
        pipe->InitBuffer(bits_buffer_, kReturnsTile / 8);
        wide_mask_ = mask_buffer_.Get<float>();
        kept_ = bits_buffer_.Get<uint8_t>();
        AscendC::Duplicate(wide_mask_, 0.0f, int32_t(kReturnsTile));  // Compares reads whole repeats
        AscendC::PipeBarrier<PIPE_V>();
    }

    // x[first, first + count), and kept_; give x back by in_.FreeTensor.
    __aicore__ inline AscendC::LocalTensor<float> Load(int64_t first, uint32_t count) {
        AscendC::LocalTensor<float> x = in_.AllocTensor<float>();
        AscendC::DataCopyPad(x, x_[uint64_t(first)], FloatRow(count), AscendC::DataCopyPadExtParams<float>());
        AscendC::DataCopyPad(x[uint32_t(kReturnsTile)], mask_[uint64_t(first)], FloatRow(count), AscendC::DataCopyPadExtParams<float>());
        in_.EnQue(x);
        x = in_.DeQue<float>();
        AscendC::Adds(wide_mask_, x[uint32_t(kReturnsTile)], -0.0f, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Compares(kept_, wide_mask_, 0.0f, AscendC::CMPMODE::NE, Padded(count));
        AscendC::PipeBarrier<PIPE_V>();
        return x;
    }

    static __aicore__ inline uint32_t Padded(uint32_t count) { return (count + kReturnsRepeat - 1) / kReturnsRepeat * kReturnsRepeat; }
    static __aicore__ inline uint32_t CountOf(int64_t first, int64_t end) {
        return uint32_t(end - first < kReturnsTile ? end - first : kReturnsTile);
    }

    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_;  // [x | mask]
    AscendC::LocalTensor<uint8_t> kept_;

 private:
    AscendC::GlobalTensor<float> x_, mask_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> mask_buffer_, bits_buffer_;
    AscendC::LocalTensor<float> wide_mask_;
};

// sums[n] = row_sum of x[n], or of (x[n] - centre)^2, +0 where the mask leaves a token out.
class MaskedSum {
 public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR mask, GM_ADDR centre, GM_ADDR sums, const MaskedSumTiling& tiling, AscendC::TPipe* pipe) {
        tiling_ = tiling;
        tile_.Init(x, mask, uint64_t(tiling.sequences * tiling.tokens), pipe);
        centre_.SetGlobalBuffer((__gm__ float*)centre, 1);
        sums_.SetGlobalBuffer((__gm__ float*)sums, uint64_t(tiling.sequences));
        pipe->InitBuffer(out_, 2, kReturnsOne * sizeof(float));
        pipe->InitBuffer(terms_buffer_, (kReturnsRepeat + kReturnsTile) * sizeof(float));
        pipe->InitBuffer(scratch_buffer_, (kReturnsTile / kReturnsRepeat + kReturnsOne) * sizeof(float));
        running_ = terms_buffer_.Get<float>();
        terms_ = running_[kReturnsRepeat];
        scratch_ = scratch_buffer_.Get<float>();
    }

    __aicore__ inline void Process() {
        const float centre = tiling_.squared ? centre_.GetValue(0) : 0.0f;
        for (int64_t n = AscendC::GetBlockIdx(); n < tiling_.sequences; n += AscendC::GetBlockNum()) {
            AscendC::LocalTensor<float> sum = out_.AllocTensor<float>();
            AscendC::Duplicate(running_, 0.0f, int32_t(kReturnsRepeat));
            for (int64_t first = 0; first < tiling_.tokens; first += kReturnsTile)
                Add(sum, n * tiling_.tokens + first, MaskedTile::CountOf(first, tiling_.tokens), centre);
            out_.EnQue(sum);
            sum = out_.DeQue<float>();
            AscendC::DataCopyPad(sums_[uint64_t(n)], sum, FloatRow(1));
            out_.FreeTensor(sum);
        }
    }

 private:
    MaskedSumTiling tiling_;
    MaskedTile tile_;
    AscendC::GlobalTensor<float> centre_, sums_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> terms_buffer_, scratch_buffer_;
    AscendC::LocalTensor<float> running_, terms_, scratch_;  // the running sum is lane 0 of a repeat in front of a tile's terms

    __aicore__ inline void Add(const AscendC::LocalTensor<float>& sum, int64_t first, uint32_t count, float centre) {
        const uint32_t padded = MaskedTile::Padded(count);
        // a masked lane in a sum tree is undocumented
        if (padded > count) AscendC::Duplicate(terms_[padded - kReturnsRepeat], 0.0f, int32_t(kReturnsRepeat));
        AscendC::LocalTensor<float> x = tile_.Load(first, count);
        if (tiling_.squared) {
            AscendC::Adds(x, x, -centre, int32_t(count));
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Mul(x, x, x, int32_t(count));
            AscendC::PipeBarrier<PIPE_V>();
        }
        AscendC::Select(terms_, tile_.kept_, x, 0.0f, AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, count);
        AscendC::PipeBarrier<PIPE_V>();
        tile_.in_.FreeTensor(x);
        AscendC::ReduceSum<float>(sum, running_, scratch_, int32_t(kReturnsRepeat + padded));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Adds(running_, sum, 0.0f, 1);
        AscendC::PipeBarrier<PIPE_V>();
    }
};

// One number after another from +0, by one block. Numbers lie a DataBlock apart, so that each can be the operand of a vector instruction.
class Total {
 public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR total, const TotalTiling& tiling, AscendC::TPipe* pipe) {
        count_ = tiling.count;
        x_.SetGlobalBuffer((__gm__ float*)x, uint64_t(count_));
        total_.SetGlobalBuffer((__gm__ float*)total, 1);
        pipe->InitBuffer(in_, 2, uint32_t(kTotalTile * kReturnsOne * sizeof(float)));
        pipe->InitBuffer(out_, 1, kReturnsOne * sizeof(float));
    }

    __aicore__ inline void Process() {
        AscendC::LocalTensor<float> total = out_.AllocTensor<float>();
        AscendC::Duplicate(total, 0.0f, 1);
        AscendC::PipeBarrier<PIPE_V>();
        for (int64_t first = 0; first < count_; first += kTotalTile) Add(total, first, uint32_t(count_ - first < kTotalTile ? count_ - first : kTotalTile));
        out_.EnQue(total);
        total = out_.DeQue<float>();
        AscendC::DataCopyPad(total_, total, FloatRow(1));
        out_.FreeTensor(total);
    }

 private:
    int64_t count_;
    AscendC::GlobalTensor<float> x_, total_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> out_;

    __aicore__ inline void Add(const AscendC::LocalTensor<float>& total, int64_t first, uint32_t count) {
        AscendC::LocalTensor<float> x = in_.AllocTensor<float>();
        AscendC::DataCopyPad(x, x_[uint64_t(first)], AscendC::DataCopyExtParams(uint16_t(count), sizeof(float), 0, 0, 0),
                             AscendC::DataCopyPadExtParams<float>());
        in_.EnQue(x);
        x = in_.DeQue<float>();
        for (uint32_t i = 0; i < count; ++i) {
            AscendC::Add(total, total, x[i * kReturnsOne], 1);
            AscendC::PipeBarrier<PIPE_V>();
        }
        in_.FreeTensor(x);
    }
};

// y = (x - mean) / sqrt(variance + eps), +0 where the mask leaves a token out.
class Whiten {
 public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR mask, GM_ADDR mean, GM_ADDR variance, GM_ADDR y, const WhitenTiling& tiling, AscendC::TPipe* pipe) {
        tiling_ = tiling;
        tile_.Init(x, mask, uint64_t(tiling.size), pipe);
        mean_.SetGlobalBuffer((__gm__ float*)mean, 1);
        variance_.SetGlobalBuffer((__gm__ float*)variance, 1);
        y_.SetGlobalBuffer((__gm__ float*)y, uint64_t(tiling.size));
        pipe->InitBuffer(out_, 2, kReturnsTile * sizeof(float));
        pipe->InitBuffer(deviation_buffer_, kReturnsTile * sizeof(float));
        deviation_ = deviation_buffer_.Get<float>();
    }

    __aicore__ inline void Process() {
        Deviation();
        const float mean = mean_.GetValue(0);
        for (int64_t first = AscendC::GetBlockIdx() * kReturnsTile; first < tiling_.size; first += AscendC::GetBlockNum() * kReturnsTile)
            Tile(first, MaskedTile::CountOf(first, tiling_.size), mean);
    }

 private:
    WhitenTiling tiling_;
    MaskedTile tile_;
    AscendC::GlobalTensor<float> mean_, variance_, y_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> deviation_buffer_;
    AscendC::LocalTensor<float> deviation_;  // a tile of the standard deviation

    __aicore__ inline void Deviation() const {
        AscendC::Duplicate(deviation_, variance_.GetValue(0), int32_t(kReturnsTile));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Adds(deviation_, deviation_, tiling_.eps, int32_t(kReturnsTile));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sqrt(deviation_, deviation_, int32_t(kReturnsTile));
    }

    __aicore__ inline void Tile(int64_t first, uint32_t count, float mean) {
        AscendC::LocalTensor<float> x = tile_.Load(first, count);
        AscendC::LocalTensor<float> y = out_.AllocTensor<float>();
        AscendC::Adds(x, x, -mean, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Div(x, x, deviation_, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Select(y, tile_.kept_, x, 0.0f, AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, count);
        tile_.in_.FreeTensor(x);
        out_.EnQue(y);
        y = out_.DeQue<float>();
        AscendC::DataCopyPad(y_[uint64_t(first)], y, FloatRow(count));
        out_.FreeTensor(y);
    }
};

}  // namespace megatron_ext
