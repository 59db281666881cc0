// Entry of a native twin: the same operands and the same tiling as its kernel.
#pragma once
#include "kernel_call.h"

// Exports megatron_ext_<name>_native, which calls a function (const KernelCall&, const Tiling&).
#define MEGATRON_EXT_NATIVE(name, Tiling, ...)                                                                                               \
    extern "C" __attribute__((visibility("default"))) const char* megatron_ext_##name##_native(const megatron_ext::KernelCall* call) {       \
        __VA_ARGS__(*call, *static_cast<const Tiling*>(call->tiling));                                                                       \
        return nullptr;                                                                                                                      \
    }
