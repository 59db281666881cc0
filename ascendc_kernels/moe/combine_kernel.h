// Sum of a token's expert outputs by the expert tree, and its gradient (megatron_ext/reference/moe.py). Legend: T tokens, R rows, H hidden.
//
// A token's rows come in ascending experts. Segments of experts are the leaves of a balanced tree; the sums that wait for a neighbour lie in UB, the
// left ones below. Two neighbouring sums a, b are joined when the next segment c is farther from b, in the tree, than a is: then nothing else belongs
// between them. The highest bit in which two segments differ is the height at which their branches meet, and the two heights never are equal.
#pragma once
#include "../masked_softmax/masked_softmax_kernel.h"
#include "moe_tiling.h"

namespace megatron_ext {

// kFinish: a whole tree. +0 is added at the root, so that a leaf that is absent and one that is +0 give the same.
template <typename T, typename Out, bool kFinish>
class Combine {
 public:
    __aicore__ inline void Init(GM_ADDR y, GM_ADDR weights, GM_ADDR order, GM_ADDR experts, GM_ADDR starts, GM_ADDR out, const CombineTiling& tiling,
                                AscendC::TPipe* pipe) {
        tiling_ = tiling;
        y_.SetGlobalBuffer((__gm__ T*)y, uint64_t(tiling.rows * tiling.hidden));
        weights_.SetGlobalBuffer((__gm__ float*)weights, uint64_t(tiling.rows));
        order_.SetGlobalBuffer((__gm__ int64_t*)order, uint64_t(tiling.rows));
        experts_.SetGlobalBuffer((__gm__ int64_t*)experts, uint64_t(tiling.rows));
        starts_.SetGlobalBuffer((__gm__ int64_t*)starts, uint64_t(tiling.tokens + 1));
        out_.SetGlobalBuffer((__gm__ Out*)out, uint64_t(tiling.tokens * tiling.hidden));
        const uint32_t columns = uint32_t(tiling.tile_columns);
        pipe->InitBuffer(in_queue_, 2, columns * sizeof(T));
        pipe->InitBuffer(out_queue_, 2, columns * sizeof(Out));
        pipe->InitBuffer(leaf_buffer_, columns * sizeof(float));
        pipe->InitBuffer(sums_buffer_, uint32_t(tiling.depth) * columns * sizeof(float));
        leaf_ = leaf_buffer_.template Get<float>();
        sums_ = sums_buffer_.template Get<float>();
    }

    __aicore__ inline void Process() {
        const int64_t column_tiles = (tiling_.hidden + tiling_.tile_columns - 1) / tiling_.tile_columns;
        for (int64_t i = AscendC::GetBlockIdx(); i < tiling_.tokens * column_tiles; i += AscendC::GetBlockNum()) {
            const int64_t token = i / column_tiles, column = i % column_tiles * tiling_.tile_columns, left = tiling_.hidden - column;
            const uint32_t columns = uint32_t(left < tiling_.tile_columns ? left : tiling_.tile_columns);
            Sum(token, column, columns);
            Store(token * tiling_.hidden + column, columns);
        }
    }

 private:
    CombineTiling tiling_;
    AscendC::GlobalTensor<T> y_;
    AscendC::GlobalTensor<float> weights_;
    AscendC::GlobalTensor<int64_t> order_, experts_, starts_;
    AscendC::GlobalTensor<Out> out_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_queue_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_queue_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> leaf_buffer_, sums_buffer_;
    AscendC::LocalTensor<float> leaf_, sums_;

    __aicore__ inline AscendC::LocalTensor<float> Waiting(int64_t i) const { return sums_[uint32_t(i * tiling_.tile_columns)]; }

    // Leaves the root in Waiting(0).
    __aicore__ inline void Sum(int64_t token, int64_t column, uint32_t columns) {
        int64_t segments[kCombineMaxDepth], waiting = 0;
        for (int64_t i = starts_.GetValue(uint64_t(token)); i < starts_.GetValue(uint64_t(token + 1)); ++i) {
            const int64_t row = order_.GetValue(uint64_t(i)), segment = experts_.GetValue(uint64_t(row)) / tiling_.experts_per_segment;
            if (waiting > 0 && segments[waiting - 1] == segment) {
                Leaf(leaf_, row, column, columns);
                AddTo(Waiting(waiting - 1), leaf_, columns);
                continue;
            }
            while (waiting > 1 && (segments[waiting - 2] ^ segments[waiting - 1]) < (segments[waiting - 1] ^ segment)) Join(--waiting, columns);
            segments[waiting] = segment;
            Leaf(Waiting(waiting++), row, column, columns);
        }
        if (waiting == 0) {
            AscendC::Duplicate(Waiting(0), 0.0f, int32_t(columns));
            AscendC::PipeBarrier<PIPE_V>();
        }
        while (waiting > 1) Join(--waiting, columns);
    }

    __aicore__ inline void Join(int64_t right, uint32_t columns) const { AddTo(Waiting(right - 1), Waiting(right), columns); }

    __aicore__ inline void AddTo(const AscendC::LocalTensor<float>& sum, const AscendC::LocalTensor<float>& x, uint32_t columns) const {
        AscendC::Add(sum, sum, x, int32_t(columns));
        AscendC::PipeBarrier<PIPE_V>();
    }

    // leaf = weight * y, rounded as a product
    __aicore__ inline void Leaf(const AscendC::LocalTensor<float>& leaf, int64_t row, int64_t column, uint32_t columns) {
        AscendC::LocalTensor<T> y = in_queue_.template AllocTensor<T>();
        AscendC::DataCopyPad(y, y_[uint64_t(row * tiling_.hidden + column)], AscendC::DataCopyExtParams(1, uint32_t(columns * sizeof(T)), 0, 0, 0),
                             AscendC::DataCopyPadExtParams<T>());
        in_queue_.EnQue(y);
        y = in_queue_.template DeQue<T>();
        Widen(leaf, y, columns);
        in_queue_.FreeTensor(y);
        AscendC::Muls(leaf, leaf, weights_.GetValue(uint64_t(row)), int32_t(columns));
        AscendC::PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void Store(int64_t to, uint32_t columns) {
        AscendC::LocalTensor<Out> out = out_queue_.template AllocTensor<Out>();
        if constexpr (kFinish) {
            AscendC::Adds(Waiting(0), Waiting(0), 0.0f, int32_t(columns));
            AscendC::PipeBarrier<PIPE_V>();
        }
        Round(out, Waiting(0), columns);
        out_queue_.EnQue(out);
        out = out_queue_.template DeQue<Out>();
        AscendC::DataCopyPad(out_[uint64_t(to)], out, AscendC::DataCopyExtParams(1, uint32_t(columns * sizeof(Out)), 0, 0, 0));
        out_queue_.FreeTensor(out);
    }
};

// dy = round(dout * weight), dweight = sum(dout * y), row after row, dout being that of the row's token.
template <typename T>
class CombineBackward {
 public:
    __aicore__ inline void Init(GM_ADDR dout, GM_ADDR y, GM_ADDR weights, GM_ADDR tokens, GM_ADDR dy, GM_ADDR dweights, const CombineBackwardTiling& tiling,
                                AscendC::TPipe* pipe) {
        tiling_ = tiling;
        dout_.SetGlobalBuffer((__gm__ float*)dout);
        y_.SetGlobalBuffer((__gm__ T*)y, uint64_t(tiling.rows * tiling.hidden));
        weights_.SetGlobalBuffer((__gm__ float*)weights, uint64_t(tiling.rows));
        tokens_.SetGlobalBuffer((__gm__ int64_t*)tokens, uint64_t(tiling.rows));
        dy_.SetGlobalBuffer((__gm__ T*)dy, uint64_t(tiling.rows * tiling.hidden));
        dweights_.SetGlobalBuffer((__gm__ float*)dweights, uint64_t(tiling.rows));
        sum_.Init(pipe);
        pipe->InitBuffer(in_dout_, 2, kTile * sizeof(float));
        pipe->InitBuffer(in_y_, 2, kTile * sizeof(T));
        pipe->InitBuffer(out_dy_, 2, kTile * sizeof(T));
        pipe->InitBuffer(out_sum_, 2, kSoftmaxOne * sizeof(float));
        pipe->InitBuffer(work_buffer_, kTile * sizeof(float));
        work_ = work_buffer_.template Get<float>();
    }

    __aicore__ inline void Process() {
        for (int64_t row = AscendC::GetBlockIdx(); row < tiling_.rows; row += AscendC::GetBlockNum()) {
            sum_.Start();
            for (int64_t first = 0; first < tiling_.hidden; first += kTile) {
                const uint32_t count = uint32_t(tiling_.hidden - first < kTile ? tiling_.hidden - first : kTile);
                Tile(tokens_.GetValue(uint64_t(row)) * tiling_.hidden + first, row * tiling_.hidden + first, weights_.GetValue(uint64_t(row)), count);
            }
            StoreSum(row);
        }
    }

 private:
    static constexpr int64_t kTile = kCombineBackwardTile;
    static_assert(kTile == kMaskedSoftmaxTile, "terms of a tile are summed by SoftmaxSum");

    CombineBackwardTiling tiling_;
    SoftmaxSum sum_;
    AscendC::GlobalTensor<float> dout_, weights_, dweights_;
    AscendC::GlobalTensor<int64_t> tokens_;
    AscendC::GlobalTensor<T> y_, dy_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_dout_, in_y_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_dy_, out_sum_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> work_buffer_;
    AscendC::LocalTensor<float> work_;

    __aicore__ inline void Tile(int64_t at_token, int64_t at_row, float weight, uint32_t count) {
        const AscendC::DataCopyExtParams narrow(1, uint32_t(count * sizeof(T)), 0, 0, 0), wide(1, uint32_t(count * sizeof(float)), 0, 0, 0);
        AscendC::LocalTensor<float> dout = in_dout_.template AllocTensor<float>();
        AscendC::DataCopyPad(dout, dout_[uint64_t(at_token)], wide, AscendC::DataCopyPadExtParams<float>());
        in_dout_.EnQue(dout);
        AscendC::LocalTensor<T> y = in_y_.template AllocTensor<T>();
        AscendC::DataCopyPad(y, y_[uint64_t(at_row)], narrow, AscendC::DataCopyPadExtParams<T>());
        in_y_.EnQue(y);
        y = in_y_.template DeQue<T>();
        Widen(work_, y, count);
        in_y_.FreeTensor(y);
        dout = in_dout_.template DeQue<float>();
        AddProducts(dout, count);
        AscendC::Muls(work_, dout, weight, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        in_dout_.FreeTensor(dout);
        AscendC::LocalTensor<T> dy = out_dy_.template AllocTensor<T>();
        Round(dy, work_, count);
        out_dy_.EnQue(dy);
        dy = out_dy_.template DeQue<T>();
        AscendC::DataCopyPad(dy_[uint64_t(at_row)], dy, narrow);
        out_dy_.FreeTensor(dy);
    }

    __aicore__ inline void AddProducts(const AscendC::LocalTensor<float>& dout, uint32_t count) const {
        sum_.Pad(count);
        AscendC::Mul(sum_.terms_, dout, work_, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        sum_.Add(count);
    }

    __aicore__ inline void StoreSum(int64_t row) {
        AscendC::LocalTensor<float> sum = out_sum_.template AllocTensor<float>();
        AscendC::Adds(sum, sum_.one_, -0.0f, 1);  // a copy that keeps the sign of zero
        out_sum_.EnQue(sum);
        sum = out_sum_.template DeQue<float>();
        AscendC::DataCopyPad(dweights_[uint64_t(row)], sum, AscendC::DataCopyExtParams(1, sizeof(float), 0, 0, 0));
        out_sum_.FreeTensor(sum);
    }
};

}  // namespace megatron_ext
