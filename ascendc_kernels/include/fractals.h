// Sizes and limits of the cube core, for kernels and for the bindings that compute their tilings.
#pragma once
#include <cstdint>

namespace megatron_ext {

constexpr uint32_t kSide = MEGATRON_EXT_FRACTAL;  // of a fractal
constexpr uint32_t kFractalSize = kSide * kSide;  // elements
constexpr uint32_t kMmadOrderedFrom = 10;         // fractals of C: from here on the hardware orders one Mmad after another
constexpr int64_t kNd2NzMaxStride = 65535;        // elements

}  // namespace megatron_ext
