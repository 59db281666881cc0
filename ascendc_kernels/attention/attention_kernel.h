// One flash-attention core for training, prefill, chunked prefill and decode (reference/attention.py). Scores and products on the cube core,
// online softmax and the output accumulators on the two vector cores of the block, handed over through a workspace in global memory:
//
//   cube     S(0) S(1)   PV(0)   S(2)   PV(1)   S(3)   ...        S = q x k, PV = p x v
//   vector        p(0)   p(1)    o(0)   p(2)    o(1)   ...        p = probabilities, o = o * alpha + PV
//
// Legend: M padded rows of a query tile, B keys of a tile, D head size, R rows of one vector core.
#pragma once
#include "attention_product_kernel.h"
#include "attention_items.h"

namespace megatron_ext {

constexpr uint16_t kScoresReady = 0, kProbabilitiesReady = 1, kProductReady = 2;

// Two slots of everything that the cores of a block hand to each other. A slot is free again when its next writer gets there: the cube core
// writes S(t + 2) and PV(t + 2) after p(t) resp. p(t + 2), the vector cores write p(t + 2) after PV(t).
template <typename T>
class AttentionWorkspace {
 public:
    __aicore__ inline void Init(GM_ADDR workspace, const AttentionTiling& tiling) {
        scores_size_ = tiling.tile_rows * tiling.kv_tile;
        product_size_ = tiling.tile_rows * tiling.head_dim;
        GM_ADDR base = workspace + AscendC::GetBlockIdx() / AscendC::GetTaskRatio() * tiling.block_bytes;
        scores_.SetGlobalBuffer((__gm__ float*)base, uint64_t(2 * scores_size_));
        base += 2 * scores_size_ * sizeof(float);
        product_.SetGlobalBuffer((__gm__ float*)base, uint64_t(2 * product_size_));
        base += 2 * product_size_ * sizeof(float);
        probabilities_.SetGlobalBuffer((__gm__ T*)base, uint64_t(2 * scores_size_));
    }
    __aicore__ inline AscendC::GlobalTensor<float> Scores(int64_t number) const { return scores_[uint64_t(number % 2 * scores_size_)]; }
    __aicore__ inline AscendC::GlobalTensor<float> Product(int64_t number) const { return product_[uint64_t(number % 2 * product_size_)]; }
    __aicore__ inline AscendC::GlobalTensor<T> Probabilities(int64_t number) const { return probabilities_[uint64_t(number % 2 * scores_size_)]; }

 private:
    int64_t scores_size_, product_size_;
    AscendC::GlobalTensor<float> scores_, product_;
    AscendC::GlobalTensor<T> probabilities_;
};

template <typename T>
class AttentionCube {
 public:
    __aicore__ inline void Init(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR block_tables, GM_ADDR zeros, const AttentionSequences& sequences,
                                const AttentionWorkspace<T>& workspace, const AttentionTiling& tiling, AscendC::TPipe* pipe) {
        tiling_ = tiling;
        sequences_ = sequences;
        workspace_ = workspace;
        dim_ = uint32_t(tiling.head_dim);
        tile_ = uint32_t(tiling.kv_tile);
        group_ = tiling.query_heads / tiling.key_heads;
        q_.SetGlobalBuffer((__gm__ T*)q);
        k_.SetGlobalBuffer((__gm__ T*)k);
        v_.SetGlobalBuffer((__gm__ T*)v);
        zeros_.SetGlobalBuffer((__gm__ T*)zeros, uint64_t(kAttentionMaxTile * dim_));
        if (tiling.page != 0) block_tables_.SetGlobalBuffer((__gm__ int32_t*)block_tables, uint64_t(tiling.sequences * tiling.max_pages));
        const uint32_t rows = uint32_t(tiling.tile_rows);
        pipe->InitBuffer(queries_, 1, rows * dim_ * sizeof(T));
        pipe->InitBuffer(keys_, 2, tile_ * dim_ * sizeof(T));
        pipe->InitBuffer(values_, 2, tile_ * dim_ * sizeof(T));
        pipe->InitBuffer(probabilities_, 2, rows * tile_ * sizeof(T));
        pipe->InitBuffer(scores_, 1, rows * tile_ * sizeof(float));
        pipe->InitBuffer(products_, 1, rows * dim_ * sizeof(float));
        product_.Init(pipe);
    }

    // Scores run one tile ahead of the products, so that the vector cores always have a tile to work on.
    __aicore__ inline void Process() {
        AttentionCursor ahead, behind;
        ahead.Init(sequences_, tiling_);
        behind.Init(sequences_, tiling_);
        if (ahead.Advance()) Scores(ahead);
        while (behind.Advance()) {
            if (ahead.Advance()) Scores(ahead);
            Values(behind);
        }
        if (behind.number >= 0) queries_.FreeTensor(query_tile_);
    }

 private:
    AttentionTiling tiling_;
    AttentionSequences sequences_;
    AttentionWorkspace<T> workspace_;
    uint32_t dim_, tile_;
    int64_t group_;
    AscendC::GlobalTensor<T> q_, k_, v_, zeros_;
    AscendC::GlobalTensor<int32_t> block_tables_;
    AscendC::TQue<AscendC::TPosition::A1, 1> queries_;
    AscendC::TQue<AscendC::TPosition::A1, 2> probabilities_;
    AscendC::TQue<AscendC::TPosition::B1, 2> keys_, values_;
    AscendC::TQue<AscendC::TPosition::CO1, 1> scores_, products_;
    AscendC::LocalTensor<T> query_tile_;  // of the current item
    AttentionProduct<T> product_;

    __aicore__ inline void Scores(const AttentionCursor& at) {
        if (at.first_tile) LoadQueries(at);
        AscendC::LocalTensor<T> keys = keys_.template AllocTensor<T>();
        LoadKeys(keys, k_, tiling_.k, at);
        keys_.EnQue(keys);
        keys = keys_.template DeQue<T>();
        AscendC::LocalTensor<float> scores = scores_.template AllocTensor<float>();
        const uint32_t rows = uint32_t(at.item.PaddedRows());
        product_.template Multiply<AttentionOperand::kAlongK, AttentionOperand::kAlongK>(scores, query_tile_, keys, rows, tile_, dim_, true);
        keys_.FreeTensor(keys);
        scores_.EnQue(scores);
        scores = scores_.template DeQue<float>();
        AscendC::Fixpipe(workspace_.Scores(at.number), scores,
                         AscendC::FixpipeParamsV220(uint16_t(tile_), uint16_t(rows), uint16_t(rows), tile_, false));
        scores_.FreeTensor(scores);
        AscendC::CrossCoreSetFlag<2, PIPE_FIX>(kScoresReady);
    }

    __aicore__ inline void Values(const AttentionCursor& at) {
        AscendC::LocalTensor<T> values = values_.template AllocTensor<T>();
        LoadKeys(values, v_, tiling_.v, at);
        values_.EnQue(values);
        values = values_.template DeQue<T>();
        const uint32_t rows = uint32_t(at.item.PaddedRows());
        AscendC::LocalTensor<T> probabilities = probabilities_.template AllocTensor<T>();
        AscendC::CrossCoreWaitFlag(kProbabilitiesReady);
        AttentionLoadRows(probabilities, workspace_.Probabilities(at.number), rows, tile_, tile_, rows);
        probabilities_.EnQue(probabilities);
        probabilities = probabilities_.template DeQue<T>();
        AscendC::LocalTensor<float> products = products_.template AllocTensor<float>();
        product_.template Multiply<AttentionOperand::kAlongK, AttentionOperand::kAcrossK>(products, probabilities, values, rows, dim_, tile_, true);
        values_.FreeTensor(values);
        probabilities_.FreeTensor(probabilities);
        products_.EnQue(products);
        products = products_.template DeQue<float>();
        AscendC::Fixpipe(workspace_.Product(at.number), products,
                         AscendC::FixpipeParamsV220(uint16_t(dim_), uint16_t(rows), uint16_t(rows), dim_, false));
        products_.FreeTensor(products);
        AscendC::CrossCoreSetFlag<2, PIPE_FIX>(kProductReady);
    }

    // Row (query, head of the group) of the tile is query * group + head. Rows up to a multiple of 16 are zero: M = 1 would be another mode of the
    // hardware.
    __aicore__ inline void LoadQueries(const AttentionCursor& at) {
        if (at.number > 0) queries_.FreeTensor(query_tile_);
        const AttentionItem& item = at.item;
        const int64_t rows = item.PaddedRows();
        query_tile_ = queries_.template AllocTensor<T>();
        for (int64_t g = 0; g < group_; ++g)
            AttentionLoadRows(query_tile_[uint32_t(g * kSide)],
                              q_[uint64_t(item.first_row * tiling_.q_row + (item.head * group_ + g) * tiling_.q_head)], item.queries, dim_,
                              tiling_.q_row, rows, group_);
        if (rows > item.rows) AttentionLoadRows(query_tile_[uint32_t(item.rows * kSide)], zeros_, rows - item.rows, dim_, dim_, rows);
        queries_.EnQue(query_tile_);
        query_tile_ = queries_.template DeQue<T>();
    }

    // Only the address of a key differs between packed and paged calls. Every tile is whole: keys beyond the end of the sequence are zero, so that
    // what lies in unused slots takes no part (0 x NaN), and every product has the same shape.
    __aicore__ inline void LoadKeys(const AscendC::LocalTensor<T>& to, const AscendC::GlobalTensor<T>& from, const KeyStrides& strides,
                                    const AttentionCursor& at) {
        const int64_t live = AttentionMin(tile_, at.item.keys - at.start), step = tiling_.page != 0 ? tiling_.page : live;
        for (int64_t done = 0; done < live; done += step)
            AttentionLoadRows(to[uint32_t(done * kSide)], from[KeyAddress(strides, at, at.start + done)], AttentionMin(step, live - done), dim_,
                         strides.row, tile_);
        if (live < tile_) AttentionLoadRows(to[uint32_t(live * kSide)], zeros_, tile_ - live, dim_, dim_, tile_);
    }

    __aicore__ inline uint64_t KeyAddress(const KeyStrides& strides, const AttentionCursor& at, int64_t position) const {
        const int64_t head = at.item.head * strides.head;
        if (tiling_.page == 0) return uint64_t((sequences_.FirstRow(at.item.sequence) + position) * strides.row + head);
        const int64_t block = block_tables_.GetValue(uint64_t(at.item.sequence * tiling_.max_pages + position / tiling_.page));
        return uint64_t(block * strides.page + head);
    }
};

// Maximum and sum of the rows of one vector core, and what they were before: fp32 [R] each, and the output before the division [R, D].
template <typename T>
class AttentionVector {
 public:
    __aicore__ inline void Init(GM_ADDR out, GM_ADDR lse, const AttentionSequences& sequences, const AttentionWorkspace<T>& workspace,
                                const AttentionTiling& tiling, AscendC::TPipe* pipe) {
        tiling_ = tiling;
        sequences_ = sequences;
        workspace_ = workspace;
        dim_ = uint32_t(tiling.head_dim);
        tile_ = uint32_t(tiling.kv_tile);
        group_ = tiling.query_heads / tiling.key_heads;
        out_.SetGlobalBuffer((__gm__ T*)out, uint64_t(tiling.tokens * tiling.query_heads * dim_));
        lse_.SetGlobalBuffer((__gm__ float*)lse, uint64_t(tiling.tokens * tiling.query_heads));
        const uint32_t rows = uint32_t(tiling.tile_rows) / 2;
        const bool splits = tiling.kv_split != 0;
        pipe->InitBuffer(in_scores_, splits ? 1 : 2, rows * tile_ * sizeof(float));  // the room of the second one holds the total of the splits
        pipe->InitBuffer(in_product_, 1, rows * dim_ * sizeof(float));
        pipe->InitBuffer(out_probabilities_, 2, rows * tile_ * sizeof(T));
        pipe->InitBuffer(out_rows_, 1, rows * dim_ * sizeof(T));
        pipe->InitBuffer(out_lse_, 1, rows * kBlock * sizeof(float));
        pipe->InitBuffer(output_buffer_, rows * dim_ * sizeof(float));
        pipe->InitBuffer(total_buffer_, splits ? rows * dim_ * sizeof(float) : kBlock * sizeof(float));
        pipe->InitBuffer(stats_buffer_, kStats * kMaxRows * sizeof(float));
        pipe->InitBuffer(wide_buffer_, rows * kBlock * sizeof(float));
        output_ = output_buffer_.template Get<float>();
        total_output_ = total_buffer_.template Get<float>();
        wide_ = wide_buffer_.template Get<float>();
        const AscendC::LocalTensor<float> stats = stats_buffer_.template Get<float>();
        maximum_ = stats[0 * kMaxRows], sum_ = stats[1 * kMaxRows], new_maximum_ = stats[2 * kMaxRows], part_ = stats[3 * kMaxRows];
        total_maximum_ = stats[4 * kMaxRows], total_sum_ = stats[5 * kMaxRows], beta_ = stats[6 * kMaxRows];
        alpha_[0] = stats[7 * kMaxRows], alpha_[1] = stats[8 * kMaxRows];
    }

    // The output of a tile is added while the cube core works on the next one. At the end of a split nothing is outstanding.
    __aicore__ inline void Process() {
        AttentionCursor at;
        at.Init(sequences_, tiling_);
        bool outstanding = false;
        while (at.Advance()) {
            if (at.first_tile) Start(at.item);
            if (!outstanding) StartSplit(at.first_tile);
            Softmax(at);
            if (outstanding) Accumulate(at.number - 1);
            outstanding = !at.EndsSplit();
            if (outstanding) continue;
            Accumulate(at.number);
            if (tiling_.kv_split != 0) MergeSplit();
            if (at.last_tile) Finish(at.item);
        }
    }

 private:
    static constexpr uint32_t kRepeat = MEGATRON_EXT_ROW_SUM_BLOCK;  // fp32 lanes of a repeat, which ReduceRepeat adds as one tree
    static constexpr uint32_t kBlock = 8;                            // fp32 lanes of a DataBlock
    static constexpr uint32_t kMaxRows = 64, kStats = 9;
    // Below every score. Finite, so that a tile that a row does not see changes nothing: its factor is exp(0) = 1, its probabilities are +0.
    static constexpr float kLowest = -3.40282346638528859811704183484516925e+38f;
    static constexpr float kHidden = -__builtin_inff();

    AttentionTiling tiling_;
    AttentionSequences sequences_;
    AttentionWorkspace<T> workspace_;
    uint32_t dim_, tile_;
    int64_t group_;
    uint32_t rows_;     // R of the current item
    int64_t first_;     // row of the item that is this core's first
    AscendC::GlobalTensor<T> out_;
    AscendC::GlobalTensor<float> lse_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_scores_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> in_product_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_probabilities_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> out_rows_, out_lse_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> output_buffer_, total_buffer_, stats_buffer_, wide_buffer_;
    AscendC::LocalTensor<float> output_, total_output_, wide_;
    AscendC::LocalTensor<float> maximum_, sum_, new_maximum_, part_, total_maximum_, total_sum_, beta_, alpha_[2];

    __aicore__ inline void Start(const AttentionItem& item) {
        rows_ = uint32_t(item.PaddedRows()) / 2;
        first_ = AscendC::GetSubBlockIdx() * rows_;
    }

    __aicore__ inline void StartSplit(bool first) {
        Clear(maximum_, sum_, output_);
        if (first && tiling_.kv_split != 0) Clear(total_maximum_, total_sum_, total_output_);
    }

    __aicore__ inline void Clear(const AscendC::LocalTensor<float>& maximum, const AscendC::LocalTensor<float>& sum,
                                 const AscendC::LocalTensor<float>& output) {
        AscendC::Duplicate(maximum, kLowest, int32_t(rows_));
        AscendC::Duplicate(sum, 0.0f, int32_t(rows_));
        AscendC::Duplicate(output, 0.0f, int32_t(rows_ * dim_));
    }

    // Alignment 3, block rhythm: one step of the online softmax per tile of B keys.
    __aicore__ inline void Softmax(const AttentionCursor& at) {
        const AscendC::LocalTensor<float> alpha = alpha_[at.number % 2];
        AscendC::LocalTensor<float> s = in_scores_.template AllocTensor<float>();
        AscendC::CrossCoreWaitFlag(kScoresReady);
        AscendC::DataCopy(s, workspace_.Scores(at.number)[uint64_t(first_ * tile_)], rows_ * tile_);
        in_scores_.EnQue(s);
        s = in_scores_.template DeQue<float>();
        AscendC::Muls(s, s, tiling_.scale, int32_t(rows_ * tile_));
        AscendC::PipeBarrier<PIPE_V>();
        Hide(s, at);
        NewMaximum(s);
        AscendC::Sub(alpha, maximum_, new_maximum_, int32_t(rows_));
        AscendC::Brcb(wide_, new_maximum_, uint8_t(rows_ / kBlock), AscendC::BrcbRepeatParams(1, kBlock));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Exp(alpha, alpha, int32_t(rows_));
        AscendC::Muls(maximum_, new_maximum_, 1.0f, int32_t(rows_));
        for (uint32_t c = 0; c < tile_; c += kRepeat)
            AscendC::Sub(s[c], s[c], wide_, uint64_t(kRepeat), uint8_t(rows_), RowParams(tile_));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Exp(s, s, int32_t(rows_ * tile_));
        AscendC::Mul(sum_, sum_, alpha, int32_t(rows_));
        AscendC::PipeBarrier<PIPE_V>();
        StoreProbabilities(s, at);
        AddSums(s);
        in_scores_.FreeTensor(s);
    }

    // new_maximum = max(maximum, scores)
    __aicore__ inline void NewMaximum(const AscendC::LocalTensor<float>& s) {
        for (uint32_t c = 0; c < tile_; c += kRepeat) {
            AscendC::ReduceRepeat<AscendC::ReduceType::MAX>(part_, s[c], int32_t(kRepeat), int32_t(rows_), 1, 1, int32_t(tile_ / kBlock),
                                                            AscendC::ReduceOrder::ORDER_ONLY_VALUE);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Max(new_maximum_, c == 0 ? maximum_ : new_maximum_, part_, int32_t(rows_));
            AscendC::PipeBarrier<PIPE_V>();
        }
    }

    // Alignment 4, precision: the probabilities are rounded to the model dtype, nearest even, before they meet the values; their sum is not.
    __aicore__ inline void StoreProbabilities(const AscendC::LocalTensor<float>& s, const AttentionCursor& at) {
        AscendC::LocalTensor<T> p = out_probabilities_.template AllocTensor<T>();
        AscendC::Cast(p, s, AscendC::RoundMode::CAST_RINT, rows_ * tile_);
        out_probabilities_.EnQue(p);
        p = out_probabilities_.template DeQue<T>();
        AscendC::DataCopy(workspace_.Probabilities(at.number)[uint64_t(first_ * tile_)], p, rows_ * tile_);
        out_probabilities_.FreeTensor(p);
        AscendC::CrossCoreSetFlag<2, PIPE_MTE3>(kProbabilitiesReady);
    }

    // Alignment 2, reduce order: sum += probabilities of the tile, the tree of a repeat, then repeats in order.
    __aicore__ inline void AddSums(const AscendC::LocalTensor<float>& s) {
        AscendC::ReduceRepeat<AscendC::ReduceType::SUM>(part_, s, int32_t(kRepeat), int32_t(rows_), 1, 1, int32_t(tile_ / kBlock));
        for (uint32_t c = kRepeat; c < tile_; c += kRepeat) {
            AscendC::ReduceRepeat<AscendC::ReduceType::SUM>(new_maximum_, s[c], int32_t(kRepeat), int32_t(rows_), 1, 1, int32_t(tile_ / kBlock));
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Add(part_, part_, new_maximum_, int32_t(rows_));
        }
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(sum_, sum_, part_, int32_t(rows_));
    }

    // Keys that a row does not see: exp(-inf) = +0 whatever the maximum, and no maximum comes from them.
    __aicore__ inline void Hide(const AscendC::LocalTensor<float>& s, const AttentionCursor& at) const {
        const int64_t last = AttentionMin(first_ + rows_, at.item.rows) - 1;
        if (last >= first_ && Row(at, first_).last >= at.start + tile_ && Row(at, last).first <= at.start) return;
        for (uint32_t r = 0; r < rows_; ++r) {
            const AttentionVisible seen = Row(at, first_ + r);
            for (uint32_t c = 0; c < tile_; c += kRepeat) {
                const uint64_t shown = LowBits(seen.last - at.start - c) & ~LowBits(seen.first - at.start - c);
                uint64_t hidden[2] = {~shown, 0};
                if (hidden[0] != 0) AscendC::Duplicate(s[r * tile_ + c], kHidden, hidden, 1, 1, kBlock);
            }
        }
        AscendC::PipeBarrier<PIPE_V>();
    }

    // What row `row` of the item sees; rows that pad the tile are like the last one.
    __aicore__ inline AttentionVisible Row(const AttentionCursor& at, int64_t row) const { return at.Sees(AttentionMin(row, at.item.rows - 1)); }
    static __aicore__ inline uint64_t LowBits(int64_t count) { return count >= 64 ? ~uint64_t(0) : count <= 0 ? 0 : (uint64_t(1) << count) - 1; }

    // x[r] op wide[r], 64 columns of rows of `width`
    static __aicore__ inline AscendC::BinaryRepeatParams RowParams(uint32_t width) {
        return AscendC::BinaryRepeatParams(1, 1, 0, uint8_t(width / kBlock), uint8_t(width / kBlock), 1);
    }

    // x[r] *= factor[r] for rows of D
    __aicore__ inline void ScaleRows(const AscendC::LocalTensor<float>& x, const AscendC::LocalTensor<float>& factor) {
        AscendC::Brcb(wide_, factor, uint8_t(rows_ / kBlock), AscendC::BrcbRepeatParams(1, kBlock));
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t c = 0; c < dim_; c += kRepeat)
            AscendC::Mul(x[c], x[c], wide_, uint64_t(AttentionMin(kRepeat, dim_ - c)), uint8_t(rows_), RowParams(dim_));
        AscendC::PipeBarrier<PIPE_V>();
    }

    // o = o * alpha + PV, each operation rounded
    __aicore__ inline void Accumulate(int64_t number) {
        AscendC::LocalTensor<float> product = in_product_.template AllocTensor<float>();
        AscendC::CrossCoreWaitFlag(kProductReady);
        AscendC::DataCopy(product, workspace_.Product(number)[uint64_t(first_ * dim_)], rows_ * dim_);
        in_product_.EnQue(product);
        ScaleRows(output_, alpha_[number % 2]);
        product = in_product_.template DeQue<float>();
        AscendC::Add(output_, output_, product, int32_t(rows_ * dim_));
        in_product_.FreeTensor(product);
    }

    // total = total merged with this split, in index order: both scaled to the common maximum.
    __aicore__ inline void MergeSplit() {
        AscendC::Max(new_maximum_, total_maximum_, maximum_, int32_t(rows_));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sub(part_, total_maximum_, new_maximum_, int32_t(rows_));
        AscendC::Sub(beta_, maximum_, new_maximum_, int32_t(rows_));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Exp(part_, part_, int32_t(rows_));
        AscendC::Exp(beta_, beta_, int32_t(rows_));
        AscendC::Muls(total_maximum_, new_maximum_, 1.0f, int32_t(rows_));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mul(total_sum_, total_sum_, part_, int32_t(rows_));
        AscendC::Mul(sum_, sum_, beta_, int32_t(rows_));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(total_sum_, total_sum_, sum_, int32_t(rows_));
        ScaleRows(total_output_, part_);
        ScaleRows(output_, beta_);
        AscendC::Add(total_output_, total_output_, output_, int32_t(rows_ * dim_));
        AscendC::PipeBarrier<PIPE_V>();
    }

    // out = o / sum, lse = maximum + log(sum)
    __aicore__ inline void Finish(const AttentionItem& item) {
        const bool splits = tiling_.kv_split != 0;
        const AscendC::LocalTensor<float> o = splits ? total_output_ : output_, sum = splits ? total_sum_ : sum_;
        AscendC::Brcb(wide_, sum, uint8_t(rows_ / kBlock), AscendC::BrcbRepeatParams(1, kBlock));
        AscendC::Ln(part_, sum, int32_t(rows_));
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t c = 0; c < dim_; c += kRepeat)
            AscendC::Div(o[c], o[c], wide_, uint64_t(AttentionMin(kRepeat, dim_ - c)), uint8_t(rows_), RowParams(dim_));
        AscendC::Add(part_, part_, splits ? total_maximum_ : maximum_, int32_t(rows_));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::LocalTensor<T> rows = out_rows_.template AllocTensor<T>();
        AscendC::Cast(rows, o, AscendC::RoundMode::CAST_RINT, rows_ * dim_);
        out_rows_.EnQue(rows);
        AscendC::LocalTensor<float> lse = out_lse_.template AllocTensor<float>();
        AscendC::Brcb(lse, part_, uint8_t(rows_ / kBlock), AscendC::BrcbRepeatParams(1, kBlock));
        out_lse_.EnQue(lse);
        AscendC::PipeBarrier<PIPE_V>();
        Store(item);
    }

    // Rows of one head of the group at a time: in the tile they lie `group` rows apart, in memory a query apart.
    __aicore__ inline void Store(const AttentionItem& item) {
        AscendC::LocalTensor<T> rows = out_rows_.template DeQue<T>();
        AscendC::LocalTensor<float> lse = out_lse_.template DeQue<float>();
        const int64_t end = AttentionMin(first_ + rows_, item.rows), heads = tiling_.query_heads;
        for (int64_t r = first_; r < AttentionMin(first_ + group_, end); ++r) {
            const uint16_t count = uint16_t((end - r + group_ - 1) / group_);
            const uint32_t from = uint32_t(r - first_), gap = uint32_t(group_ - 1);
            const uint64_t to = uint64_t((item.first_row + r / group_) * heads + item.head * group_ + r % group_);
            AscendC::DataCopyPad(out_[to * dim_], rows[from * dim_],
                                 AscendC::DataCopyExtParams(count, uint32_t(dim_ * sizeof(T)), gap * uint32_t(dim_ * sizeof(T)) / 32,
                                                            uint32_t((heads - 1) * dim_ * int64_t(sizeof(T))), 0));
            AscendC::DataCopyPad(lse_[to], lse[from * kBlock],
                                 AscendC::DataCopyExtParams(count, sizeof(float), gap, uint32_t((heads - 1) * int64_t(sizeof(float))), 0));
        }
        out_rows_.FreeTensor(rows);
        out_lse_.FreeTensor(lse);
    }
};

}  // namespace megatron_ext
