// What the library of device kernels (../CMakeLists.txt) tells the torch binding. Plain data: neither links against the other.
#pragma once
#include "kernel_call.h"

namespace megatron_ext {

struct DeviceKernels {
    KernelFunction (*find)(const char* symbol);  // nullptr if there is none
    void* (*current_stream)(int device_index);
    int64_t vector_cores, cube_cores;
};

}  // namespace megatron_ext
