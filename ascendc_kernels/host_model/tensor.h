// GlobalTensor and LocalTensor. Methods named host_* belong to the model.
#pragma once
#include "core.h"

namespace AscendC {

template <typename T>
class GlobalTensor {
 public:
    using PrimType = T;
    void SetGlobalBuffer(T* buffer, uint64_t bufferSize) {
        data_ = first_ = buffer;
        end_ = buffer + bufferSize;
    }
    void SetGlobalBuffer(T* buffer) {
        data_ = first_ = buffer;
        end_ = nullptr;
    }
    GlobalTensor operator[](uint64_t offset) const {
        GlobalTensor part = *this;
        part.data_ += offset;
        return part;
    }
    T GetValue(uint64_t offset, ascendc_host::Site site = ascendc_host::Site::here()) const;
    void SetValue(uint64_t offset, T value, ascendc_host::Site site = ascendc_host::Site::here());
    const T* GetPhyAddr() const { return data_; }

    T* host_data() const { return data_; }
    const uint8_t* host_first() const { return reinterpret_cast<const uint8_t*>(first_); }
    const uint8_t* host_end() const { return reinterpret_cast<const uint8_t*>(end_); }

 private:
    T *data_ = nullptr, *first_ = nullptr, *end_ = nullptr;
};

template <typename T>
class LocalTensor {
 public:
    using PrimType = T;
    LocalTensor() {}
    LocalTensor operator[](uint32_t offset) const {
        LocalTensor part = *this;
        part.data_ += offset;
        part.size_ = offset < size_ ? size_ - offset : 0;
        return part;
    }
    T GetValue(uint32_t index, ascendc_host::Site site = ascendc_host::Site::here()) const;
    template <typename S>
    void SetValue(uint32_t index, S value, ascendc_host::Site site = ascendc_host::Site::here()) const;
    template <typename U>
    LocalTensor<U> ReinterpretCast() const {
        return LocalTensor<U>::host_make(buffer_, reinterpret_cast<U*>(data_), uint32_t(uint64_t(size_) * sizeof(T) / sizeof(U)));
    }
    uint32_t GetSize() const { return size_; }

    static LocalTensor host_make(ascendc_host::Buffer* buffer, T* data, uint32_t size) {
        LocalTensor tensor;
        tensor.data_ = data;
        tensor.buffer_ = buffer;
        tensor.size_ = size;
        return tensor;
    }
    T* host_data() const { return data_; }
    ascendc_host::Buffer* host_buffer() const { return buffer_; }

 private:
    T* data_ = nullptr;
    ascendc_host::Buffer* buffer_ = nullptr;
    uint32_t size_ = 0;
};

}  // namespace AscendC
