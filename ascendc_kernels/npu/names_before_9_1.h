// ReduceRepeat on CANN 9.0.0 and earlier, where it had other names. CMakeLists.txt includes this file there. Has not run on a device.
#pragma once
#include "kernel_operator.h"

namespace AscendC {

enum class ReduceType { NONE = -1, SUM = 0, MAX, MIN };

template <ReduceType reduceType, typename T, typename U, bool isSetMask = true>
__aicore__ inline void ReduceRepeat(const LocalTensor<T>& dst, const LocalTensor<U>& src, const int32_t mask, const int32_t repeatTime,
                                    const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,
                                    ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX) {
    static_assert(reduceType == ReduceType::SUM || reduceType == ReduceType::MAX, "ReduceRepeat: SUM or MAX");
    if constexpr (reduceType == ReduceType::SUM)
        WholeReduceSum<T, isSetMask>(dst, src, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride);
    else
        WholeReduceMax<T, isSetMask>(dst, src, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride, order);
}

}  // namespace AscendC
