// Balanced binary tree over neighbouring parts, one optional rounding. Legend: P parts, n elements of one part.
#pragma once
#include "neighbour_tree.h"
#include "ordered_sum_tiling.h"

namespace megatron_ext {

template <typename Out>
class OrderedSum {
 public:
    __aicore__ inline void Init(GM_ADDR parts, GM_ADDR sum, const OrderedSumTiling& tiling, AscendC::TPipe* pipe) {
        tiling_ = tiling;
        parts_.SetGlobalBuffer((__gm__ float*)parts, uint64_t(tiling.parts * tiling.size));
        sum_.SetGlobalBuffer((__gm__ Out*)sum, uint64_t(tiling.size));
        pipe->InitBuffer(in_, 2, uint32_t(tiling.parts * tiling.tile * sizeof(float)));
        pipe->InitBuffer(out_, 2, uint32_t(tiling.tile * sizeof(Out)));
    }

    __aicore__ inline void Process() {
        for (int64_t first = AscendC::GetBlockIdx() * tiling_.tile; first < tiling_.size; first += AscendC::GetBlockNum() * tiling_.tile) {
            const int64_t left = tiling_.size - first;
            const uint32_t count = uint32_t(left < tiling_.tile ? left : tiling_.tile);
            CopyIn(first, count);
            Compute(count);
            CopyOut(first, count);
        }
    }

 private:
    OrderedSumTiling tiling_;
    AscendC::GlobalTensor<float> parts_;
    AscendC::GlobalTensor<Out> sum_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_;

    // Part p lies at p * tile, whatever count is. A part at a time: rows of more than 4 GB apart do not fit into a stride of DataCopyPad.
    __aicore__ inline void CopyIn(int64_t first, uint32_t count) {
        AscendC::LocalTensor<float> tree = in_.AllocTensor<float>();
        const AscendC::DataCopyExtParams row(1, uint32_t(count * sizeof(float)), 0, 0, 0);
        for (int64_t p = 0; p < tiling_.parts; ++p)
            AscendC::DataCopyPad(tree[uint32_t(p * tiling_.tile)], parts_[uint64_t(p * tiling_.size + first)], row,
                                 AscendC::DataCopyPadExtParams<float>());
        in_.EnQue(tree);
    }

    __aicore__ inline void Compute(uint32_t count) {
        AscendC::LocalTensor<float> tree = in_.DeQue<float>();
        AscendC::LocalTensor<Out> sum = out_.AllocTensor<Out>();
        AddNeighbours(tree, tiling_.parts, tiling_.tile, count);
        RoundTo(sum, tree, count);
        out_.EnQue(sum);
        in_.FreeTensor(tree);
    }

    __aicore__ inline void CopyOut(int64_t first, uint32_t count) {
        AscendC::LocalTensor<Out> sum = out_.DeQue<Out>();
        AscendC::DataCopyPad(sum_[uint64_t(first)], sum, AscendC::DataCopyExtParams(1, uint32_t(count * sizeof(Out)), 0, 0, 0));
        out_.FreeTensor(sum);
    }
};

}  // namespace megatron_ext
