// Launch of a kernel on a device. ../host_model/launch.h defines the same macro for CPUs; the include path decides. Has not run on a device.
#pragma once
#include "kernel_call.h"

#define MEGATRON_EXT_OPERAND(i) static_cast<GM_ADDR>(call->operands[i])
#define MEGATRON_EXT_OPERANDS_1 MEGATRON_EXT_OPERAND(0)
#define MEGATRON_EXT_OPERANDS_2 MEGATRON_EXT_OPERANDS_1, MEGATRON_EXT_OPERAND(1)
#define MEGATRON_EXT_OPERANDS_3 MEGATRON_EXT_OPERANDS_2, MEGATRON_EXT_OPERAND(2)
#define MEGATRON_EXT_OPERANDS_4 MEGATRON_EXT_OPERANDS_3, MEGATRON_EXT_OPERAND(3)
#define MEGATRON_EXT_OPERANDS_5 MEGATRON_EXT_OPERANDS_4, MEGATRON_EXT_OPERAND(4)
#define MEGATRON_EXT_OPERANDS_6 MEGATRON_EXT_OPERANDS_5, MEGATRON_EXT_OPERAND(5)
#define MEGATRON_EXT_OPERANDS_7 MEGATRON_EXT_OPERANDS_6, MEGATRON_EXT_OPERAND(6)
#define MEGATRON_EXT_OPERANDS_8 MEGATRON_EXT_OPERANDS_7, MEGATRON_EXT_OPERAND(7)
#define MEGATRON_EXT_OPERANDS_9 MEGATRON_EXT_OPERANDS_8, MEGATRON_EXT_OPERAND(8)
#define MEGATRON_EXT_OPERANDS_10 MEGATRON_EXT_OPERANDS_9, MEGATRON_EXT_OPERAND(9)
#define MEGATRON_EXT_OPERANDS_11 MEGATRON_EXT_OPERANDS_10, MEGATRON_EXT_OPERAND(10)
#define MEGATRON_EXT_OPERANDS_12 MEGATRON_EXT_OPERANDS_11, MEGATRON_EXT_OPERAND(11)
#define MEGATRON_EXT_OPERANDS_13 MEGATRON_EXT_OPERANDS_12, MEGATRON_EXT_OPERAND(12)

// Exports megatron_ext_<name>, which launches a kernel of that many GM_ADDR parameters and a tiling struct, passed by value.
#define MEGATRON_EXT_LAUNCH(name, operands, Tiling, ...)                                                                                     \
    extern "C" __attribute__((visibility("default"))) const char* megatron_ext_##name(const megatron_ext::KernelCall* call) {                \
        __VA_ARGS__<<<uint32_t(call->blocks), nullptr, call->stream>>>(MEGATRON_EXT_OPERANDS_##operands,                                     \
                                                                       *static_cast<const Tiling*>(call->tiling));                           \
        return nullptr;                                                                                                                      \
    }
