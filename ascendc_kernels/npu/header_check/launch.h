// Instantiates a kernel and everything it calls.
#pragma once
#include <utility>

template <auto kernel, typename Tiling, size_t... operand>
void instantiate(uint8_t** operands, const Tiling& tiling, std::index_sequence<operand...>) {
    kernel(operands[operand]..., tiling);
}

#define MEGATRON_EXT_LAUNCH(name, operands, Tiling, ...)                               \
    void name##_instantiated(uint8_t** addresses, const Tiling& tiling) {              \
        instantiate<__VA_ARGS__>(addresses, tiling, std::make_index_sequence<operands>()); \
    }
