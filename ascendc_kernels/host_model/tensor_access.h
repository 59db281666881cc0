// Single elements, read and written by the scalar pipe.
#pragma once
#include "instruction.h"

namespace AscendC {

template <typename T>
inline T GlobalTensor<T>::GetValue(uint64_t offset, ascendc_host::Site site) const {
    const ascendc_host::Instruction instruction("GlobalTensor::GetValue", PIPE_S, site);
    instruction.read("the tensor", *this, offset * sizeof(T), sizeof(T));
    return data_[offset];
}

template <typename T>
inline void GlobalTensor<T>::SetValue(uint64_t offset, T value, ascendc_host::Site site) {
    const ascendc_host::Instruction instruction("GlobalTensor::SetValue", PIPE_S, site);
    instruction.write("the tensor", *this, offset * sizeof(T), sizeof(T));
    data_[offset] = value;
}

template <typename T>
inline T LocalTensor<T>::GetValue(uint32_t index, ascendc_host::Site site) const {
    const ascendc_host::Instruction instruction("LocalTensor::GetValue", PIPE_S, site);
    instruction.operand("the tensor", *this, ascendc_host::in(ascendc_host::Memory::kUb), sizeof(T));
    instruction.read("the tensor", *this, uint64_t(index) * sizeof(T), sizeof(T));
    return data_[index];
}

template <typename T>
template <typename S>
inline void LocalTensor<T>::SetValue(uint32_t index, S value, ascendc_host::Site site) const {
    const ascendc_host::Instruction instruction("LocalTensor::SetValue", PIPE_S, site);
    instruction.operand("the tensor", *this, ascendc_host::in(ascendc_host::Memory::kUb), sizeof(T));
    instruction.write("the tensor", *this, uint64_t(index) * sizeof(T), sizeof(T));
    data_[index] = T(value);
}

}  // namespace AscendC
