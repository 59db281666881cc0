// Which part of the work a block has, tile by tile. The cube core and the vector cores of a block walk through the same items.
#pragma once
#include "attention_tiling.h"
#include "kernel_operator.h"

namespace megatron_ext {

__aicore__ inline int64_t AttentionMin(int64_t a, int64_t b) { return a < b ? a : b; }
__aicore__ inline int64_t AttentionMax(int64_t a, int64_t b) { return a > b ? a : b; }
__aicore__ inline int64_t AttentionRound(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Alignment 1, the visible set: keys [first, last) that a row sees.
struct AttentionVisible {
    int64_t first, last;
};

__aicore__ inline AttentionVisible AttentionSees(const AttentionTiling& tiling, int64_t position, int64_t keys) {
    const int64_t last = tiling.causal ? position + 1 : keys;
    return {tiling.window ? AttentionMax(0, last - tiling.window) : 0, last};
}

// The sequences of a call.
class AttentionSequences {
 public:
    __aicore__ inline void Init(GM_ADDR cu_query_lens, GM_ADDR kv_lens, const AttentionTiling& tiling) {
        paged_ = tiling.page != 0;
        offsets_.SetGlobalBuffer((__gm__ int32_t*)cu_query_lens, uint64_t(tiling.sequences + 1));
        if (paged_) lengths_.SetGlobalBuffer((__gm__ int32_t*)kv_lens, uint64_t(tiling.sequences));
    }
    __aicore__ inline int64_t FirstRow(int64_t b) const { return offsets_.GetValue(uint64_t(b)); }
    __aicore__ inline int64_t Queries(int64_t b) const { return FirstRow(b + 1) - FirstRow(b); }
    __aicore__ inline int64_t Keys(int64_t b) const { return paged_ ? int64_t(lengths_.GetValue(uint64_t(b))) : Queries(b); }

 private:
    bool paged_ = false;
    AscendC::GlobalTensor<int32_t> offsets_, lengths_;
};

// A query tile of one sequence and one key head: `rows` rows, (query, head of the group) packed, all heads of a query together.
struct AttentionItem {
    int64_t sequence, head;
    int64_t first_row;  // of q
    int64_t queries, rows;
    int64_t position;  // of the first query
    int64_t keys;      // of the sequence

    __aicore__ inline int64_t PaddedRows() const { return AttentionRound(rows, 16); }
};

// Walks through the key tiles of this block's items: item after item, tiles in ascending order. An item's owner does all of its tiles, so
// nothing depends on the number of blocks.
class AttentionCursor {
 public:
    AttentionItem item;
    int64_t start;              // first key of the tile
    int64_t last;               // end of the keys that any row of the item sees
    int64_t number = -1;        // tiles of this block so far; its parity chooses the slot of the workspace
    bool first_tile, last_tile;  // of the item

    __aicore__ inline void Init(const AttentionSequences& sequences, const AttentionTiling& tiling) {
        sequences_ = sequences;
        tiling_ = tiling;
        group_ = tiling.query_heads / tiling.key_heads;
        queries_ = tiling.tile_rows / group_;
        next_ = AscendC::GetBlockIdx() / AscendC::GetTaskRatio();
    }

    // Alignment 3, block rhythm: tiles of kv_tile keys, anchored at position 0 of the sequence, in ascending order.
    __aicore__ inline bool Advance() {
        first_tile = number < 0 || last_tile;
        if (first_tile) {
            if (!NextItem()) return false;
            start = Sees(0).first / tiling_.kv_tile * tiling_.kv_tile;
            last = Sees(item.rows - 1).last;
        } else {
            start += tiling_.kv_tile;
        }
        last_tile = start + tiling_.kv_tile >= last;
        ++number;
        return true;
    }

    __aicore__ inline AttentionVisible Sees(int64_t row) const { return AttentionSees(tiling_, item.position + row / group_, item.keys); }
    __aicore__ inline bool EndsSplit() const {
        return last_tile || (tiling_.kv_split != 0 && (start + tiling_.kv_tile) % tiling_.kv_split == 0);
    }

 private:
    AttentionSequences sequences_;
    AttentionTiling tiling_;
    int64_t group_, queries_;
    int64_t next_, sequence_ = 0, before_ = 0;  // next item of this block; items of the sequences before this one

    __aicore__ inline bool NextItem() {
        for (; sequence_ < tiling_.sequences; ++sequence_) {
            const int64_t queries = sequences_.Queries(sequence_), tiles = (queries + queries_ - 1) / queries_;
            if (next_ < before_ + tiles * tiling_.key_heads) {
                Take(next_ - before_, tiles, queries);
                next_ += AscendC::GetBlockNum();
                return true;
            }
            before_ += tiles * tiling_.key_heads;
        }
        return false;
    }

    __aicore__ inline void Take(int64_t index, int64_t tiles, int64_t queries) {
        const int64_t first = (tiles - 1 - index / tiling_.key_heads) * queries_;  // the longest tiles first
        item.sequence = sequence_;
        item.head = index % tiling_.key_heads;
        item.first_row = sequences_.FirstRow(sequence_) + first;
        item.queries = AttentionMin(queries_, queries - first);
        item.rows = item.queries * group_;
        item.keys = sequences_.Keys(sequence_);
        item.position = item.keys - queries + first;
    }
};

}  // namespace megatron_ext
