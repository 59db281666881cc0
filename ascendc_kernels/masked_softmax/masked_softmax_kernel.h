// Softmax of a row with a scale and a mask, in the order and with the roundings of megatron_ext/reference/softmax.py. Legend: K keys of a row.
#pragma once
#include "kernel_operator.h"
#include "masked_softmax_tiling.h"

namespace megatron_ext {

constexpr uint32_t kSoftmaxRepeat = MEGATRON_EXT_ROW_SUM_BLOCK;  // fp32 lanes of a repeat, which ReduceSum adds as one tree
constexpr uint32_t kSoftmaxTile = uint32_t(kMaskedSoftmaxTile);
constexpr uint32_t kSoftmaxOne = 8;  // fp32 elements of the smallest buffer, one DataBlock

// A sum in blocks of 64 over tiles of a row, and numbers of one lane.
class SoftmaxSum {
 public:
    __aicore__ inline void Init(AscendC::TPipe* pipe) {
        pipe->InitBuffer(terms_buffer_, (kSoftmaxRepeat + kSoftmaxTile) * sizeof(float));
        pipe->InitBuffer(scratch_buffer_, (kSoftmaxTile / kSoftmaxRepeat + kSoftmaxOne) * sizeof(float));
        pipe->InitBuffer(one_buffer_, kSoftmaxOne * sizeof(float));
        running_ = terms_buffer_.Get<float>();
        terms_ = running_[kSoftmaxRepeat];
        scratch_ = scratch_buffer_.Get<float>();
        one_ = one_buffer_.Get<float>();
    }

    __aicore__ inline void Start() const {
        AscendC::Duplicate(running_, 0.0f, int32_t(kSoftmaxRepeat));
    }

    // +0 in the lanes from `count` to the end of a repeat, before terms are written: a masked lane in a sum tree is undocumented.
    __aicore__ inline void Pad(uint32_t count) const {
        if (count % kSoftmaxRepeat == 0) return;
        AscendC::Duplicate(terms_[count / kSoftmaxRepeat * kSoftmaxRepeat], 0.0f, int32_t(kSoftmaxRepeat));
        AscendC::PipeBarrier<PIPE_V>();
    }

    // The running sum is lane 0 of a repeat of its own, in front of a tile's terms: ReduceSum goes on where the last tile ended.
    __aicore__ inline void Add(uint32_t count) const {
        const uint32_t padded = (count + kSoftmaxRepeat - 1) / kSoftmaxRepeat * kSoftmaxRepeat;
        AscendC::ReduceSum<float>(one_, running_, scratch_, int32_t(kSoftmaxRepeat + padded));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Adds(running_, one_, 0.0f, 1);
    }

    // Element 0 as a number of the scalar unit, after what the vector unit was told before and before what it is told next.
    __aicore__ inline float Scalar(const AscendC::LocalTensor<float>& x) const {
        AscendC::SetFlag<AscendC::HardEvent::V_S>(0);
        AscendC::WaitFlag<AscendC::HardEvent::V_S>(0);
        const float value = x.GetValue(0);
        AscendC::SetFlag<AscendC::HardEvent::S_V>(0);
        AscendC::WaitFlag<AscendC::HardEvent::S_V>(0);
        return value;
    }

    static __aicore__ inline uint32_t TileOf(int64_t first, int64_t end) {
        return uint32_t(end - first < kMaskedSoftmaxTile ? end - first : kMaskedSoftmaxTile);
    }

    AscendC::LocalTensor<float> terms_;  // of a tile
    AscendC::LocalTensor<float> running_, scratch_, one_;

 private:
    AscendC::TBuf<AscendC::TPosition::VECCALC> terms_buffer_, scratch_buffer_, one_buffer_;
};

// fp32 to T and back; a float is copied.
template <typename T>
__aicore__ inline void Widen(const AscendC::LocalTensor<float>& to, const AscendC::LocalTensor<T>& from, uint32_t count) {
    if constexpr (sizeof(T) == sizeof(float))
        AscendC::Adds(to, from, -0.0f, int32_t(count));
    else
        AscendC::Cast(to, from, AscendC::RoundMode::CAST_NONE, count);
    AscendC::PipeBarrier<PIPE_V>();
}

template <typename T>
__aicore__ inline void Round(const AscendC::LocalTensor<T>& to, const AscendC::LocalTensor<float>& from, uint32_t count) {
    if constexpr (sizeof(T) == sizeof(float))
        AscendC::Adds(to, from, -0.0f, int32_t(count));
    else
        AscendC::Cast(to, from, AscendC::RoundMode::CAST_RINT, count);
    AscendC::PipeBarrier<PIPE_V>();
}

template <typename T>
class MaskedSoftmax {
 public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR mask, GM_ADDR y, const MaskedSoftmaxTiling& tiling, AscendC::TPipe* pipe) {
        tiling_ = tiling;
        x_.SetGlobalBuffer((__gm__ T*)x, uint64_t(tiling.rows * tiling.keys));
        mask_.SetGlobalBuffer((__gm__ uint8_t*)mask);
        y_.SetGlobalBuffer((__gm__ T*)y, uint64_t(tiling.rows * tiling.keys));
        sum_.Init(pipe);
        pipe->InitBuffer(in_, 2, kSoftmaxTile * sizeof(T));
        pipe->InitBuffer(in_mask_, 2, kSoftmaxTile);
        pipe->InitBuffer(out_, 2, kSoftmaxTile * sizeof(T));
        pipe->InitBuffer(work_buffer_, kSoftmaxTile * sizeof(float));
        pipe->InitBuffer(denominator_buffer_, kSoftmaxTile * sizeof(float));
        pipe->InitBuffer(mask_buffer_, kSoftmaxTile * sizeof(half));
        pipe->InitBuffer(keep_buffer_, kSoftmaxTile / 8);
        pipe->InitBuffer(max_buffer_, kSoftmaxOne * sizeof(float));
        work_ = work_buffer_.template Get<float>();
        denominator_ = denominator_buffer_.template Get<float>();
        wide_mask_ = mask_buffer_.template Get<half>();
        keep_ = keep_buffer_.template Get<uint8_t>();
        max_ = max_buffer_.template Get<float>();
        AscendC::Duplicate(wide_mask_.template ReinterpretCast<int16_t>(), int16_t(0), int32_t(kSoftmaxTile));  // Compares reads whole repeats
    }

    __aicore__ inline void Process() {
        for (int64_t row = AscendC::GetBlockIdx(); row < tiling_.rows; row += AscendC::GetBlockNum()) {
            const int64_t end = Visible(row % tiling_.queries);
            if (end > 0) Visible(row, end);
            for (int64_t first = end; first < tiling_.keys; first += kMaskedSoftmaxTile) Nothing(row, first);
        }
    }

 private:
    MaskedSoftmaxTiling tiling_;
    SoftmaxSum sum_;
    AscendC::GlobalTensor<T> x_, y_;
    AscendC::GlobalTensor<uint8_t> mask_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_, in_mask_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> work_buffer_, denominator_buffer_, mask_buffer_, keep_buffer_, max_buffer_;
    AscendC::LocalTensor<float> work_, denominator_, max_;
    AscendC::LocalTensor<half> wide_mask_;
    AscendC::LocalTensor<uint8_t> keep_;  // a bit for each key that is not masked

    // Keys that a query sees; those behind add +0 to the sum, which changes nothing.
    __aicore__ inline int64_t Visible(int64_t query) const {
        if (!tiling_.causal) return tiling_.keys;
        const int64_t end = query + tiling_.keys - tiling_.queries + 1;
        return end < 0 ? 0 : end;
    }
    __aicore__ inline uint64_t MaskRow(int64_t row) const {
        const int64_t outer = row / tiling_.queries;
        return uint64_t(row % tiling_.queries * tiling_.query_stride + outer % tiling_.inner * tiling_.inner_stride +
                        outer / tiling_.inner * tiling_.outer_stride);
    }

    __aicore__ inline void Visible(int64_t row, int64_t end) {
        const bool again = end > kMaskedSoftmaxTile;  // the row does not stay in UB
        AscendC::Duplicate(max_, -__builtin_inff(), int32_t(kSoftmaxOne));
        for (int64_t first = 0; first < end; first += kMaskedSoftmaxTile) {
            Load(row, first, sum_.TileOf(first, end));
            Max(sum_.TileOf(first, end));
        }
        const float row_max = sum_.Scalar(max_);
        sum_.Start();
        for (int64_t first = 0; first < end; first += kMaskedSoftmaxTile) {
            const uint32_t count = sum_.TileOf(first, end);
            if (again) Load(row, first, count);
            sum_.Pad(count);
            Exponents(row_max, count);
            sum_.Add(count);
        }
        AscendC::Duplicate(denominator_, sum_.Scalar(sum_.one_), int32_t(sum_.TileOf(0, end)));
        AscendC::PipeBarrier<PIPE_V>();
        for (int64_t first = 0; first < end; first += kMaskedSoftmaxTile) {
            const uint32_t count = sum_.TileOf(first, end);
            if (again) {
                Load(row, first, count);
                Exponents(row_max, count);
            }
            Divide(count);
            Store(row, first, count);
        }
    }

    // work = x * scale, -inf where masked
    __aicore__ inline void Load(int64_t row, int64_t first, uint32_t count) {
        AscendC::LocalTensor<T> x = in_.template AllocTensor<T>();
        AscendC::DataCopyPad(x, x_[uint64_t(row * tiling_.keys + first)], AscendC::DataCopyExtParams(1, uint32_t(count * sizeof(T)), 0, 0, 0),
                             AscendC::DataCopyPadExtParams<T>());
        in_.EnQue(x);
        x = in_.template DeQue<T>();
        Widen(work_, x, count);
        in_.FreeTensor(x);
        AscendC::Muls(work_, work_, tiling_.scale, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        if (!tiling_.masked) return;
        LoadMask(MaskRow(row) + uint64_t(first), count);
        Keep(work_, -__builtin_inff(), count);
    }

    __aicore__ inline void LoadMask(uint64_t at, uint32_t count) {
        AscendC::LocalTensor<uint8_t> mask = in_mask_.template AllocTensor<uint8_t>();
        AscendC::DataCopyPad(mask, mask_[at], AscendC::DataCopyExtParams(1, count, 0, 0, 0), AscendC::DataCopyPadExtParams<uint8_t>());
        in_mask_.EnQue(mask);
        mask = in_mask_.template DeQue<uint8_t>();
        AscendC::Cast(wide_mask_, mask, AscendC::RoundMode::CAST_NONE, count);
        AscendC::PipeBarrier<PIPE_V>();
        in_mask_.FreeTensor(mask);
        AscendC::Compares(keep_, wide_mask_, half(0.0f), AscendC::CMPMODE::EQ, (count + 127) / 128 * 128);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // x where the key is not masked, else `instead`
    __aicore__ inline void Keep(const AscendC::LocalTensor<float>& x, float instead, uint32_t count) const {
        AscendC::Select(x, keep_, x, instead, AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, count);
        AscendC::PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void Max(uint32_t count) const {
        AscendC::ReduceMax(sum_.one_, work_, sum_.scratch_, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Max(max_, max_, sum_.one_, 1);
    }

    // terms = exp(work - max), +0 where masked
    __aicore__ inline void Exponents(float row_max, uint32_t count) const {
        AscendC::Adds(work_, work_, -row_max, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Exp(sum_.terms_, work_, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        if (tiling_.masked) Keep(sum_.terms_, 0.0f, count);
    }

    // work = terms / sum; 0 / 0 of a row that is masked as a whole is +0
    __aicore__ inline void Divide(uint32_t count) const {
        AscendC::Div(work_, sum_.terms_, denominator_, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        if (tiling_.masked) Keep(work_, 0.0f, count);
    }

    __aicore__ inline void Store(int64_t row, int64_t first, uint32_t count) {
        AscendC::LocalTensor<T> y = out_.template AllocTensor<T>();
        Round(y, work_, count);
        out_.EnQue(y);
        y = out_.template DeQue<T>();
        AscendC::DataCopyPad(y_[uint64_t(row * tiling_.keys + first)], y, AscendC::DataCopyExtParams(1, uint32_t(count * sizeof(T)), 0, 0, 0));
        out_.FreeTensor(y);
    }

    // +0 for keys that come after the query
    __aicore__ inline void Nothing(int64_t row, int64_t first) {
        const uint32_t count = sum_.TileOf(first, tiling_.keys);
        AscendC::Duplicate(work_, 0.0f, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        Store(row, first, count);
    }
};

}  // namespace megatron_ext
