// Shapes of one call, shared by the binding, the kernels and their native twins. Legend: E experts, R rows of all of them, sorted by expert.
#pragma once
#include "../linear/linear_tiling.h"

namespace megatron_ext {

// Row r of the output is the contraction of row r of a with its expert's matrix b, as in LinearTiling with m = R; matrices are `b_size` elements apart.
struct GroupedLinearTiling {
    LinearTiling linear;
    int64_t experts, b_size;
};

// The gradient of every expert continues through its own rows, as in LinearWgradTiling. linear.sequences counts all experts': each begins one.
struct GroupedLinearWgradTiling {
    LinearWgradTiling linear;
    int64_t experts, rows;
};

}  // namespace megatron_ext
