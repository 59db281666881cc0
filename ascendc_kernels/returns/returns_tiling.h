// Shapes of one call, shared by the binding, the kernels and their native twins. Legend: N sequences, L tokens of a sequence.
#pragma once
#include <cstdint>

namespace megatron_ext {

// Operands of a scan are time-major, [L][N]: lanes are sequences.
struct ScanTiling {
    int64_t sequences, steps;
    float gamma, decay;  // decay: gamma * lam, rounded
};

struct MaskedSumTiling {
    int64_t sequences, tokens;
    bool squared;  // sum of (x - centre)^2 instead of x
};

struct TotalTiling {
    int64_t count;
};

struct WhitenTiling {
    int64_t size;
    float eps;
};

constexpr int64_t kScanLanes = 64;    // sequences of a block, one repeat
constexpr int64_t kScanSteps = 64;    // in UB at a time: ten tiles of 64 x 64, 160 of 192 KB
constexpr int64_t kReturnsTile = 4096;  // elements in UB at a time, a multiple of 64
constexpr int64_t kTotalTile = 1024;  // sums in UB at a time, a DataBlock each

}  // namespace megatron_ext
