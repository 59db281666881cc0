// Native twins of the kernels of this folder (reference/sampling.py). Rows over threads.
//
// A block of 64 whose maximum is below a cut holds none of its tokens, so most blocks are left out of most sums: +0 changes none. Weights are
// computed once, of the blocks that the first sum of weights needs: prefixes only get shorter.
#include <memory>

#include "native_call.h"
#include "parallel.h"
#include "sampling_order.h"
#include "softmax.h"

namespace megatron_ext {
namespace {

constexpr double kWorkOfColumn = 32, kWorkOfContinuation = 4;  // as much as so many multiply-adds of a contraction
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr Index kVectors = kRowSumBlock / kLanes;

struct Numbers {
    const float* values;
    float At(uint32_t i) const { return values[i]; }
};

// What a thread needs for its rows.
struct SamplingRoom {
    explicit SamplingRoom(const SamplingTiling& t)
        : blocks((t.segment + kRowSumBlock - 1) / kRowSumBlock), maxima(t.segments * blocks), sums(blocks),
          weights(new float[t.segments * blocks * kRowSumBlock]), ends(t.segments * kRowSumBlock) {}
    Index blocks;  // of a segment
    std::vector<float> maxima, sums;
    std::unique_ptr<float[]> weights;
    std::vector<float> ends;  // the block of each segment that is not whole, filled up with -inf
};

class SamplingRow {
 public:
    SamplingRow(const SamplingTiling& tiling, const float* x, float temperature, float log_min_p, SamplingRoom& room)
        : t_(tiling), x_(x), temperature_(temperature), log_min_p_(log_min_p), room_(room) {
        largest_ = -kInfinity;
        bool finite = true;
        for (Index s = 0; s < t_.segments; ++s)
            for (Index b = 0; b < room_.blocks; ++b) {
                float& block = room_.maxima[At(s, b)];
                block = Maximum(s, b);
                finite = finite && block == block;
                largest_ = block > largest_ ? block : largest_;
            }
        finite_ = finite && largest_ >= kLowestLogit && largest_ <= -kLowestLogit;
        largest_ = largest_ + 0.0f;
        row_max_ = (t_.scaled ? largest_ / temperature_ : largest_) + 0.0f;
        finite_ = finite_ && row_max_ >= kLowestLogit && row_max_ <= -kLowestLogit;
    }

    bool Finite() const { return finite_; }
    float Largest() const { return largest_; }
    int64_t Columns() const { return t_.columns; }

    float Mass(const SamplingCut& cut, SamplingLeaf leaf) {
        float sums[kSamplingMaxSegments] = {};  // segments is at least 1, which a compiler cannot know
        for (Index s = 0; s < t_.segments; ++s) sums[s] = SegmentMass(s, cut, leaf);
        return pair_tree(sums, t_.segments);
    }

    int64_t ChooseSegment(const SamplingCut& cut, uint32_t word) {
        float sums[kSamplingMaxSegments];
        for (Index s = 0; s < t_.segments; ++s) sums[s] = SegmentMass(s, cut, SamplingLeaf::kWeight);
        return Choose(Numbers{sums}, uint32_t(t_.segments), word);
    }
    int64_t ChooseBlock(const SamplingCut& cut, int64_t s, uint32_t word) {
        for (Index b = 0; b < room_.blocks; ++b) room_.sums[b] = BlockMass(s, b, cut, SamplingLeaf::kWeight);
        return Choose(Numbers{room_.sums.data()}, uint32_t(room_.blocks), word);
    }
    int64_t ChooseToken(const SamplingCut& cut, int64_t s, int64_t b, uint32_t word) {
        float leaves[kRowSumBlock];
        for (Index v = 0; v < kVectors; ++v) store(leaves + v * kLanes, Leaves(s, b, v, cut, SamplingLeaf::kWeight));
        return First(s, b) + Choose(Numbers{leaves}, uint32_t(kRowSumBlock), word);
    }

 private:
    const SamplingTiling& t_;
    const float* x_;
    float temperature_, log_min_p_, largest_, row_max_;
    bool finite_, weighed_ = false;
    SamplingRoom& room_;

    Index At(Index s, Index b) const { return s * room_.blocks + b; }
    Index First(Index s, Index b) const { return s * t_.segment + b * kRowSumBlock; }

    Index CountOf(Index s, Index b) const {
        const Index end = std::min((s + 1) * t_.segment, t_.columns);
        return std::clamp<Index>(end - First(s, b), 0, kRowSumBlock);
    }
    // At most one block of a segment is neither whole nor empty, and an empty one has no token above any cut.
    const float* Logits(Index s, Index b) const {
        return CountOf(s, b) == kRowSumBlock ? x_ + First(s, b) : room_.ends.data() + s * kRowSumBlock;
    }

    // NaN if there is one, -inf of an empty block; copies a block that is not whole.
    float Maximum(Index s, Index b) {
        const Index count = CountOf(s, b);
        if (count == 0) return -kInfinity;
        if (count < kRowSumBlock) {
            float* end = room_.ends.data() + s * kRowSumBlock;
            std::fill(std::copy_n(x_ + First(s, b), count, end), end + kRowSumBlock, -kInfinity);
        }
        const float* x = Logits(s, b);
        Lanes best = load(x);
        IntLanes bad = unordered(best, best);
        for (Index v = 1; v < kVectors; ++v) {
            const Lanes lanes = load(x + v * kLanes);
            bad |= unordered(lanes, lanes);
            best = larger(best, lanes);
        }
        if (any(bad)) return std::numeric_limits<float>::quiet_NaN();
        float found = best[0];
        for (Index l = 1; l < kLanes; ++l) found = best[l] > found ? best[l] : found;
        return found;
    }

    Lanes BelowMax(Lanes x) const { return (t_.scaled ? x / temperature_ : x) - row_max_; }

    // Weights of the blocks that reach into the prefix.
    void Weigh(const SamplingCut& cut) {
        weighed_ = true;
        for (Index s = 0; s < t_.segments; ++s)
            for (Index b = 0; b < room_.blocks; ++b) {
                if (room_.maxima[At(s, b)] < cut.value) continue;
                const float* x = Logits(s, b);
                float* weights = room_.weights.get() + At(s, b) * kRowSumBlock;
                for (Index v = 0; v < kVectors; v += kTogether) {
                    Lanes lanes[kTogether];
                    for (Index j = 0; j < kTogether; ++j) lanes[j] = BelowMax(load(x + (v + j) * kLanes));
                    exp_lanes(lanes);
                    for (Index j = 0; j < kTogether; ++j) store(weights + (v + j) * kLanes, lanes[j]);
                }
            }
    }

    // Vector v of a block: what its tokens add, +0 outside the prefix.
    Lanes Leaves(Index s, Index b, Index v, const SamplingCut& cut, SamplingLeaf leaf) const {
        const Lanes x = load(Logits(s, b) + v * kLanes);
        const IntLanes ids = IntLanes{0, 1, 2, 3, 4, 5, 6, 7} + int32_t(First(s, b) + v * kLanes);
        IntLanes kept = (x > cut.value) | ((x == cut.value) & (ids <= int32_t(cut.index)));
        Lanes mass = splat(1.0f);
        if (leaf == SamplingLeaf::kWeight) mass = load(room_.weights.get() + At(s, b) * kRowSumBlock + v * kLanes);
        if (leaf == SamplingLeaf::kAboveMinP) kept &= BelowMax(x) >= log_min_p_;
        return Lanes(IntLanes(mass) & kept);
    }

    float BlockMass(Index s, Index b, const SamplingCut& cut, SamplingLeaf leaf) const {
        if (room_.maxima[At(s, b)] < cut.value) return 0.0f;
        Lanes leaves[kVectors];
        for (Index v = 0; v < kVectors; ++v) leaves[v] = Leaves(s, b, v, cut, leaf);
        return lane_tree(lane_trees(leaves));
    }

    float SegmentMass(Index s, const SamplingCut& cut, SamplingLeaf leaf) {
        if (leaf == SamplingLeaf::kWeight && !weighed_) Weigh(cut);
        const float* maxima = room_.maxima.data() + At(s, 0);
        float total = 0.0f;
        for (Index b = 0; b < room_.blocks; ++b)
            if (maxima[b] >= cut.value) total = total + BlockMass(s, b, cut, leaf);
        return total;
    }
};

struct SamplingOperands {
    const float *logits, *temperature;
    const int64_t *seeds, *positions, *top_k;
    const float *top_p, *log_min_p;
    int64_t *tokens, *last;

    explicit SamplingOperands(const KernelCall& call)
        : logits(static_cast<const float*>(call.operands[0])), temperature(static_cast<const float*>(call.operands[1])),
          seeds(static_cast<const int64_t*>(call.operands[2])), positions(static_cast<const int64_t*>(call.operands[3])),
          top_k(static_cast<const int64_t*>(call.operands[4])), top_p(static_cast<const float*>(call.operands[5])),
          log_min_p(static_cast<const float*>(call.operands[6])), tokens(static_cast<int64_t*>(call.operands[7])),
          last(static_cast<int64_t*>(call.operands[8])) {}

    SamplingFilters filters(const SamplingTiling& t, Index row) const {
        return {t.has_top_k ? top_k[row] : 0, t.has_top_p ? top_p[row] : 1.0f, t.has_min_p ? log_min_p[row] : kNoLimit};
    }
};

void sample(const KernelCall& call, const SamplingTiling& t) {
    const SamplingOperands in(call);
    parallel_ranges(t.rows, call.threads, kWorkOfColumn * t.rows * t.columns, [&](Index first, Index last) {
        SamplingRoom room(t);
        for (Index i = first; i < last; ++i) {
            const SamplingFilters filters = in.filters(t, i);
            const float temperature = t.scaled ? in.temperature[i * t.temperature_stride] : 1.0f;
            SamplingRow row(t, in.logits + i * t.row_stride, temperature, filters.log_min_p, room);
            in.tokens[i] = in.last[i] = -1;
            if (!row.Finite()) continue;
            const SamplingCut cut = Support(row, filters);
            in.last[i] = filters.Count() || filters.Mass() ? cut.index : t.columns;
            in.tokens[i] = Draw(row, cut, Philox(uint64_t(in.seeds[i]), uint64_t(in.positions[i])));
        }
    });
}

void support_mask(const KernelCall& call, const SamplingTiling& t) {
    const float* logits = static_cast<const float*>(call.operands[0]);
    const int64_t* last_tokens = static_cast<const int64_t*>(call.operands[1]);
    uint8_t* mask = static_cast<uint8_t*>(call.operands[2]);
    parallel_ranges(t.rows, call.threads, kWorkOfContinuation * t.rows * t.columns, [=](Index first, Index end) {
        for (Index row = first; row < end; ++row) {
            const float* x = logits + row * t.row_stride;
            uint8_t* kept = mask + row * t.columns;
            const int64_t last = last_tokens[row];
            const float value = last < 0 ? kInfinity : last < t.columns ? x[last] : kLowestLogit;
            const Index ties = last < 0 ? 0 : std::min<Index>(last + 1, t.columns);  // of the first columns, equal logits are kept
            for (Index i = 0; i < ties; ++i) kept[i] = x[i] >= value;
            for (Index i = ties; i < t.columns; ++i) kept[i] = last >= 0 && x[i] > value;
        }
    });
}

// The best continuations so far, the best one first.
struct BeamList {
    float scores[kBeamMaxKept];
    int64_t parents[kBeamMaxKept], tokens[kBeamMaxKept];
    Index kept;

    explicit BeamList(Index count) : kept(count) {
        std::fill_n(scores, count, -kInfinity);
        std::fill_n(parents, count, -1);
        std::fill_n(tokens, count, -1);
    }
    float worst() const { return scores[kept - 1]; }
    // Continuations come in the order of their indices, so that equal ones stay behind those before.
    void offer(float score, Index parent, Index token) {
        Index at = kept - 1;
        for (; at > 0 && score > scores[at - 1]; --at) {
            scores[at] = scores[at - 1];
            parents[at] = parents[at - 1];
            tokens[at] = tokens[at - 1];
        }
        scores[at] = score;
        parents[at] = parent;
        tokens[at] = token;
    }
};

// NaN is not looked at; rounding keeps an order, so no sum of a block is above that of its maximum.
inline float block_maximum(const float* x) {
    Lanes best = splat(-kInfinity);
    for (Index v = 0; v < kVectors; ++v) best = larger(load(x + v * kLanes), best);
    float found = best[0];
    for (Index l = 1; l < kLanes; ++l) found = best[l] > found ? best[l] : found;
    return found;
}

inline void offer_row(BeamList& list, float score, const float* x, Index columns, Index beam) {
    for (Index first = 0; first < columns; first += kRowSumBlock) {
        const Index end = std::min(first + kRowSumBlock, columns);
        if (end == first + kRowSumBlock && !(score + block_maximum(x + first) > list.worst())) continue;
        for (Index i = first; i < end; ++i)
            if (score + x[i] > list.worst()) list.offer(score + x[i], beam, i);
    }
}

void beam_step(const KernelCall& call, const BeamTiling& t) {
    const float *scores = static_cast<const float*>(call.operands[0]), *logprobs = static_cast<const float*>(call.operands[1]);
    float* kept_scores = static_cast<float*>(call.operands[2]);
    int64_t *parents = static_cast<int64_t*>(call.operands[3]), *tokens = static_cast<int64_t*>(call.operands[4]);
    parallel_ranges(t.requests, call.threads, kWorkOfContinuation * t.requests * t.beams * t.columns, [=](Index first, Index last) {
        for (Index request = first; request < last; ++request) {
            BeamList list(t.kept);
            for (Index beam = 0; beam < t.beams; ++beam) {
                const Index row = request * t.beams + beam;
                offer_row(list, scores[row], logprobs + row * t.columns, t.columns, beam);
            }
            std::copy_n(list.scores, t.kept, kept_scores + request * t.kept);
            std::copy_n(list.parents, t.kept, parents + request * t.kept);
            std::copy_n(list.tokens, t.kept, tokens + request * t.kept);
        }
    });
}

}  // namespace
}  // namespace megatron_ext

MEGATRON_EXT_NATIVE(sample_f32, megatron_ext::SamplingTiling, megatron_ext::sample)
MEGATRON_EXT_NATIVE(support_mask_f32, megatron_ext::SamplingTiling, megatron_ext::support_mask)
MEGATRON_EXT_NATIVE(beam_step_f32, megatron_ext::BeamTiling, megatron_ext::beam_step)
