// Strided operands that a kernel reads in place.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

namespace megatron_ext {

// One dimension as a kernel walks it: `size` steps of `stride` elements.
struct Walk {
    int64_t size = 1, stride = 0;
};

// Dimensions [first, last) of x as at most `Count` walks, the outermost first: neighbours that are equally spaced become one. Returns false if
// that takes more walks, or if rows (the last dimension) are not dense or lie closer than they are long: then x must be copied.
template <size_t Count>
inline bool walk_rows(const at::Tensor& x, int64_t first, int64_t last, std::array<Walk, Count>& walks) {
    size_t at = Count;  // walks[at] is the one that grows outwards
    if (x.stride(-1) != 1 && x.size(-1) != 1) return false;
    for (int64_t d = last - 1; d >= first; --d) {
        if (x.size(d) == 1) continue;
        if (x.stride(d) < x.size(-1)) return false;
        if (at < Count && x.stride(d) == walks[at].size * walks[at].stride) {
            walks[at].size *= x.size(d);
            continue;
        }
        if (at == 0) return false;
        walks[--at] = {x.size(d), x.stride(d)};
    }
    return true;
}

}  // namespace megatron_ext
