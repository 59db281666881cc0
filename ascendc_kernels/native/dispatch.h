// From a dtype code of megatron_ext/ops/native.py to a C++ type. Every entry point returns 0, or 1 for an unknown dtype.
#pragma once
#include "elementary.h"

namespace megatron_ext {

template <typename Body>
inline int32_t dispatch(int32_t dtype, Body body) {
    switch (dtype) {
        case 0: body(float{}); return 0;
        case 1: body(BFloat16{}); return 0;
        case 2: body(Float16{}); return 0;
        default: return 1;
    }
}

}  // namespace megatron_ext
