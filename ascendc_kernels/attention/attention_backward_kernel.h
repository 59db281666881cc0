// Gradients of attention, recomputed from the log-sum-exp (reference/attention.py). The owner of a sum computes all of it: dq belongs to a tile of
// queries, dk and dv to a tile of keys, and stay in L0C from their first product to their last. So there are no partial sums, and nothing depends on
// the number of cores; scores are computed twice for it. Cube and vector cores hand over as in attention_kernel.h.
// Legend: D head size, C keys of a step.
#pragma once
#include "attention_product_kernel.h"
#include "attention_items.h"

namespace megatron_ext {

constexpr uint16_t kBackwardScoresReady = 0, kBackwardGradientsReady = 1, kBackwardSumsReady = 2;

// Walks through the steps of this block's items: pairs of 64 queries and C keys. A segment is what one accumulator sums up: all key tiles of a query
// tile, or all query tiles of one head for a key tile.
class AttentionBackwardCursor {
 public:
    bool owns_keys;          // the item is a key tile (dk, dv), else a query tile (dq)
    int64_t row, length;     // of the sequence
    int64_t key_head, head;  // head: of the queries of this step
    int64_t query, key;      // where the tiles of this step start, in the sequence
    bool first_step, last_step, first_of_segment, last_of_segment;
    int64_t number = -1;     // steps of this block so far

    __aicore__ inline void Init(const AttentionSequences& sequences, const AttentionTiling& tiling) {
        sequences_ = sequences;
        tiling_ = tiling;
        group_ = tiling.query_heads / tiling.key_heads;
        next_ = AscendC::GetBlockIdx() / AscendC::GetTaskRatio();
        owns_keys = false;
    }

    __aicore__ inline bool Advance() {
        first_step = number < 0 || last_step;
        first_of_segment = first_step || last_of_segment;
        if (first_step) {
            if (!NextItem()) return false;
        } else if (first_of_segment) {
            ++head;
            query = begin_;
        } else {
            (owns_keys ? query : key) += kAttentionBackwardStep;
        }
        last_of_segment = (owns_keys ? query : key) + kAttentionBackwardStep >= end_;
        last_step = last_of_segment && (!owns_keys || head % group_ == group_ - 1);
        ++number;
        return true;
    }

    __aicore__ inline int64_t Queries() const { return AttentionMin(kAttentionBackwardStep, length - query); }
    __aicore__ inline int64_t Keys() const { return AttentionMin(Columns(), length - key); }
    // Keys of a tile, padded.
    __aicore__ inline int64_t Columns() const {
        return owns_keys && tiling_.head_dim > kAttentionBackwardWideHead ? kAttentionBackwardStep / 2 : kAttentionBackwardStep;
    }
    __aicore__ inline AttentionVisible Sees(int64_t position) const { return AttentionSees(tiling_, position, length); }

 private:
    AttentionSequences sequences_;
    AttentionTiling tiling_;
    int64_t group_, begin_, end_;
    int64_t next_, sequence_ = 0, before_ = 0;

    __aicore__ inline bool NextItem() {
        while (true) {
            const int64_t heads = owns_keys ? tiling_.key_heads : tiling_.query_heads, step = owns_keys ? Columns() : kAttentionBackwardStep;
            for (; sequence_ < tiling_.sequences; ++sequence_) {
                length = sequences_.Queries(sequence_);
                const int64_t items = (length + step - 1) / step * heads;
                if (next_ < before_ + items) {
                    Take((next_ - before_) / heads * step, (next_ - before_) % heads);
                    next_ += AscendC::GetBlockNum();
                    return true;
                }
                before_ += items;
            }
            if (owns_keys) return false;
            owns_keys = true;
            sequence_ = 0;
        }
    }

    __aicore__ inline void Take(int64_t first, int64_t item_head) {
        row = sequences_.FirstRow(sequence_);
        if (owns_keys) {
            key = first;
            key_head = item_head;
            head = item_head * group_;
            begin_ = tiling_.causal ? key / kAttentionBackwardStep * kAttentionBackwardStep : 0;
            end_ = tiling_.window ? AttentionMin(length, key + Keys() - 1 + tiling_.window) : length;
            query = begin_;
        } else {
            query = first;
            head = item_head;
            key_head = head / group_;
            begin_ = Sees(query).first / kAttentionBackwardStep * kAttentionBackwardStep;
            end_ = Sees(query + Queries() - 1).last;
            key = begin_;
        }
    }
};

template <typename T>
class AttentionBackwardWorkspace {
 public:
    AscendC::GlobalTensor<float> sums;  // dq [64, D], or dk and dv [C, D]

    __aicore__ inline void Init(GM_ADDR workspace, const AttentionTiling& tiling) {
        GM_ADDR base = workspace + AscendC::GetBlockIdx() / AscendC::GetTaskRatio() * tiling.block_bytes;
        scores_.SetGlobalBuffer((__gm__ float*)base, 4 * kStep);
        base += 4 * kStep * sizeof(float);
        gradients_.SetGlobalBuffer((__gm__ T*)base, 4 * kStep);
        base += 4 * kStep * sizeof(T);
        sums.SetGlobalBuffer((__gm__ float*)base, uint64_t(kAttentionBackwardAccumulators));
    }
    __aicore__ inline AscendC::GlobalTensor<float> Scores(int64_t number) const { return scores_[uint64_t(number % 2) * kStep]; }
    __aicore__ inline AscendC::GlobalTensor<float> DProbabilities(int64_t number) const { return scores_[uint64_t(2 + number % 2) * kStep]; }
    __aicore__ inline AscendC::GlobalTensor<T> DScores(int64_t number) const { return gradients_[uint64_t(number % 2) * kStep]; }
    __aicore__ inline AscendC::GlobalTensor<T> Probabilities(int64_t number) const { return gradients_[uint64_t(2 + number % 2) * kStep]; }

 private:
    static constexpr uint64_t kStep = uint64_t(kAttentionBackwardStep * kAttentionBackwardStep);
    AscendC::GlobalTensor<float> scores_;
    AscendC::GlobalTensor<T> gradients_;
};

template <typename T>
class AttentionBackwardCube {
 public:
    __aicore__ inline void Init(GM_ADDR d_out, GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR zeros, const AttentionSequences& sequences,
                                const AttentionBackwardWorkspace<T>& workspace, const AttentionTiling& tiling, AscendC::TPipe* pipe) {
        tiling_ = tiling;
        sequences_ = sequences;
        workspace_ = workspace;
        dim_ = uint32_t(tiling.head_dim);
        d_out_.SetGlobalBuffer((__gm__ T*)d_out);
        q_.SetGlobalBuffer((__gm__ T*)q);
        k_.SetGlobalBuffer((__gm__ T*)k);
        v_.SetGlobalBuffer((__gm__ T*)v);
        zeros_.SetGlobalBuffer((__gm__ T*)zeros, uint64_t(kAttentionMaxTile * dim_));
        pipe->InitBuffer(own_, 1, 2 * kStep * dim_ * sizeof(T));
        pipe->InitBuffer(other_, 2, 2 * kStep * dim_ * sizeof(T));
        pipe->InitBuffer(gradients_, 2, 2 * kStep * kStep * sizeof(T));
        pipe->InitBuffer(scores_, 1, 2 * kStep * kStep * sizeof(float));
        pipe->InitBuffer(sums_, 1, uint32_t(kAttentionBackwardAccumulators * sizeof(float)));
        product_.Init(pipe);
    }

    // Scores run one step ahead, as in the forward.
    __aicore__ inline void Process() {
        AttentionBackwardCursor ahead, behind;
        ahead.Init(sequences_, tiling_);
        behind.Init(sequences_, tiling_);
        if (ahead.Advance()) Scores(ahead);
        while (behind.Advance()) {
            if (ahead.Advance()) Scores(ahead);
            Gradients(behind);
        }
        if (behind.number >= 0) own_.FreeTensor(own_tiles_);
    }

 private:
    static constexpr uint32_t kStep = uint32_t(kAttentionBackwardStep);

    AttentionTiling tiling_;
    AttentionSequences sequences_;
    AttentionBackwardWorkspace<T> workspace_;
    uint32_t dim_;
    AscendC::GlobalTensor<T> d_out_, q_, k_, v_, zeros_;
    AscendC::TQue<AscendC::TPosition::A1, 1> own_;
    AscendC::TQue<AscendC::TPosition::A1, 2> other_, gradients_;
    AscendC::TQue<AscendC::TPosition::CO1, 1> scores_, sums_;
    AscendC::LocalTensor<T> own_tiles_, other_tiles_[2];  // [q | d_out] and [k | v], or the other way round; the others by the parity of the step
    AscendC::LocalTensor<float> sum_;
    AttentionProduct<T> product_;

    __aicore__ inline void Scores(const AttentionBackwardCursor& at) {
        if (at.first_step) LoadOwn(at);
        AscendC::LocalTensor<T> other = other_.template AllocTensor<T>();
        at.owns_keys ? LoadQueries(other, at) : LoadKeys(other, at);
        other_.EnQue(other);
        other = other_.template DeQue<T>();
        other_tiles_[at.number % 2] = other;
        const AscendC::LocalTensor<T> queries = at.owns_keys ? other : own_tiles_, keys = at.owns_keys ? own_tiles_ : other;
        const uint32_t columns = uint32_t(at.Columns());
        AscendC::LocalTensor<float> scores = scores_.template AllocTensor<float>();
        product_.template Multiply<AttentionOperand::kAlongK, AttentionOperand::kAlongK>(scores, queries, keys, kStep, columns, dim_, true);
        product_.template Multiply<AttentionOperand::kAlongK, AttentionOperand::kAlongK>(scores[kStep * kStep], queries[kStep * dim_],
                                                                                         keys[kStep * dim_], kStep, columns, dim_, true);
        scores_.EnQue(scores);
        scores = scores_.template DeQue<float>();
        const AscendC::FixpipeParamsV220 rows = AscendC::FixpipeParamsV220(uint16_t(columns), kStep, kStep, columns, false);
        AscendC::Fixpipe(workspace_.Scores(at.number), scores, rows);
        AscendC::Fixpipe(workspace_.DProbabilities(at.number), scores[kStep * kStep], rows);
        scores_.FreeTensor(scores);
        AscendC::CrossCoreSetFlag<2, PIPE_FIX>(kBackwardScoresReady);
    }

    // dq += ds x k, or dk += ds^T x q and dv += p^T x d_out; their accumulators continue from step to step.
    __aicore__ inline void Gradients(const AttentionBackwardCursor& at) {
        const uint32_t columns = uint32_t(at.Columns()), half = kStep * kStep;
        AscendC::LocalTensor<T> gradients = gradients_.template AllocTensor<T>();
        AscendC::CrossCoreWaitFlag(kBackwardGradientsReady);
        AttentionLoadRows(gradients, workspace_.DScores(at.number), kStep, columns, columns, kStep);
        if (at.owns_keys) AttentionLoadRows(gradients[half], workspace_.Probabilities(at.number), kStep, columns, columns, kStep);
        gradients_.EnQue(gradients);
        gradients = gradients_.template DeQue<T>();
        if (at.first_of_segment) sum_ = sums_.template AllocTensor<float>();
        AscendC::LocalTensor<T> other = other_tiles_[at.number % 2];
        if (at.owns_keys) {
            AddTransposed(sum_, gradients, other, columns, at.first_of_segment);
            AddTransposed(sum_[columns * dim_], gradients[half], other[kStep * dim_], columns, at.first_of_segment);
        } else {
            product_.template Multiply<AttentionOperand::kAlongK, AttentionOperand::kAcrossK>(sum_, gradients, other, kStep, dim_, columns,
                                                                                              at.first_of_segment);
        }
        gradients_.FreeTensor(gradients);
        other_.FreeTensor(other);
        if (at.last_of_segment) StoreSums(at);
    }

    __aicore__ inline void AddTransposed(const AscendC::LocalTensor<float>& c, const AscendC::LocalTensor<T>& a, const AscendC::LocalTensor<T>& b,
                                         uint32_t columns, bool first) {
        product_.template Multiply<AttentionOperand::kAcrossK, AttentionOperand::kAcrossK>(c, a, b, columns, dim_, kStep, first);
    }

    __aicore__ inline void StoreSums(const AttentionBackwardCursor& at) {
        const uint32_t rows = at.owns_keys ? uint32_t(at.Columns()) : kStep;
        sums_.EnQue(sum_);
        sum_ = sums_.template DeQue<float>();
        const AscendC::FixpipeParamsV220 params = AscendC::FixpipeParamsV220(uint16_t(dim_), uint16_t(rows), uint16_t(rows), dim_, false);
        AscendC::Fixpipe(workspace_.sums, sum_, params);
        if (at.owns_keys) AscendC::Fixpipe(workspace_.sums[rows * dim_], sum_[rows * dim_], params);
        sums_.FreeTensor(sum_);
        AscendC::CrossCoreSetFlag<2, PIPE_FIX>(kBackwardSumsReady);
    }

    __aicore__ inline void LoadOwn(const AttentionBackwardCursor& at) {
        if (at.number > 0) own_.FreeTensor(own_tiles_);
        own_tiles_ = own_.template AllocTensor<T>();
        at.owns_keys ? LoadKeys(own_tiles_, at) : LoadQueries(own_tiles_, at);
        own_.EnQue(own_tiles_);
        own_tiles_ = own_.template DeQue<T>();
    }

    __aicore__ inline void LoadQueries(const AscendC::LocalTensor<T>& to, const AttentionBackwardCursor& at) {
        const int64_t first = at.row + at.query, stride = tiling_.query_heads * dim_;
        LoadTile(to, q_[uint64_t(first * tiling_.q_row + at.head * tiling_.q_head)], tiling_.q_row, at.Queries(), kStep);
        LoadTile(to[kStep * dim_], d_out_[uint64_t(first * stride + at.head * dim_)], stride, at.Queries(), kStep);
    }

    __aicore__ inline void LoadKeys(const AscendC::LocalTensor<T>& to, const AttentionBackwardCursor& at) {
        const int64_t first = at.row + at.key;
        LoadTile(to, k_[uint64_t(first * tiling_.k.row + at.key_head * tiling_.k.head)], tiling_.k.row, at.Keys(), at.Columns());
        LoadTile(to[kStep * dim_], v_[uint64_t(first * tiling_.v.row + at.key_head * tiling_.v.head)], tiling_.v.row, at.Keys(), at.Columns());
    }

    // Whole tiles: rows beyond the end of the sequence are zero.
    __aicore__ inline void LoadTile(const AscendC::LocalTensor<T>& to, const AscendC::GlobalTensor<T>& from, int64_t stride, int64_t live,
                                    int64_t height) {
        AttentionLoadRows(to, from, live, dim_, stride, height);
        if (live < height) AttentionLoadRows(to[uint32_t(live * kSide)], zeros_, height - live, dim_, dim_, height);
    }
};

// Half of the queries of a step per vector core. Legend: R live rows of this core, N keys of the step.
template <typename T>
class AttentionBackwardVector {
 public:
    __aicore__ inline void Init(GM_ADDR d_out, GM_ADDR out, GM_ADDR lse, GM_ADDR dq, GM_ADDR dk, GM_ADDR dv, GM_ADDR delta,
                                const AttentionSequences& sequences, const AttentionBackwardWorkspace<T>& workspace, const AttentionTiling& tiling,
                                AscendC::TPipe* pipe) {
        tiling_ = tiling;
        sequences_ = sequences;
        workspace_ = workspace;
        dim_ = uint32_t(tiling.head_dim);
        const uint64_t rows = uint64_t(tiling.tokens * tiling.query_heads), keys = uint64_t(tiling.tokens * tiling.key_heads);
        d_out_.SetGlobalBuffer((__gm__ T*)d_out, rows * dim_);
        out_.SetGlobalBuffer((__gm__ T*)out, rows * dim_);
        lse_.SetGlobalBuffer((__gm__ float*)lse, rows);
        delta_.SetGlobalBuffer((__gm__ float*)delta, rows);
        dq_.SetGlobalBuffer((__gm__ float*)dq, rows * dim_);
        dk_.SetGlobalBuffer((__gm__ float*)dk, keys * dim_);
        dv_.SetGlobalBuffer((__gm__ float*)dv, keys * dim_);
        pipe->InitBuffer(in_step_, 2, (2 * kHalf * kStep + 2 * kHalf * kBlock) * sizeof(float));
        pipe->InitBuffer(out_step_, 2, 2 * kHalf * kStep * sizeof(T));
        pipe->InitBuffer(in_sums_, 1, kSums * sizeof(float));
        pipe->InitBuffer(out_sums_, 1, kSums * sizeof(float));
        pipe->InitBuffer(in_rows_, 1, 2 * kDeltaElements * sizeof(T));
        pipe->InitBuffer(out_delta_, 1, kDeltaRows * sizeof(float));
        pipe->InitBuffer(totals_buffer_, kSums * sizeof(float));
        pipe->InitBuffer(terms_buffer_, (kDeltaElements + kDeltaRows) * sizeof(float));
        totals_ = totals_buffer_.template Get<float>();
        terms_ = terms_buffer_.template Get<float>();
    }

    __aicore__ inline void Process() {
        Deltas();
        AscendC::SyncAll<true>();  // the rows of a step may belong to another core
        AttentionBackwardCursor at;
        at.Init(sequences_, tiling_);
        while (at.Advance()) {
            Step(at);
            if (at.last_of_segment) Collect(at);
        }
    }

 private:
    static constexpr uint32_t kStep = uint32_t(kAttentionBackwardStep), kHalf = kStep / 2;
    static constexpr uint32_t kRepeat = MEGATRON_EXT_ROW_SUM_BLOCK, kBlock = 8;
    static constexpr uint32_t kSums = uint32_t(kAttentionBackwardAccumulators) / 2;  // of this core
    static constexpr uint32_t kDeltaRows = 16, kDeltaElements = kDeltaRows * uint32_t(kAttentionMaxHeadDim);
    static constexpr float kHidden = -__builtin_inff();

    AttentionTiling tiling_;
    AttentionSequences sequences_;
    AttentionBackwardWorkspace<T> workspace_;
    uint32_t dim_;
    AscendC::GlobalTensor<T> d_out_, out_;
    AscendC::GlobalTensor<float> lse_, delta_, dq_, dk_, dv_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_step_;    // [s | dp | lse | delta], the last two in every lane of a DataBlock per row
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_step_;  // [p | ds]
    AscendC::TQue<AscendC::TPosition::VECIN, 1> in_sums_, in_rows_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> out_sums_, out_delta_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> totals_buffer_, terms_buffer_;
    AscendC::LocalTensor<float> totals_, terms_;

    // delta = sum of d_out * out over D, for all rows of all heads: blocks of 64 as a tree, one after another from +0.
    __aicore__ inline void Deltas() {
        const int64_t rows = tiling_.tokens * tiling_.query_heads, cores = AscendC::GetBlockNum() * AscendC::GetTaskRatio();
        AscendC::Duplicate(terms_, 0.0f, int32_t(kDeltaElements));  // lanes from D on stay +0
        for (int64_t first = AscendC::GetBlockIdx() * kDeltaRows; first < rows; first += cores * kDeltaRows)
            Delta(first, uint32_t(AttentionMin(kDeltaRows, rows - first)));
    }

    __aicore__ inline void Delta(int64_t first, uint32_t rows) {
        const uint32_t count = rows * dim_, width = uint32_t(AttentionRound(dim_, kRepeat));
        const AscendC::LocalTensor<float> d_out = totals_, out = totals_[kDeltaElements], part = terms_[kDeltaElements];
        AscendC::LocalTensor<T> in = in_rows_.template AllocTensor<T>();
        AscendC::DataCopy(in, d_out_[uint64_t(first) * dim_], count);
        AscendC::DataCopy(in[kDeltaElements], out_[uint64_t(first) * dim_], count);
        in_rows_.EnQue(in);
        in = in_rows_.template DeQue<T>();
        AscendC::Cast(d_out, in, AscendC::RoundMode::CAST_NONE, count);
        AscendC::Cast(out, in[kDeltaElements], AscendC::RoundMode::CAST_NONE, count);
        AscendC::PipeBarrier<PIPE_V>();
        in_rows_.FreeTensor(in);
        for (uint32_t c = 0; c < dim_; c += kRepeat)
            AscendC::Mul(terms_[c], d_out[c], out[c], uint64_t(AttentionMin(kRepeat, dim_ - c)), uint8_t(rows),
                         AscendC::BinaryRepeatParams(1, 1, 1, uint8_t(width / kBlock), uint8_t(dim_ / kBlock), uint8_t(dim_ / kBlock)));
        AscendC::LocalTensor<float> delta = out_delta_.template AllocTensor<float>();
        AscendC::Duplicate(delta, 0.0f, int32_t(rows));
        for (uint32_t c = 0; c < dim_; c += kRepeat) {
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::ReduceRepeat<AscendC::ReduceType::SUM>(part, terms_[c], int32_t(kRepeat), int32_t(rows), 1, 1, int32_t(width / kBlock));
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Add(delta, delta, part, int32_t(rows));
        }
        out_delta_.EnQue(delta);
        delta = out_delta_.template DeQue<float>();
        AscendC::DataCopyPad(delta_[uint64_t(first)], delta, AscendC::DataCopyExtParams(1, uint32_t(rows * sizeof(float)), 0, 0, 0));
        out_delta_.FreeTensor(delta);
    }

    // First and number of the live rows of this core.
    __aicore__ inline int64_t FirstRow() const { return AscendC::GetSubBlockIdx() * kHalf; }
    __aicore__ inline uint32_t LiveRows(const AttentionBackwardCursor& at) const {
        return uint32_t(AttentionMax(0, AttentionMin(kHalf, at.Queries() - FirstRow())));
    }

    __aicore__ inline void Step(const AttentionBackwardCursor& at) {
        const uint32_t rows = LiveRows(at), columns = uint32_t(at.Columns());
        AscendC::LocalTensor<float> in = in_step_.template AllocTensor<float>();
        AscendC::CrossCoreWaitFlag(kBackwardScoresReady);
        if (rows > 0) Load(in, at, rows, columns);
        in_step_.EnQue(in);
        in = in_step_.template DeQue<float>();
        const AscendC::LocalTensor<float> s = in, dp = in[kHalf * kStep];
        if (rows > 0) Compute(s, dp, in[2 * kHalf * kStep], in[2 * kHalf * kStep + kHalf * kBlock], at, rows, columns);
        if (rows < kHalf) {  // rows beyond the end of the sequence add zeros
            AscendC::Duplicate(s[rows * columns], 0.0f, int32_t((kHalf - rows) * columns));
            AscendC::Duplicate(dp[rows * columns], 0.0f, int32_t((kHalf - rows) * columns));
        }
        AscendC::PipeBarrier<PIPE_V>();
        Store(s, dp, at, columns);
        in_step_.FreeTensor(in);
    }

    __aicore__ inline void Load(const AscendC::LocalTensor<float>& in, const AttentionBackwardCursor& at, uint32_t rows, uint32_t columns) {
        const uint64_t from = uint64_t(FirstRow()) * columns;
        AscendC::DataCopy(in, workspace_.Scores(at.number)[from], rows * columns);
        AscendC::DataCopy(in[kHalf * kStep], workspace_.DProbabilities(at.number)[from], rows * columns);
        // A row's number, every query_heads-th, fills a DataBlock: what pads it is documented to be its first element.
        const uint64_t row = uint64_t((at.row + at.query + FirstRow()) * tiling_.query_heads + at.head);
        const AscendC::DataCopyExtParams copy(uint16_t(rows), sizeof(float), uint32_t((tiling_.query_heads - 1) * int64_t(sizeof(float))), 0, 0);
        AscendC::DataCopyPad(in[2 * kHalf * kStep], lse_[row], copy, AscendC::DataCopyPadExtParams<float>());
        AscendC::DataCopyPad(in[2 * kHalf * kStep + kHalf * kBlock], delta_[row], copy, AscendC::DataCopyPadExtParams<float>());
    }

    // s becomes p = exp(s * scale - lse), dp becomes ds = p * (dp - delta); what a row does not see is +-0.
    __aicore__ inline void Compute(const AscendC::LocalTensor<float>& s, const AscendC::LocalTensor<float>& dp,
                                   const AscendC::LocalTensor<float>& lse, const AscendC::LocalTensor<float>& delta,
                                   const AttentionBackwardCursor& at, uint32_t rows, uint32_t columns) {
        const AscendC::BinaryRepeatParams by_row(1, 1, 0, uint8_t(columns / kBlock), uint8_t(columns / kBlock), 1);
        AscendC::Muls(s, s, tiling_.scale, int32_t(rows * columns));
        AscendC::Sub(dp, dp, delta, uint64_t(columns), uint8_t(rows), by_row);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sub(s, s, lse, uint64_t(columns), uint8_t(rows), by_row);
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t r = 0; r < rows; ++r) {
            const AttentionVisible seen = at.Sees(at.query + FirstRow() + r);
            uint64_t hidden[2] = {LowBits(columns) & ~(LowBits(seen.last - at.key) & ~LowBits(seen.first - at.key)), 0};
            if (hidden[0] != 0) AscendC::Duplicate(s[r * columns], kHidden, hidden, 1, 1, kBlock);
        }
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Exp(s, s, int32_t(rows * columns));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mul(dp, dp, s, int32_t(rows * columns));
    }

    static __aicore__ inline uint64_t LowBits(int64_t count) { return count >= 64 ? ~uint64_t(0) : count <= 0 ? 0 : (uint64_t(1) << count) - 1; }

    __aicore__ inline void Store(const AscendC::LocalTensor<float>& p, const AscendC::LocalTensor<float>& ds, const AttentionBackwardCursor& at,
                                 uint32_t columns) {
        const uint64_t to = uint64_t(FirstRow()) * columns;
        AscendC::LocalTensor<T> rounded = out_step_.template AllocTensor<T>();
        AscendC::Cast(rounded[kHalf * kStep], ds, AscendC::RoundMode::CAST_RINT, kHalf * columns);
        if (at.owns_keys) AscendC::Cast(rounded, p, AscendC::RoundMode::CAST_RINT, kHalf * columns);
        out_step_.EnQue(rounded);
        rounded = out_step_.template DeQue<T>();
        AscendC::DataCopy(workspace_.DScores(at.number)[to], rounded[kHalf * kStep], kHalf * columns);
        if (at.owns_keys) AscendC::DataCopy(workspace_.Probabilities(at.number)[to], rounded, kHalf * columns);
        out_step_.FreeTensor(rounded);
        AscendC::CrossCoreSetFlag<2, PIPE_MTE3>(kBackwardGradientsReady);
    }

    // A finished accumulator: dq is scaled and stored; dk and dv are added to those of the heads before, in order.
    __aicore__ inline void Collect(const AttentionBackwardCursor& at) {
        const uint32_t rows = uint32_t(at.owns_keys ? at.Columns() : kAttentionBackwardStep), half = rows / 2 * dim_;
        const uint64_t from = uint64_t(AscendC::GetSubBlockIdx()) * half;
        AscendC::LocalTensor<float> sums = in_sums_.template AllocTensor<float>();
        AscendC::CrossCoreWaitFlag(kBackwardSumsReady);
        AscendC::DataCopy(sums, workspace_.sums[from], half);
        if (at.owns_keys) AscendC::DataCopy(sums[half], workspace_.sums[rows * dim_ + from], half);
        in_sums_.EnQue(sums);
        sums = in_sums_.template DeQue<float>();
        if (at.owns_keys) {
            AddHead(sums, at, half);
            in_sums_.FreeTensor(sums);
            if (at.last_step) StoreKeys(at, half);
        } else {
            AscendC::LocalTensor<float> dq = out_sums_.template AllocTensor<float>();
            AscendC::Muls(dq, sums, tiling_.scale, int32_t(half));
            in_sums_.FreeTensor(sums);
            out_sums_.EnQue(dq);
            dq = out_sums_.template DeQue<float>();
            StoreRows(dq_, dq, at.row + at.query + FirstRow(), LiveRows(at), at.head, tiling_.query_heads);
            out_sums_.FreeTensor(dq);
        }
    }

    // [dk | dv] += [sums of dk * scale | sums of dv]
    __aicore__ inline void AddHead(const AscendC::LocalTensor<float>& sums, const AttentionBackwardCursor& at, uint32_t half) {
        if (at.head == at.key_head * (tiling_.query_heads / tiling_.key_heads)) AscendC::Duplicate(totals_, 0.0f, int32_t(2 * half));
        AscendC::Muls(sums, sums, tiling_.scale, int32_t(half));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(totals_, totals_, sums, int32_t(2 * half));
    }

    __aicore__ inline void StoreKeys(const AttentionBackwardCursor& at, uint32_t half) {
        const int64_t first = AscendC::GetSubBlockIdx() * (at.Columns() / 2);
        const uint32_t live = uint32_t(AttentionMax(0, AttentionMin(at.Columns() / 2, at.Keys() - first)));
        AscendC::LocalTensor<float> sums = out_sums_.template AllocTensor<float>();
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(sums, totals_, 1.0f, int32_t(2 * half));
        out_sums_.EnQue(sums);
        sums = out_sums_.template DeQue<float>();
        StoreRows(dk_, sums, at.row + at.key + first, live, at.key_head, tiling_.key_heads);
        StoreRows(dv_, sums[half], at.row + at.key + first, live, at.key_head, tiling_.key_heads);
        out_sums_.FreeTensor(sums);
    }

    // Rows of one head of a dense [T, heads, D].
    __aicore__ inline void StoreRows(const AscendC::GlobalTensor<float>& to, const AscendC::LocalTensor<float>& from, int64_t first, uint32_t rows,
                                     int64_t head, int64_t heads) {
        if (rows == 0) return;
        const uint32_t bytes = dim_ * uint32_t(sizeof(float));
        AscendC::DataCopyPad(to[uint64_t((first * heads + head) * dim_)], from,
                             AscendC::DataCopyExtParams(uint16_t(rows), bytes, 0, uint32_t((heads - 1) * bytes), 0));
    }
};

}  // namespace megatron_ext
