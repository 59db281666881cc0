// What the checked flavour asks of every instruction: the right core, operands inside their buffers, alignment, order.
//
// The functions are empty in the fast flavour: `if constexpr (kChecked)` stands inside them, not at every use.
#pragma once
#include "core.h"
#include "tensor.h"

namespace ascendc_host {

// Implemented beside the monitor, so that kernels include no container.
void begin_instruction(pipe_t pipe, const char* function, Site site, bool own_pipe_ordered);
void check_local(const char* function, Site site, const char* role, const Buffer* buffer, const uint8_t* address, uint64_t bytes, bool writes);
void check_global(const char* function, Site site, const char* role, const uint8_t* address, uint64_t bytes, const uint8_t* first,
                  const uint8_t* end, bool writes);
void check_memory(const char* function, Site site, const char* role, const Buffer* buffer, uint32_t allowed_memories);
void check_alignment(const char* function, Site site, const char* role, const void* address, uint32_t bytes);

constexpr uint32_t in(Memory memory) { return 1u << int(memory); }

class Instruction {
 public:
    Instruction(const char* function, pipe_t pipe, Site site, bool own_pipe_ordered = false) : function_(function), site_(site) {
        if constexpr (kChecked) begin_instruction(pipe, function, site, own_pipe_ordered);
    }

    // Demands on an operand as a whole.
    template <typename T>
    void operand(const char* role, const AscendC::LocalTensor<T>& tensor, uint32_t allowed_memories, uint32_t alignment) const {
        if constexpr (kChecked) {
            check_memory(function_, site_, role, tensor.host_buffer(), allowed_memories);
            check_alignment(function_, site_, role, tensor.host_data(), alignment);
        }
    }

    // Bytes that are read or written, counted from the start of the tensor. All reads of an instruction come before its writes.
    template <typename T>
    void read(const char* role, const AscendC::LocalTensor<T>& tensor, uint64_t offset, uint64_t bytes) const {
        touch(role, tensor, offset, bytes, false);
    }
    template <typename T>
    void write(const char* role, const AscendC::LocalTensor<T>& tensor, uint64_t offset, uint64_t bytes) const {
        touch(role, tensor, offset, bytes, true);
    }
    template <typename T>
    void read(const char* role, const AscendC::GlobalTensor<T>& tensor, uint64_t offset, uint64_t bytes) const {
        touch(role, tensor, offset, bytes, false);
    }
    template <typename T>
    void write(const char* role, const AscendC::GlobalTensor<T>& tensor, uint64_t offset, uint64_t bytes) const {
        touch(role, tensor, offset, bytes, true);
    }

    // A limit of a parameter.
    void require(bool holds, const char* condition, int64_t value) const {
        if constexpr (kChecked)
            if (!holds) fail(function_, site_, "%s is required, found %lld", condition, (long long)value);
    }

 private:
    const char* function_;
    Site site_;

    template <typename T>
    void touch(const char* role, const AscendC::LocalTensor<T>& tensor, uint64_t offset, uint64_t bytes, bool writes) const {
        if constexpr (kChecked) {
            const uint8_t* address = reinterpret_cast<const uint8_t*>(tensor.host_data()) + offset;
            check_local(function_, site_, role, tensor.host_buffer(), address, bytes, writes);
        }
    }
    template <typename T>
    void touch(const char* role, const AscendC::GlobalTensor<T>& tensor, uint64_t offset, uint64_t bytes, bool writes) const {
        if constexpr (kChecked) {
            const uint8_t* address = reinterpret_cast<const uint8_t*>(tensor.host_data()) + offset;
            check_global(function_, site_, role, address, bytes, tensor.host_first(), tensor.host_end(), writes);
        }
    }
};

}  // namespace ascendc_host

#include "tensor_access.h"
