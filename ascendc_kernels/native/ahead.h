// Memory asked for before it is used.
#pragma once
#include "segments.h"

namespace megatron_ext {

// Asks line by line, in the order of memory, for a matrix whose columns are contiguous: processors alone follow such streams too late, and several side
// by side not at all. Beyond the matrix the request is dropped.
template <typename T>
class Ahead {
 public:
    static constexpr Index kLineValues = 64 / sizeof(T);

    // Begins at column `first` of b and runs ahead of `together` columns of `length` values that are used side by side.
    Ahead(const Matrix<T>& b, Index first, Index length, Index together)
        : line_(b.at(0, first)), per_column_((length + kLineValues - 1) / kLineValues), left_(per_column_), gap_(b.n_stride - per_column_ * kLineValues) {
        constexpr Index kInFlight = 16384 / 64;  // so many lines keep the memory busy
        lines(kInFlight + (together - 1) * per_column_);
    }
    void lines(Index count) {
        for (; count > 0; --count) {
            __builtin_prefetch(line_, 0, 2);
            line_ += kLineValues;
            if (--left_ == 0) line_ += gap_, left_ = per_column_;
        }
    }

 private:
    const T* line_;
    Index per_column_, left_, gap_;
};

}  // namespace megatron_ext
