// Questions to a device, as one call each. Shared by the binding and the kernels.
#pragma once
#include <cstdint>

namespace megatron_ext {

// c[m][n] = a[m][k] x b[n][k], by Mmad calls of call_k terms each. Matrices in memory have stored_k columns, and a has whole fractals of rows.
struct ProbeMmadTiling {
    int64_t m;         // of Mmad: 1 or a multiple of 16
    int64_t n;         // a multiple of 16
    int64_t k;         // columns that take part
    int64_t stored_k;  // a multiple of 16 from k on
    int64_t call_k;    // a multiple of 16
};

// out = operation(x, y) of `count` elements of `size` in memory; `results` elements of it are stored.
struct ProbeVectorTiling {
    int64_t operation;  // ProbeOperation
    int64_t size;       // a multiple of 64
    int64_t count;      // repeat_sum: lanes of every repeat
    int64_t results;
};

// Rows of kProbeRow elements that pass through local memory one by one.
struct ProbeFlagsTiling {
    int64_t rows;
};

// Rounds around all cores; one row of kProbeRow elements each.
struct ProbeSyncTiling {
    int64_t rounds;
};

enum ProbeOperation : int64_t {
    kProbeExp,
    kProbeLn,
    kProbeSqrt,
    kProbeAdd,
    kProbeMul,
    kProbeDiv,
    kProbeMax,
    kProbeKeep,       // x + -0: the copy that keeps the sign of zero
    kProbeRoundBf16,  // to bfloat16 and back
    kProbeRoundF16,
    kProbeSum,        // ReduceSum by count
    kProbeRepeatSum,  // ReduceRepeat: a sum of each repeat of 64
    kProbeOperations
};
constexpr const char* kProbeOperationNames[kProbeOperations] = {"exp", "ln",   "sqrt",       "add",       "mul", "div",
                                                                "max", "keep", "round_bf16", "round_f16", "sum", "repeat_sum"};

constexpr int64_t kProbeMaxTile = 128;  // m and n: C fills half of L0C
constexpr int64_t kProbeMaxK = 256;     // one call of a full tile fills L0A and L0B
constexpr int64_t kProbeRepeat = 64;    // fp32 lanes of a repeat
constexpr int64_t kProbeMaxSize = 4096;
constexpr int64_t kProbeRow = 8192;  // elements: 32 KB, long enough under way for a consumer that does not wait to be ahead of it

}  // namespace megatron_ext
