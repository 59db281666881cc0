// The vector mask that instructions with isSetMask = false use.
#pragma once
#include "core.h"

namespace AscendC {

inline void SetMaskCount() { ascendc_host::core().mask.counter = true; }
inline void SetMaskNorm() { ascendc_host::core().mask.counter = false; }

template <typename T, MaskMode mode = MaskMode::NORMAL>
inline void SetVectorMask(uint64_t maskHigh, uint64_t maskLow) {
    ascendc_host::core().mask.low = maskLow;
    ascendc_host::core().mask.high = maskHigh;
}

// In counter mode, len elements in all; otherwise the first len of each repeat.
template <typename T, MaskMode mode = MaskMode::NORMAL>
inline void SetVectorMask(int32_t len) {
    ascendc_host::VectorMask& mask = ascendc_host::core().mask;
    mask.low = mode == MaskMode::COUNTER ? uint64_t(len) : len >= 64 ? ~uint64_t(0) : (uint64_t(1) << len) - 1;
    mask.high = mode == MaskMode::COUNTER || len <= 64 ? 0 : len >= 128 ? ~uint64_t(0) : (uint64_t(1) << (len - 64)) - 1;
}

inline void ResetMask() {
    ascendc_host::core().mask.low = ~uint64_t(0);
    ascendc_host::core().mask.high = ~uint64_t(0);
}

}  // namespace AscendC
