// Embedding lookup and its gradient. Legend: T tokens, V vocabulary rows, H hidden.
#pragma once
#include "embedding_tiling.h"
#include "kernel_operator.h"

namespace megatron_ext {

// Ids as they lie in memory: int64, whose low word is the row (the binding has seen that it is below V) and whose high word has the sign.
class EmbeddingIds {
 public:
    __aicore__ inline void Init(GM_ADDR ids, int64_t tokens, AscendC::TPipe* pipe) {
        words_.SetGlobalBuffer((__gm__ int32_t*)ids, uint64_t(2 * tokens));
        pipe->InitBuffer(buffer_, uint32_t(2 * kEmbeddingIdsTogether * sizeof(int32_t)));
        local_ = buffer_.Get<int32_t>();
    }

    // Makes ids [first, first + count) readable by the scalar unit.
    __aicore__ inline void Load(int64_t first, uint32_t count) const {
        const AscendC::DataCopyExtParams copy(1, uint32_t(2 * count * sizeof(int32_t)), 0, 0, 0);
        AscendC::DataCopyPad(local_, words_[uint64_t(2 * first)], copy, AscendC::DataCopyPadExtParams<int32_t>());
        AscendC::SetFlag<AscendC::HardEvent::MTE2_S>(0);
        AscendC::WaitFlag<AscendC::HardEvent::MTE2_S>(0);
    }

    // The scalar unit has read what was loaded.
    __aicore__ inline void Release() const {
        AscendC::SetFlag<AscendC::HardEvent::S_MTE2>(0);
        AscendC::WaitFlag<AscendC::HardEvent::S_MTE2>(0);
    }

    __aicore__ inline int64_t Row(uint32_t i) const { return local_.GetValue(2 * i + 1) < 0 ? -1 : int64_t(local_.GetValue(2 * i)); }

 private:
    AscendC::GlobalTensor<int32_t> words_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> buffer_;
    AscendC::LocalTensor<int32_t> local_;
};

// grad[id] += dy, token after token. Every element of grad has one owner, who reads all ids in order: nothing depends on the number of cores,
// and no two cores touch one element. Owning rows (and, where rows are long, tiles of columns) spreads the tokens over the cores; owning columns
// alone would lead every core through every token, and tokens of one core wait for each other: a row is read back after it was written.
template <typename T>
class EmbeddingGradient {
 public:
    __aicore__ inline void Init(GM_ADDR ids, GM_ADDR dy, GM_ADDR grad, const EmbeddingTiling& tiling, AscendC::TPipe* pipe) {
        tiling_ = tiling;
        ids_.Init(ids, tiling.tokens, pipe);
        dy_.SetGlobalBuffer((__gm__ T*)dy, uint64_t(tiling.tokens * tiling.hidden));
        grad_.SetGlobalBuffer((__gm__ float*)grad);
        const uint32_t columns = uint32_t(tiling.tile_columns);
        pipe->InitBuffer(in_dy_, 2, columns * sizeof(T));
        pipe->InitBuffer(in_sum_, 1, columns * sizeof(float));
        pipe->InitBuffer(out_sum_, 2, columns * sizeof(float));
        pipe->InitBuffer(wide_buffer_, columns * sizeof(float));
        wide_ = wide_buffer_.template Get<float>();
    }

    __aicore__ inline void Process() {
        const int64_t column_tiles = (tiling_.hidden + tiling_.tile_columns - 1) / tiling_.tile_columns;
        for (int64_t i = AscendC::GetBlockIdx(); i < column_tiles * tiling_.owners; i += AscendC::GetBlockNum())
            Own(i % tiling_.owners, i / tiling_.owners * tiling_.tile_columns);
    }

 private:
    EmbeddingTiling tiling_;
    EmbeddingIds ids_;
    AscendC::GlobalTensor<T> dy_;
    AscendC::GlobalTensor<float> grad_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_dy_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> in_sum_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_sum_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> wide_buffer_;
    AscendC::LocalTensor<float> wide_;

    __aicore__ inline void Own(int64_t owner, int64_t column) {
        const int64_t left = tiling_.hidden - column;
        const uint32_t columns = uint32_t(left < tiling_.tile_columns ? left : tiling_.tile_columns);
        AscendC::SetFlag<AscendC::HardEvent::MTE3_MTE2>(0);
        for (int64_t first = 0; first < tiling_.tokens; first += kEmbeddingIdsTogether) {
            const int64_t rest = tiling_.tokens - first;
            const uint32_t count = uint32_t(rest < kEmbeddingIdsTogether ? rest : kEmbeddingIdsTogether);
            ids_.Load(first, count);
            for (uint32_t i = 0; i < count; ++i) {
                const int64_t row = ids_.Row(i);
                if (row >= 0 && row % tiling_.owners == owner) Add((first + i) * tiling_.hidden + column, row * tiling_.hidden + column, columns);
            }
            ids_.Release();
        }
        AscendC::WaitFlag<AscendC::HardEvent::MTE3_MTE2>(0);
    }

    // grad[at_grad ...] += dy[at_dy ...]
    __aicore__ inline void Add(int64_t at_dy, int64_t at_grad, uint32_t columns) {
        CopyIn(at_dy, at_grad, columns);
        Compute(columns);
        CopyOut(at_grad, columns);
    }

    static __aicore__ inline AscendC::DataCopyExtParams Row(uint32_t bytes) { return AscendC::DataCopyExtParams(1, bytes, 0, 0, 0); }

    __aicore__ inline void CopyIn(int64_t at_dy, int64_t at_grad, uint32_t columns) {
        AscendC::LocalTensor<T> dy = in_dy_.template AllocTensor<T>();
        AscendC::DataCopyPad(dy, dy_[uint64_t(at_dy)], Row(columns * sizeof(T)), AscendC::DataCopyPadExtParams<T>());
        in_dy_.EnQue(dy);
        AscendC::LocalTensor<float> sum = in_sum_.template AllocTensor<float>();
        AscendC::WaitFlag<AscendC::HardEvent::MTE3_MTE2>(0);  // the token before may have written this row
        AscendC::DataCopyPad(sum, grad_[uint64_t(at_grad)], Row(columns * sizeof(float)), AscendC::DataCopyPadExtParams<float>());
        in_sum_.EnQue(sum);
    }

    __aicore__ inline void Compute(uint32_t columns) {
        AscendC::LocalTensor<T> dy = in_dy_.template DeQue<T>();
        AscendC::Cast(wide_, dy, AscendC::RoundMode::CAST_NONE, columns);
        AscendC::PipeBarrier<PIPE_V>();
        in_dy_.FreeTensor(dy);
        AscendC::LocalTensor<float> before = in_sum_.template DeQue<float>();
        AscendC::LocalTensor<float> after = out_sum_.template AllocTensor<float>();
        AscendC::Add(after, before, wide_, int32_t(columns));
        AscendC::PipeBarrier<PIPE_V>();
        in_sum_.FreeTensor(before);
        out_sum_.EnQue(after);
    }

    __aicore__ inline void CopyOut(int64_t at_grad, uint32_t columns) {
        AscendC::LocalTensor<float> after = out_sum_.template DeQue<float>();
        AscendC::DataCopyPad(grad_[uint64_t(at_grad)], after, Row(columns * sizeof(float)));
        AscendC::SetFlag<AscendC::HardEvent::MTE3_MTE2>(0);
        out_sum_.FreeTensor(after);
    }
};

// y[t] = weight[id of t], or +0 where the id is negative; with kScatter y[id of t] = weight[t], for ../moe. T is any type of the right size: bits are
// copied.
template <typename T, bool kScatter = false>
class EmbeddingLookup {
 public:
    __aicore__ inline void Init(GM_ADDR ids, GM_ADDR weight, GM_ADDR y, const EmbeddingTiling& tiling, AscendC::TPipe* pipe) {
        tiling_ = tiling;
        ids_.Init(ids, tiling.tokens, pipe);
        weight_.SetGlobalBuffer((__gm__ T*)weight);
        y_.SetGlobalBuffer((__gm__ T*)y, uint64_t(tiling.tokens * tiling.hidden));
        const uint32_t columns = uint32_t(tiling.tile_columns);
        pipe->InitBuffer(rows_buffer_, kSlots * columns * sizeof(T));
        pipe->InitBuffer(zero_buffer_, columns * sizeof(T));
        rows_ = rows_buffer_.template Get<T>();
        zero_ = zero_buffer_.template Get<T>();
        AscendC::Duplicate(zero_, T(0), int32_t(columns));
        AscendC::SetFlag<AscendC::HardEvent::V_MTE3>(0);
        AscendC::WaitFlag<AscendC::HardEvent::V_MTE3>(0);
    }

    __aicore__ inline void Process() {
        const int64_t step = kEmbeddingTokensTogether;
        for (uint32_t slot = 0; slot < kSlots; ++slot) AscendC::SetFlag<AscendC::HardEvent::MTE3_MTE2>(int32_t(slot));
        for (int64_t first = AscendC::GetBlockIdx() * step; first < tiling_.tokens; first += AscendC::GetBlockNum() * step) {
            const int64_t left = tiling_.tokens - first;
            const uint32_t count = uint32_t(left < step ? left : step);
            ids_.Load(first, count);
            for (uint32_t i = 0; i < count; ++i) CopyRow(ids_.Row(i), first + i);
            ids_.Release();
        }
        for (uint32_t slot = 0; slot < kSlots; ++slot) AscendC::WaitFlag<AscendC::HardEvent::MTE3_MTE2>(int32_t(slot));
    }

 private:
    static constexpr uint32_t kSlots = 2;

    EmbeddingTiling tiling_;
    EmbeddingIds ids_;
    AscendC::GlobalTensor<T> weight_, y_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> rows_buffer_, zero_buffer_;
    AscendC::LocalTensor<T> rows_, zero_;
    uint32_t slot_ = 0;

    __aicore__ inline void CopyRow(int64_t row, int64_t token) {
        for (int64_t column = 0; column < tiling_.hidden; column += tiling_.tile_columns) {
            const int64_t left = tiling_.hidden - column;
            const uint32_t columns = uint32_t(left < tiling_.tile_columns ? left : tiling_.tile_columns);
            const AscendC::DataCopyExtParams copy(1, uint32_t(columns * sizeof(T)), 0, 0, 0);
            const uint64_t at_row = uint64_t(row * tiling_.hidden + column), at_token = uint64_t(token * tiling_.hidden + column);
            if constexpr (kScatter)
                CopyTile(y_[at_row], weight_[at_token], copy);
            else if (row < 0)
                AscendC::DataCopyPad(y_[at_token], zero_, copy);
            else
                CopyTile(y_[at_token], weight_[at_row], copy);
        }
    }

    // Through two slots in turn, so that a load does not wait for the store before it.
    __aicore__ inline void CopyTile(const AscendC::GlobalTensor<T>& to, const AscendC::GlobalTensor<T>& from, const AscendC::DataCopyExtParams& copy) {
        const AscendC::LocalTensor<T> room = rows_[slot_ * uint32_t(tiling_.tile_columns)];
        const int32_t event = int32_t(slot_);
        AscendC::WaitFlag<AscendC::HardEvent::MTE3_MTE2>(event);
        AscendC::DataCopyPad(room, from, copy, AscendC::DataCopyPadExtParams<T>());
        AscendC::SetFlag<AscendC::HardEvent::MTE2_MTE3>(event);
        AscendC::WaitFlag<AscendC::HardEvent::MTE2_MTE3>(event);
        AscendC::DataCopyPad(to, room, copy);
        AscendC::SetFlag<AscendC::HardEvent::MTE3_MTE2>(event);
        slot_ = 1 - slot_;
    }
};

}  // namespace megatron_ext
