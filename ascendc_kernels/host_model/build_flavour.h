// The two flavours of one set of sources, and the sizes of the modelled core (910B, 910_93: __NPU_ARCH__ 2201).
#pragma once
#include <cstdint>

namespace ascendc_host {

// checked: every access is bounds-checked, fresh buffers hold NaN, missing synchronisation is reported. fast: limits at InitBuffer only.
#if defined(ASCENDC_HOST_CHECKED)
constexpr bool kChecked = true;
#else
constexpr bool kChecked = false;
#endif

enum class Memory : uint8_t { kUb, kL1, kL0a, kL0b, kL0c };
constexpr int kMemories = 5;
constexpr uint32_t kMemoryBytes[kMemories] = {192 * 1024, 512 * 1024, 64 * 1024, 64 * 1024, 128 * 1024};
constexpr const char* kMemoryName[kMemories] = {"UB", "L1", "L0A", "L0B", "L0C"};

constexpr uint32_t kBlockBytes = 32;     // a DataBlock: unit of strides and of alignment
constexpr uint32_t kRepeatBytes = 256;   // what one vector repeat processes
constexpr uint32_t kFractalBytes = 512;  // 16 rows of one DataBlock
constexpr int64_t kMaxRepeat = 255;
constexpr int kMaxBuffers = 64;  // buffers of one TPipe
constexpr int kEventIds = 8;     // per HardEvent
constexpr int kCrossCoreFlags = 16;
constexpr int kCrossCoreFlagMax = 15;  // a counter of four bits

}  // namespace ascendc_host
