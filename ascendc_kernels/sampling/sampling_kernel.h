// A token of every row of logits, in the order of megatron_ext/reference/sampling.py. A block owns whole rows. Legend: t temperature, m maximum of a
// row, s a segment.
//
// Columns pass through UB in tiles. A tile whose maximum is below a cut holds none of its tokens and is left out: +0 changes no sum.
#pragma once
#include "kernel_operator.h"
#include "sampling_order.h"

namespace megatron_ext {

constexpr uint32_t kSamplingRepeat = MEGATRON_EXT_ROW_SUM_BLOCK;  // fp32 lanes of a repeat, which ReduceSum adds as one tree
constexpr uint32_t kSamplingOne = 8;                              // fp32 elements of the smallest buffer, one DataBlock

// Numbers in UB as the scalar unit reads them.
struct LocalNumbers {
    AscendC::LocalTensor<float> values;
    __aicore__ inline float At(uint32_t i) const { return values.GetValue(i); }
};

class SamplingRow {
 public:
    __aicore__ inline void Init(GM_ADDR logits, GM_ADDR temperature, const SamplingTiling& tiling, AscendC::TPipe* pipe) {
        tiling_ = tiling;
        tiles_ = uint32_t((tiling.segment + kSamplingTile - 1) / kSamplingTile);
        logits_.SetGlobalBuffer((__gm__ float*)logits, uint64_t((tiling.rows - 1) * tiling.row_stride + tiling.columns));
        temperature_.SetGlobalBuffer((__gm__ float*)temperature, uint64_t((tiling.rows - 1) * tiling.temperature_stride + 1));
        pipe->InitBuffer(in_, 2, kSamplingTile * sizeof(float));
        Tile(divisor_buffer_, divisor_, pipe);
        Tile(work_buffer_, work_, pipe);
        Tile(ones_buffer_, ones_, pipe);
        Tile(index_buffer_, index_, pipe);
        Tile(above_leaves_buffer_, above_leaves_, pipe);
        Tile(numbers_buffer_, numbers_, pipe);
        pipe->InitBuffer(terms_buffer_, (kSamplingRepeat + kSamplingTile) * sizeof(float));
        pipe->InitBuffer(maxima_buffer_, kSamplingMaxTiles * sizeof(float));
        pipe->InitBuffer(scratch_buffer_, (kSamplingTile / kSamplingRepeat + kSamplingOne) * sizeof(float));
        pipe->InitBuffer(one_buffer_, kSamplingOne * sizeof(float));
        pipe->InitBuffer(bits_buffer_, 3 * kSamplingTile / 8);
        terms_ = terms_buffer_.Get<float>();
        maxima_ = maxima_buffer_.Get<float>();
        scratch_ = scratch_buffer_.Get<float>();
        one_ = one_buffer_.Get<float>();
        kept_ = bits_buffer_.Get<uint8_t>();
        above_ = kept_[kSamplingTile / 8];
        before_ = above_[kSamplingTile / 8];
        Constants();
    }

    // The row that the functions below work on.
    __aicore__ inline void Row(int64_t row) { row_ = uint64_t(row * tiling_.row_stride); }

    // Finds the maximum of the row. False without one that is finite: then no function below may be called.
    __aicore__ inline bool Start(int64_t row, float log_min_p) {
        Row(row);
        log_min_p_ = log_min_p;
        if (tiling_.scaled) AscendC::Duplicate(divisor_, temperature_.GetValue(uint64_t(row * tiling_.temperature_stride)), int32_t(kSamplingTile));
        Maxima();
        largest_ = row_max_ = Scalar(one_);
        if (tiling_.scaled) {
            AscendC::Div(one_, one_, divisor_, 1);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Adds(one_, one_, 0.0f, 1);
            row_max_ = Scalar(one_);
        }
        return row_max_ >= kLowestLogit && row_max_ <= -kLowestLogit;  // false for NaN
    }

    __aicore__ inline float Largest() const { return largest_; }
    __aicore__ inline int64_t Columns() const { return tiling_.columns; }

    __aicore__ inline float Mass(const SamplingCut& cut, SamplingLeaf leaf) {
        SegmentMasses(cut, leaf);
        AscendC::ReduceSum<float>(one_, numbers_, scratch_, int32_t(kSamplingMaxSegments));
        return Scalar(one_);
    }

    __aicore__ inline int64_t ChooseSegment(const SamplingCut& cut, uint32_t word) {
        SegmentMasses(cut, SamplingLeaf::kWeight);
        return ChooseNumber(uint32_t(tiling_.segments), word);
    }
    __aicore__ inline int64_t ChooseBlock(const SamplingCut& cut, int64_t s, uint32_t word) {
        const uint32_t blocks = uint32_t((tiling_.segment + kSamplingRepeat - 1) / kSamplingRepeat);
        AscendC::Duplicate(numbers_, 0.0f, int32_t(blocks));
        for (uint32_t k = 0; k < tiles_; ++k) {
            if (MaximumOf(s, k) < cut.value) continue;
            const uint32_t padded = Leaves(terms_, FirstOf(s, k), CountOf(s, k), cut, SamplingLeaf::kWeight);
            AscendC::ReduceRepeat<AscendC::ReduceType::SUM>(numbers_[k * (kSamplingTile / kSamplingRepeat)], terms_, int32_t(kSamplingRepeat),
                                                            int32_t(padded / kSamplingRepeat), 1, 1, 8);
        }
        return ChooseNumber(blocks, word);
    }
    __aicore__ inline int64_t ChooseToken(const SamplingCut& cut, int64_t s, int64_t block, uint32_t word) {
        const int64_t first = s * tiling_.segment + block * kSamplingRepeat, left = End(s) - first;
        Leaves(numbers_, first, uint32_t(left < kSamplingRepeat ? left : kSamplingRepeat), cut, SamplingLeaf::kWeight);
        return first + ChooseNumber(kSamplingRepeat, word);
    }

    // What the tokens [first, first + count) add to the mass of a prefix, +0 outside it and up to the end of a repeat. Returns how many lanes that is.
    __aicore__ inline uint32_t Leaves(const AscendC::LocalTensor<float>& to, int64_t first, uint32_t count, const SamplingCut& cut, SamplingLeaf leaf) {
        const uint32_t padded = Load(first, count);
        const bool ends_here = first <= cut.index && cut.index < first + padded - 1;
        if (leaf == SamplingLeaf::kAboveMinP) {
            BelowMax(padded);
            AscendC::Compares(kept_, work_, log_min_p_, AscendC::CMPMODE::GE, padded);
        } else {
            AscendC::Compares(kept_, work_, cut.value, cut.index < first ? AscendC::CMPMODE::GT : AscendC::CMPMODE::GE, padded);
        }
        if (ends_here) AscendC::Compares(above_, work_, cut.value, AscendC::CMPMODE::GT, padded);
        AscendC::PipeBarrier<PIPE_V>();
        if (leaf == SamplingLeaf::kWeight) Weigh(padded);
        const AscendC::LocalTensor<float>& mass = leaf == SamplingLeaf::kWeight ? work_ : ones_;
        AscendC::Select(to, kept_, mass, 0.0f, AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, padded);
        if (ends_here) Separate(to, mass, float(cut.index - first), padded);
        AscendC::PipeBarrier<PIPE_V>();
        return padded;
    }

    SamplingTiling tiling_;
    AscendC::GlobalTensor<float> logits_;
    uint64_t row_;  // where the row starts

 private:
    uint32_t tiles_;  // of a segment
    float largest_, row_max_, log_min_p_;
    AscendC::GlobalTensor<float> temperature_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> divisor_buffer_, work_buffer_, ones_buffer_, index_buffer_, above_leaves_buffer_, numbers_buffer_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> terms_buffer_, maxima_buffer_, scratch_buffer_, one_buffer_, bits_buffer_;
    AscendC::LocalTensor<float> divisor_;       // a tile of t
    AscendC::LocalTensor<float> work_, terms_;  // a tile of logits, later of weights; what is summed
    AscendC::LocalTensor<float> ones_, index_;  // 1, 1, ...; 0, 1, ...
    AscendC::LocalTensor<float> above_leaves_, numbers_, maxima_, scratch_, one_;
    AscendC::LocalTensor<uint8_t> kept_, above_, before_;

    __aicore__ inline void Tile(AscendC::TBuf<AscendC::TPosition::VECCALC>& buffer, AscendC::LocalTensor<float>& tensor, AscendC::TPipe* pipe) const {
        pipe->InitBuffer(buffer, kSamplingTile * sizeof(float));
        tensor = buffer.Get<float>();
    }

    // The first eight numbers one by one, then each time as many again.
    __aicore__ inline void Constants() const {
        AscendC::Duplicate(ones_, 1.0f, int32_t(kSamplingTile));
        for (uint32_t i = 0; i < kSamplingOne; ++i) index_.SetValue(i, float(i));
        AscendC::SetFlag<AscendC::HardEvent::S_V>(0);
        AscendC::WaitFlag<AscendC::HardEvent::S_V>(0);
        for (uint32_t count = kSamplingOne; count < uint32_t(kSamplingTile); count *= 2) {
            AscendC::Adds(index_[count], index_, float(count), int32_t(count));
            AscendC::PipeBarrier<PIPE_V>();
        }
    }

    // Tile k of segment s; it may lie behind the last column.
    __aicore__ inline int64_t FirstOf(int64_t s, uint32_t k) const { return s * tiling_.segment + k * kSamplingTile; }
    __aicore__ inline int64_t End(int64_t s) const {
        const int64_t end = (s + 1) * tiling_.segment;
        return end < tiling_.columns ? end : tiling_.columns;
    }
    __aicore__ inline uint32_t CountOf(int64_t s, uint32_t k) const {
        const int64_t left = End(s) - FirstOf(s, k);
        return uint32_t(left < 0 ? 0 : left < kSamplingTile ? left : kSamplingTile);
    }
    __aicore__ inline float MaximumOf(int64_t s, uint32_t k) const { return maxima_.GetValue(uint32_t(s) * tiles_ + k); }

    __aicore__ inline AscendC::LocalTensor<float> CopyIn(int64_t first, uint32_t count) {
        AscendC::LocalTensor<float> x = in_.AllocTensor<float>();
        AscendC::DataCopyPad(x, logits_[row_ + uint64_t(first)], AscendC::DataCopyExtParams(1, uint32_t(count * sizeof(float)), 0, 0, 0),
                             AscendC::DataCopyPadExtParams<float>());
        in_.EnQue(x);
        return in_.DeQue<float>();
    }

    // maxima = the maximum of every tile, -inf where there is none; one = that of the row, + 0
    __aicore__ inline void Maxima() {
        const uint32_t count = uint32_t(tiling_.segments) * tiles_;
        AscendC::Duplicate(maxima_, -__builtin_inff(), int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t i = 0; i < count; ++i) {
            const uint32_t columns = CountOf(i / tiles_, i % tiles_);
            if (columns == 0) continue;
            AscendC::LocalTensor<float> x = CopyIn(FirstOf(i / tiles_, i % tiles_), columns);
            AscendC::ReduceMax(maxima_[i], x, scratch_, int32_t(columns));
            AscendC::PipeBarrier<PIPE_V>();
            in_.FreeTensor(x);
        }
        AscendC::ReduceMax(one_, maxima_, scratch_, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Adds(one_, one_, 0.0f, 1);
    }

    // work = x[first, first + count), -inf up to the end of a repeat
    __aicore__ inline uint32_t Load(int64_t first, uint32_t count) {
        const uint32_t padded = (count + kSamplingRepeat - 1) / kSamplingRepeat * kSamplingRepeat;
        if (padded > count) {
            AscendC::Duplicate(work_[padded - kSamplingRepeat], -__builtin_inff(), int32_t(kSamplingRepeat));
            AscendC::PipeBarrier<PIPE_V>();
        }
        AscendC::LocalTensor<float> x = CopyIn(first, count);
        AscendC::Adds(work_, x, -0.0f, int32_t(count));  // a copy that keeps the sign of zero
        AscendC::PipeBarrier<PIPE_V>();
        in_.FreeTensor(x);
        return padded;
    }

    // work = work / t - m
    __aicore__ inline void BelowMax(uint32_t count) const {
        if (tiling_.scaled) {
            AscendC::Div(work_, work_, divisor_, int32_t(count));
            AscendC::PipeBarrier<PIPE_V>();
        }
        AscendC::Adds(work_, work_, -row_max_, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void Weigh(uint32_t count) const {
        BelowMax(count);
        AscendC::Exp(work_, work_, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
    }

    // The cut lies inside the tile: tokens equal to it are kept up to lane `last` and left out behind it.
    __aicore__ inline void Separate(const AscendC::LocalTensor<float>& to, const AscendC::LocalTensor<float>& mass, float last, uint32_t count) const {
        AscendC::Compares(before_, index_, last, AscendC::CMPMODE::LE, count);
        AscendC::Select(above_leaves_, above_, mass, 0.0f, AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Select(to, before_, to, above_leaves_, AscendC::SELMODE::VSEL_TENSOR_TENSOR_MODE, count);
    }

    // numbers[s] = row_sum over segment s. The running sum is lane 0 of a repeat of its own, in front of a tile's terms: ReduceSum then goes on
    // where the last tile ended.
    __aicore__ inline void SegmentMasses(const SamplingCut& cut, SamplingLeaf leaf) {
        AscendC::Duplicate(numbers_, 0.0f, int32_t(kSamplingMaxSegments));
        for (int64_t s = 0; s < tiling_.segments; ++s) {
            AscendC::Duplicate(terms_, 0.0f, int32_t(kSamplingRepeat));
            AscendC::PipeBarrier<PIPE_V>();
            for (uint32_t k = 0; k < tiles_; ++k) {
                if (MaximumOf(s, k) < cut.value) continue;
                const uint32_t padded = Leaves(terms_[kSamplingRepeat], FirstOf(s, k), CountOf(s, k), cut, leaf);
                AscendC::ReduceSum<float>(one_, terms_, scratch_, int32_t(kSamplingRepeat + padded));
                AscendC::PipeBarrier<PIPE_V>();
                AscendC::Adds(terms_, one_, 0.0f, 1);
                AscendC::PipeBarrier<PIPE_V>();
            }
            AscendC::ReduceSum<float>(numbers_[uint32_t(s)], terms_, scratch_, int32_t(kSamplingRepeat));
            AscendC::PipeBarrier<PIPE_V>();
        }
    }

    __aicore__ inline uint32_t ChooseNumber(uint32_t count, uint32_t word) const {
        AscendC::SetFlag<AscendC::HardEvent::V_S>(0);
        AscendC::WaitFlag<AscendC::HardEvent::V_S>(0);
        const uint32_t chosen = Choose(LocalNumbers{numbers_}, count, word);
        AscendC::SetFlag<AscendC::HardEvent::S_V>(0);
        AscendC::WaitFlag<AscendC::HardEvent::S_V>(0);
        return chosen;
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
};

// An int64 for every row, stored as two words.
class SamplingResult {
 public:
    __aicore__ inline void Init(GM_ADDR result, int64_t rows, AscendC::TPipe* pipe) {
        result_.SetGlobalBuffer((__gm__ int32_t*)result, uint64_t(2 * rows));
        pipe->InitBuffer(out_, 2, kSamplingOne * sizeof(int32_t));
    }
    __aicore__ inline void Store(int64_t row, int64_t value) {
        AscendC::LocalTensor<int32_t> out = out_.AllocTensor<int32_t>();
        AscendC::Duplicate(out, int32_t(value >> 32), 2);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Duplicate(out, int32_t(value), 1);
        out_.EnQue(out);
        out = out_.DeQue<int32_t>();
        AscendC::DataCopyPad(result_[uint64_t(2 * row)], out, AscendC::DataCopyExtParams(1, 2 * sizeof(int32_t), 0, 0, 0));
        out_.FreeTensor(out);
    }

 private:
    AscendC::GlobalTensor<int32_t> result_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_;
};

class Sample {
 public:
    __aicore__ inline void Init(GM_ADDR logits, GM_ADDR temperature, GM_ADDR seeds, GM_ADDR positions, GM_ADDR top_k, GM_ADDR top_p,
                                GM_ADDR log_min_p, GM_ADDR tokens, GM_ADDR last, const SamplingTiling& tiling, AscendC::TPipe* pipe) {
        const uint64_t rows = uint64_t(tiling.rows);
        row_.Init(logits, temperature, tiling, pipe);
        seeds_.SetGlobalBuffer((__gm__ int64_t*)seeds, rows);
        positions_.SetGlobalBuffer((__gm__ int64_t*)positions, rows);
        top_k_.SetGlobalBuffer((__gm__ int64_t*)top_k, rows);
        top_p_.SetGlobalBuffer((__gm__ float*)top_p, rows);
        log_min_p_.SetGlobalBuffer((__gm__ float*)log_min_p, rows);
        tokens_.Init(tokens, tiling.rows, pipe);
        last_.Init(last, tiling.rows, pipe);
    }

    __aicore__ inline void Process() {
        for (int64_t row = AscendC::GetBlockIdx(); row < row_.tiling_.rows; row += AscendC::GetBlockNum()) {
            const SamplingFilters filters = Filters(uint64_t(row));
            int64_t token = -1, last = -1;
            if (row_.Start(row, filters.log_min_p)) {
                const SamplingCut cut = Support(row_, filters);
                last = filters.Count() || filters.Mass() ? cut.index : row_.Columns();
                token = Draw(row_, cut, Philox(uint64_t(seeds_.GetValue(uint64_t(row))), uint64_t(positions_.GetValue(uint64_t(row)))));
            }
            tokens_.Store(row, token);
            last_.Store(row, last);
        }
    }

 private:
    SamplingRow row_;
    AscendC::GlobalTensor<int64_t> seeds_, positions_, top_k_;
    AscendC::GlobalTensor<float> top_p_, log_min_p_;
    SamplingResult tokens_, last_;

    __aicore__ inline SamplingFilters Filters(uint64_t row) const {
        const SamplingTiling& t = row_.tiling_;
        return {t.has_top_k ? top_k_.GetValue(row) : 0, t.has_top_p ? top_p_.GetValue(row) : 1.0f, t.has_min_p ? log_min_p_.GetValue(row) : kNoLimit};
    }
};

// A byte for every token: 1 up to `last` in the order of likelihood.
class SupportMask {
 public:
    __aicore__ inline void Init(GM_ADDR logits, GM_ADDR last, GM_ADDR mask, const SamplingTiling& tiling, AscendC::TPipe* pipe) {
        row_.Init(logits, nullptr, tiling, pipe);
        last_.SetGlobalBuffer((__gm__ int64_t*)last, uint64_t(tiling.rows));
        mask_.SetGlobalBuffer((__gm__ uint8_t*)mask, uint64_t(tiling.rows * tiling.columns));
        pipe->InitBuffer(out_, 2, kSamplingTile);
        pipe->InitBuffer(leaves_buffer_, kSamplingTile * sizeof(float));
        pipe->InitBuffer(narrow_buffer_, kSamplingTile * sizeof(half));
        leaves_ = leaves_buffer_.Get<float>();
        narrow_ = narrow_buffer_.Get<half>();
    }

    __aicore__ inline void Process() {
        const int64_t columns = row_.tiling_.columns, tiles = (columns + kSamplingTile - 1) / kSamplingTile;
        for (int64_t i = AscendC::GetBlockIdx(); i < row_.tiling_.rows * tiles; i += AscendC::GetBlockNum()) {
            const int64_t row = i / tiles, first = i % tiles * kSamplingTile, left = columns - first;
            row_.Row(row);
            Tile(row, first, uint32_t(left < kSamplingTile ? left : kSamplingTile));
        }
    }

 private:
    SamplingRow row_;
    AscendC::GlobalTensor<int64_t> last_;
    AscendC::GlobalTensor<uint8_t> mask_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> leaves_buffer_, narrow_buffer_;
    AscendC::LocalTensor<float> leaves_;
    AscendC::LocalTensor<half> narrow_;

    __aicore__ inline SamplingCut CutAt(int64_t last) const {
        if (last < 0) return {__builtin_inff(), -1};
        if (last >= row_.Columns()) return {kLowestLogit, row_.Columns() - 1};
        return {row_.logits_.GetValue(row_.row_ + uint64_t(last)), last};
    }

    __aicore__ inline void Tile(int64_t row, int64_t first, uint32_t count) {
        const uint32_t padded = row_.Leaves(leaves_, first, count, CutAt(last_.GetValue(uint64_t(row))), SamplingLeaf::kOne);
        AscendC::Cast(narrow_, leaves_, AscendC::RoundMode::CAST_RINT, padded);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::LocalTensor<uint8_t> out = out_.AllocTensor<uint8_t>();
        AscendC::Cast(out, narrow_, AscendC::RoundMode::CAST_RINT, padded);
        out_.EnQue(out);
        out = out_.DeQue<uint8_t>();
        AscendC::DataCopyPad(mask_[uint64_t(row * row_.tiling_.columns + first)], out, AscendC::DataCopyExtParams(1, count, 0, 0, 0));
        out_.FreeTensor(out);
    }
};

}  // namespace megatron_ext
