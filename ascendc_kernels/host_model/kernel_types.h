// Words of the language: qualifiers, half and bfloat16_t, the enumerations.
#pragma once
#include <cstdint>
#include <type_traits>

#include "elementary.h"

#define __aicore__
#define __global__
#define __gm__
#define GM_ADDR uint8_t*

// 16-bit floats are storage: arithmetic on them happens in vector functions only.
struct half {
    uint16_t bits;
    half() = default;
    explicit half(float value) : bits(megatron_ext::from_float<megatron_ext::Float16>(value).bits) {}
    explicit operator float() const { return megatron_ext::to_float(megatron_ext::Float16{bits}); }
};

struct bfloat16_t {
    uint16_t bits;
    bfloat16_t() = default;
    explicit bfloat16_t(float value) : bits(megatron_ext::from_float<megatron_ext::BFloat16>(value).bits) {}
    explicit operator float() const { return megatron_ext::to_float(megatron_ext::BFloat16{bits}); }
};

enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_FIX, PIPE_ALL };

enum QuantMode_t { NoQuant, F322F16, F322BF16 };

enum KernelType { KERNEL_TYPE_AIV_ONLY, KERNEL_TYPE_AIC_ONLY, KERNEL_TYPE_MIX_AIV_1_0, KERNEL_TYPE_MIX_AIC_1_2 };

namespace AscendC {

using TEventID = int8_t;

enum class TPosition : uint8_t { GM, A1, A2, B1, B2, CO1, VECIN, VECOUT, VECCALC };
using QuePosition = TPosition;

enum class HardEvent : uint8_t {
    MTE2_MTE1, MTE1_MTE2, MTE1_M, M_MTE1, MTE2_V, V_MTE2, MTE3_V, V_MTE3, M_V, V_M, V_V, MTE3_MTE1, MTE1_MTE3, MTE1_V, MTE2_M, M_MTE2,
    V_MTE1, M_FIX, FIX_M, MTE3_MTE2, MTE2_MTE3, S_V, V_S, S_MTE2, MTE2_S, S_MTE3, MTE3_S, MTE2_FIX, FIX_MTE2, FIX_S, M_S, FIX_MTE3,
    MTE1_FIX, FIX_MTE1, FIX_FIX, MAX
};

enum class RoundMode : uint8_t { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC };
enum class CMPMODE : uint8_t { LT, GT, EQ, LE, GE, NE };
enum class SELMODE : uint8_t { VSEL_CMPMASK_SPR, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };
enum class ReduceOrder : uint8_t { ORDER_VALUE_INDEX, ORDER_INDEX_VALUE, ORDER_ONLY_VALUE, ORDER_ONLY_INDEX };
enum class MaskMode : uint8_t { NORMAL, COUNTER };
enum class CO2Layout : uint8_t { NZ, ROW_MAJOR, COLUMN_MAJOR };

}  // namespace AscendC

namespace ascendc_host {

constexpr int kPipes = PIPE_ALL;
constexpr const char* kPipeName[kPipes + 1] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX", "ALL"};

template <typename T, typename... Allowed>
constexpr bool is_one_of = (std::is_same_v<T, Allowed> || ...);

struct EventPipes {
    pipe_t from, to;
};

constexpr EventPipes kEventPipes[] = {
    {PIPE_MTE2, PIPE_MTE1}, {PIPE_MTE1, PIPE_MTE2}, {PIPE_MTE1, PIPE_M},    {PIPE_M, PIPE_MTE1},    {PIPE_MTE2, PIPE_V},
    {PIPE_V, PIPE_MTE2},    {PIPE_MTE3, PIPE_V},    {PIPE_V, PIPE_MTE3},    {PIPE_M, PIPE_V},       {PIPE_V, PIPE_M},
    {PIPE_V, PIPE_V},       {PIPE_MTE3, PIPE_MTE1}, {PIPE_MTE1, PIPE_MTE3}, {PIPE_MTE1, PIPE_V},    {PIPE_MTE2, PIPE_M},
    {PIPE_M, PIPE_MTE2},    {PIPE_V, PIPE_MTE1},    {PIPE_M, PIPE_FIX},     {PIPE_FIX, PIPE_M},     {PIPE_MTE3, PIPE_MTE2},
    {PIPE_MTE2, PIPE_MTE3}, {PIPE_S, PIPE_V},       {PIPE_V, PIPE_S},       {PIPE_S, PIPE_MTE2},    {PIPE_MTE2, PIPE_S},
    {PIPE_S, PIPE_MTE3},    {PIPE_MTE3, PIPE_S},    {PIPE_MTE2, PIPE_FIX},  {PIPE_FIX, PIPE_MTE2},  {PIPE_FIX, PIPE_S},
    {PIPE_M, PIPE_S},       {PIPE_FIX, PIPE_MTE3},  {PIPE_MTE1, PIPE_FIX},  {PIPE_FIX, PIPE_MTE1},  {PIPE_FIX, PIPE_FIX},
};
constexpr int kEvents = int(AscendC::HardEvent::MAX);
static_assert(sizeof(kEventPipes) / sizeof(EventPipes) == kEvents, "one pair of pipes per HardEvent");

}  // namespace ascendc_host
