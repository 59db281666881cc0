// Which tiles a block takes of the experts' weight gradients. The arithmetic is that of ../linear/linear_wgrad_kernel.h.
#pragma once
#include "../linear/linear_wgrad_kernel.h"
#include "grouped_linear_kernel.h"

namespace megatron_ext {

// Gradients that lie anywhere, by their addresses.
class GroupedLinearGradients {
 public:
    __aicore__ inline void Init(GM_ADDR addresses, int64_t experts, uint64_t size) {
        addresses_.SetGlobalBuffer((__gm__ int64_t*)addresses, uint64_t(experts));
        size_ = size;
    }
    __aicore__ inline AscendC::GlobalTensor<float> operator[](int64_t expert) const {
        AscendC::GlobalTensor<float> grad;
        grad.SetGlobalBuffer((__gm__ float*)addresses_.GetValue(uint64_t(expert)), size_);
        return grad;
    }

 private:
    AscendC::GlobalTensor<int64_t> addresses_;
    uint64_t size_ = 0;
};

// The tiles of every expert that has rows. At(i) wants ascending i.
class GroupedLinearWgradTiles : public LinearWgradBlock {
 public:
    __aicore__ inline GroupedLinearWgradTiles(GM_ADDR counts, GM_ADDR boundaries, const GroupedLinearWgradTiling& tiling)
        : LinearWgradBlock(tiling.linear) {
        boundaries_.SetGlobalBuffer((__gm__ int64_t*)boundaries, uint64_t(tiling.linear.sequences + 1));
        int64_t busy = 0;
        for (at_.Init(counts, tiling.experts, tiling.rows); !at_.IsAtEnd(); at_.Next()) busy += at_.rows > 0;
        at_.Start();
        FindSequences();
        Share(busy * tiles_of_grad);
    }
    __aicore__ inline LinearWgradTile At(int64_t i) {
        for (; Taken(i) >= before_ + TilesHere(); FindSequences()) {
            before_ += TilesHere();
            sequence_ += sequences_;
            at_.Next();
        }
        return Cut(Taken(i) - before_, sequence_, sequences_, at_.expert);
    }

 private:
    ExpertCursor at_;
    AscendC::GlobalTensor<int64_t> boundaries_;
    int64_t before_ = 0;                   // tiles of the experts before
    int64_t sequence_ = 0, sequences_ = 0;  // of this expert

    __aicore__ inline int64_t TilesHere() const { return at_.rows > 0 ? tiles_of_grad : 0; }
    __aicore__ inline void FindSequences() {
        for (sequences_ = 0; sequence_ + sequences_ < t.sequences && Boundary(sequence_ + sequences_) < at_.first + at_.rows;) ++sequences_;
    }
    __aicore__ inline int64_t Boundary(int64_t i) const { return boundaries_.GetValue(uint64_t(i)); }
};

}  // namespace megatron_ext
