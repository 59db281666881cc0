// Rotary embedding with the roundings of megatron_ext/reference/rope.py: two products, one sum, one rounding of every element. Legend: D size of
// a head, r pairs, S row of a tile in UB (D rounded up to a DataBlock of 16-bit elements), W row of the tables in UB (2r rounded up likewise).
//
// Element i of a row becomes x[i] * cos[i] + x[partner of i] * sin[i], where tables of 2r columns hold -sin for the first of a pair: a - b is
// a + -b to the bit. Where halves are whole DataBlocks of fp32, partners lie at a fixed distance; otherwise they are gathered.
#pragma once
#include "kernel_operator.h"
#include "rotary_tiling.h"

namespace megatron_ext {

template <typename T>
class Rotary {
 public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR keys, GM_ADDR cos, GM_ADDR sin, GM_ADDR y, GM_ADDR rotated_keys, const RotaryTiling& tiling,
                                AscendC::TPipe* pipe) {
        tiling_ = tiling;
        pairs_ = uint32_t(tiling.pairs);
        stride_ = RoundUp(uint32_t(tiling.head_dim), kBlock);
        narrow_width_ = RoundUp(pairs_, kBlock);
        width_ = RoundUp(2 * pairs_, kBlock);
        gathers_ = tiling.interleaved || pairs_ % kWideBlock != 0;
        from_[0].SetGlobalBuffer((__gm__ T*)x);
        from_[1].SetGlobalBuffer((__gm__ T*)keys);
        to_[0].SetGlobalBuffer((__gm__ T*)y);
        to_[1].SetGlobalBuffer((__gm__ T*)rotated_keys);
        cos_table_.SetGlobalBuffer((__gm__ T*)cos);
        sin_table_.SetGlobalBuffer((__gm__ T*)sin);
        InitTiles(pipe);
        if (gathers_) InitOffsets(pipe);
    }

    __aicore__ inline void Process() {
        const int64_t step = tiling_.tile_positions;
        for (int64_t first = AscendC::GetBlockIdx() * step; first < tiling_.positions; first += AscendC::GetBlockNum() * step) {
            const uint32_t positions = uint32_t(Smaller(tiling_.positions - first, step));
            LoadTables(first, positions);
            for (uint32_t operand = 0; operand < 2; ++operand) Heads(operand, first, positions);
        }
    }

 private:
    static constexpr uint32_t kBlock = 32 / sizeof(T), kWideBlock = 32 / sizeof(float), kLanes = 64;

    RotaryTiling tiling_;
    uint32_t pairs_, stride_, narrow_width_, width_;
    bool gathers_;
    AscendC::GlobalTensor<T> from_[2], to_[2], cos_table_, sin_table_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> in_tables_;  // [cos | sin]
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> work_buffer_, tables_buffer_, offsets_buffer_, sign_buffer_;
    AscendC::LocalTensor<float> x_, scaled_, product_;      // [positions][heads][S]: x, x * cos, partner * sin
    AscendC::LocalTensor<float> cos_, sin_, narrow_;        // [positions][W]; narrow_: one table as it was loaded
    AscendC::LocalTensor<uint32_t> partner_, table_entry_;  // [2r] bytes, where element i finds its partner and its table entry
    AscendC::LocalTensor<float> sign_;                      // [2r] -1 for the first of a pair

    // One tile of heads.
    struct Tile {
        int64_t position, outer, inner;
        uint32_t positions, heads;
        __aicore__ inline uint32_t Rows() const { return positions * heads; }
    };

    static __aicore__ inline uint32_t RoundUp(uint32_t n, uint32_t multiple) { return (n + multiple - 1) / multiple * multiple; }
    static __aicore__ inline int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }

    __aicore__ inline void InitTiles(AscendC::TPipe* pipe) {
        const uint32_t elements = uint32_t(tiling_.tile_positions * tiling_.tile_heads) * stride_;
        const uint32_t positions = uint32_t(tiling_.tile_positions), table = positions * width_;
        pipe->InitBuffer(in_, 2, elements * sizeof(T));
        pipe->InitBuffer(out_, 2, elements * sizeof(T));
        pipe->InitBuffer(in_tables_, 1, 2 * positions * narrow_width_ * sizeof(T));
        pipe->InitBuffer(work_buffer_, 3 * elements * sizeof(float));
        pipe->InitBuffer(tables_buffer_, (2 * table + positions * narrow_width_) * sizeof(float));
        x_ = work_buffer_.template Get<float>();
        scaled_ = x_[elements];
        product_ = x_[2 * elements];
        cos_ = tables_buffer_.template Get<float>();
        sin_ = cos_[table];
        narrow_ = cos_[2 * table];
    }

    __aicore__ inline void InitOffsets(AscendC::TPipe* pipe) {
        pipe->InitBuffer(offsets_buffer_, 2 * width_ * sizeof(uint32_t));
        pipe->InitBuffer(sign_buffer_, width_ * sizeof(float));
        partner_ = offsets_buffer_.template Get<uint32_t>();
        table_entry_ = partner_[width_];
        sign_ = sign_buffer_.template Get<float>();
        for (uint32_t pair = 0; pair < pairs_; ++pair) {
            const uint32_t first = tiling_.interleaved ? 2 * pair : pair, second = tiling_.interleaved ? first + 1 : pairs_ + pair;
            partner_.SetValue(first, second * uint32_t(sizeof(float)));
            partner_.SetValue(second, first * uint32_t(sizeof(float)));
            table_entry_.SetValue(first, pair * uint32_t(sizeof(float)));
            table_entry_.SetValue(second, pair * uint32_t(sizeof(float)));
            sign_.SetValue(first, -1.0f);
            sign_.SetValue(second, 1.0f);
        }
        AscendC::SetFlag<AscendC::HardEvent::S_V>(0);
        AscendC::WaitFlag<AscendC::HardEvent::S_V>(0);
    }

    // cos_ and sin_ of the positions, in fp32 and spread over the 2r elements that rotate.
    __aicore__ inline void LoadTables(int64_t first, uint32_t positions) {
        const uint32_t table = positions * narrow_width_;
        AscendC::LocalTensor<T> tables = in_tables_.template AllocTensor<T>();
        LoadTable(tables, cos_table_[uint64_t(first * tiling_.cos_stride)], tiling_.cos_stride, positions);
        LoadTable(tables[table], sin_table_[uint64_t(first * tiling_.sin_stride)], tiling_.sin_stride, positions);
        in_tables_.EnQue(tables);
        tables = in_tables_.template DeQue<T>();
        if (gathers_) {
            GatherTable(cos_, tables, positions);
            GatherTable(sin_, tables[table], positions);
            for (uint32_t p = 0; p < positions; ++p) AscendC::Mul(sin_[p * width_], sin_[p * width_], sign_, int32_t(2 * pairs_));
        } else {
            RepeatTables(tables, tables[table], positions);
        }
        in_tables_.FreeTensor(tables);  // what was computed is read behind the first barrier of Compute
    }

    __aicore__ inline void LoadTable(const AscendC::LocalTensor<T>& to, const AscendC::GlobalTensor<T>& from, int64_t stride,
                                     uint32_t positions) const {
        const AscendC::DataCopyExtParams copy(uint16_t(positions), pairs_ * sizeof(T), uint32_t((stride - pairs_) * sizeof(T)), 0, 0);
        AscendC::DataCopyPad(to, from, copy, AscendC::DataCopyPadExtParams<T>());
    }

    __aicore__ inline void GatherTable(const AscendC::LocalTensor<float>& to, const AscendC::LocalTensor<T>& table, uint32_t positions) {
        AscendC::Cast(narrow_, table, AscendC::RoundMode::CAST_NONE, positions * narrow_width_);
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t p = 0; p < positions; ++p)
            AscendC::Gather(to[p * width_], narrow_, table_entry_, p * narrow_width_ * uint32_t(sizeof(float)), 2 * pairs_);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // Both halves have the same entries; sin is negative in the first.
    __aicore__ inline void RepeatTables(const AscendC::LocalTensor<T>& cos, const AscendC::LocalTensor<T>& sin, uint32_t positions) const {
        for (uint32_t p = 0; p < positions; ++p) {
            const uint32_t from = p * narrow_width_, first = p * width_, second = first + pairs_;
            AscendC::Cast(cos_[first], cos[from], AscendC::RoundMode::CAST_NONE, pairs_);
            AscendC::Cast(cos_[second], cos[from], AscendC::RoundMode::CAST_NONE, pairs_);
            AscendC::Cast(sin_[second], sin[from], AscendC::RoundMode::CAST_NONE, pairs_);
        }
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t p = 0; p < positions; ++p) AscendC::Muls(sin_[p * width_], sin_[p * width_ + pairs_], -1.0f, int32_t(pairs_));
    }

    __aicore__ inline void Heads(uint32_t operand, int64_t first, uint32_t positions) {
        const RotaryHeads& heads = tiling_.heads[operand];
        for (int64_t outer = 0; outer < heads.outer; ++outer)
            for (int64_t inner = 0; inner < heads.inner; inner += tiling_.tile_heads) {
                const Tile tile = {first, outer, inner, positions, uint32_t(Smaller(heads.inner - inner, tiling_.tile_heads))};
                CopyIn(operand, tile);
                Compute(tile);
                CopyOut(operand, tile);
            }
    }

    __aicore__ inline void CopyIn(uint32_t operand, const Tile& tile) {
        const RotaryHeads& heads = tiling_.heads[operand];
        const uint32_t bytes = uint32_t(tiling_.head_dim * sizeof(T));
        const AscendC::DataCopyExtParams copy(uint16_t(tile.heads), bytes, uint32_t(heads.inner_stride * sizeof(T)) - bytes, 0, 0);
        AscendC::LocalTensor<T> in = in_.template AllocTensor<T>();
        for (uint32_t p = 0; p < tile.positions; ++p) {
            const int64_t at = (tile.position + p) * heads.position_stride + tile.outer * heads.outer_stride + tile.inner * heads.inner_stride;
            AscendC::DataCopyPad(in[p * tile.heads * stride_], from_[operand][uint64_t(at)], copy, AscendC::DataCopyPadExtParams<T>());
        }
        in_.EnQue(in);
    }

    __aicore__ inline void Compute(const Tile& tile) {
        const uint32_t count = tile.Rows() * stride_;
        AscendC::LocalTensor<T> in = in_.template DeQue<T>();
        AscendC::LocalTensor<T> out = out_.template AllocTensor<T>();
        AscendC::Cast(x_, in, AscendC::RoundMode::CAST_NONE, count);
        if (2 * tiling_.pairs < tiling_.head_dim)  // what does not rotate passes through, its bits as they are
            AscendC::Adds(out.template ReinterpretCast<int16_t>(), in.template ReinterpretCast<int16_t>(), int16_t(0), int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        in_.FreeTensor(in);
        MultiplyPartners(tile);
        MultiplyByTable(scaled_, x_, cos_, 2 * pairs_, tile);
        AscendC::PipeBarrier<PIPE_V>();
        Finish(out, tile.Rows());
        out_.EnQue(out);
    }

    // product_ = partner * sin
    __aicore__ inline void MultiplyPartners(const Tile& tile) {
        if (!gathers_) {
            MultiplyByTable(product_, x_[pairs_], sin_, pairs_, tile);
            MultiplyByTable(product_[pairs_], x_, sin_[pairs_], pairs_, tile);
            return;
        }
        for (uint32_t row = 0; row < tile.Rows(); ++row)
            AscendC::Gather(product_[row * stride_], x_, partner_, row * stride_ * uint32_t(sizeof(float)), 2 * pairs_);
        AscendC::PipeBarrier<PIPE_V>();
        MultiplyByTable(product_, product_, sin_, 2 * pairs_, tile);
    }

    // to[p][h][i] = from[p][h][i] * table[p][i] for i < count
    __aicore__ inline void MultiplyByTable(const AscendC::LocalTensor<float>& to, const AscendC::LocalTensor<float>& from,
                                           const AscendC::LocalTensor<float>& table, uint32_t count, const Tile& tile) const {
        const uint8_t row = uint8_t(stride_ / kWideBlock);
        for (uint32_t p = 0; p < tile.positions; ++p)
            for (uint32_t i = 0; i < count; i += kLanes) {
                const uint32_t at = p * tile.heads * stride_ + i;
                AscendC::Mul(to[at], from[at], table[p * width_ + i], uint64_t(Smaller(count - i, kLanes)), uint8_t(tile.heads),
                             AscendC::BinaryRepeatParams(1, 1, 1, row, row, 0));
            }
    }

    // out = round(scaled_ + product_) where elements rotate
    __aicore__ inline void Finish(const AscendC::LocalTensor<T>& out, uint32_t rows) const {
        const uint8_t row = uint8_t(stride_ / kWideBlock), narrow_row = uint8_t(stride_ / kBlock);
        for (uint32_t i = 0; i < 2 * pairs_; i += kLanes)
            AscendC::Add(scaled_[i], scaled_[i], product_[i], uint64_t(Smaller(2 * pairs_ - i, kLanes)), uint8_t(rows),
                         AscendC::BinaryRepeatParams(1, 1, 1, row, row, row));
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t i = 0; i < 2 * pairs_; i += kLanes)
            AscendC::Cast(out[i], scaled_[i], AscendC::RoundMode::CAST_RINT, uint64_t(Smaller(2 * pairs_ - i, kLanes)), uint8_t(rows),
                          AscendC::UnaryRepeatParams(1, 1, narrow_row, row));
    }

    __aicore__ inline void CopyOut(uint32_t operand, const Tile& tile) {
        const RotaryHeads& heads = tiling_.heads[operand];
        const AscendC::DataCopyExtParams copy(uint16_t(tile.heads), uint32_t(tiling_.head_dim * sizeof(T)), 0, 0, 0);
        AscendC::LocalTensor<T> out = out_.template DeQue<T>();
        for (uint32_t p = 0; p < tile.positions; ++p) {
            const int64_t head = ((tile.position + p) * heads.outer + tile.outer) * heads.inner + tile.inner;
            AscendC::DataCopyPad(to_[operand][uint64_t(head * tiling_.head_dim)], out[p * tile.heads * stride_], copy);
        }
        out_.FreeTensor(out);
    }
};

}  // namespace megatron_ext
