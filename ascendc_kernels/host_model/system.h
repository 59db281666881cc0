// Who am I, and how does the kernel get its tiling.
#pragma once
#include <cstring>

#include "core.h"

// On a device these fix the kernel type and the tiling struct at compile time. Here the first tells the scheduler which cores take part.
#define KERNEL_TASK_TYPE_DEFAULT(type) ::ascendc_host::declare_kernel_type(type, ::ascendc_host::Site::here(__FILE__, __LINE__))
#define REGISTER_TILING_DEFAULT(tiling_struct) static_assert(std::is_trivially_copyable_v<tiling_struct>, "tiling is a plain struct")
#define GET_TILING_DATA_WITH_STRUCT(tiling_struct, tiling_data, tiling_arg) \
    tiling_struct tiling_data;                                              \
    std::memcpy(&tiling_data, tiling_arg, sizeof(tiling_struct))

#define ASCEND_IS_AIC (::ascendc_host::core().kind == ::ascendc_host::CoreKind::kCube)
#define ASCEND_IS_AIV (::ascendc_host::core().kind == ::ascendc_host::CoreKind::kVector)

namespace AscendC {

inline int64_t GetBlockNum() { return ascendc_host::block_count(); }
inline int64_t GetTaskRatio() { return ascendc_host::task_ratio(); }
inline int64_t GetSubBlockIdx() { return ascendc_host::core().sub_block; }
inline int64_t GetBlockIdx() { return ascendc_host::core().block * ascendc_host::task_ratio() + ascendc_host::core().sub_block; }

}  // namespace AscendC
