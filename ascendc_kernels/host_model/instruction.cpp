#include "instruction.h"

#include "monitor.h"

namespace ascendc_host {

void begin_instruction(pipe_t pipe, const char* function, Site site, bool own_pipe_ordered) {
    Core& me = core();
    const bool vector_pipe = pipe == PIPE_V || pipe == PIPE_MTE3;
    const bool cube_pipe = pipe == PIPE_M || pipe == PIPE_MTE1 || pipe == PIPE_FIX;
    if (vector_pipe && me.kind == CoreKind::kCube) fail(function, site, "a cube core has no pipe %s: guard it with ASCEND_IS_AIV", kPipeName[pipe]);
    if (cube_pipe && me.kind == CoreKind::kVector) fail(function, site, "a vector core has no pipe %s: guard it with ASCEND_IS_AIC", kPipeName[pipe]);
    me.monitor->begin(me, pipe, function, site, own_pipe_ordered);
}

void check_memory(const char* function, Site site, const char* role, const Buffer* buffer, uint32_t allowed_memories) {
    if (buffer == nullptr) fail(function, site, "%s was never allocated", role);
    if (!(allowed_memories & in(buffer->memory))) fail(function, site, "%s may not lie in %s", role, describe(*buffer).c_str());
}

void check_alignment(const char* function, Site site, const char* role, const void* address, uint32_t bytes) {
    if (uintptr_t(address) % bytes)
        fail(function, site, "%s starts %d bytes past a multiple of %u bytes", role, int(uintptr_t(address) % bytes), bytes);
}

void check_local(const char* function, Site site, const char* role, const Buffer* buffer, const uint8_t* address, uint64_t bytes, bool writes) {
    if (bytes == 0) return;
    if (buffer == nullptr) fail(function, site, "%s was never allocated", role);
    Core& me = core();
    const int64_t begin = address - buffer->start, end = begin + int64_t(bytes);
    if (begin < 0 || end > int64_t(buffer->bytes))
        fail(function, site, "%s covers bytes [%lld, %lld), outside %s", role, (long long)begin, (long long)end, describe(*buffer).c_str());
    if (buffer->state == BufferState::kFree)
        fail(function, site, "%s is used after FreeTensor or before AllocTensor: %s", role, describe(*buffer).c_str());
    if (buffer->state == BufferState::kQueued)
        fail(function, site, "%s is used between EnQue and DeQue: %s", role, describe(*buffer).c_str());
    if (writes)
        me.monitor->write_local(me, *buffer, address, bytes, role);
    else
        me.monitor->read_local(me, *buffer, address, bytes, role);
}

void check_global(const char* function, Site site, const char* role, const uint8_t* address, uint64_t bytes, const uint8_t* first,
                  const uint8_t* end, bool writes) {
    if (bytes == 0) return;
    if (first == nullptr) fail(function, site, "%s: SetGlobalBuffer was not called", role);
    if (end != nullptr && (address < first || address + bytes > end))
        fail(function, site, "%s covers bytes [%lld, %lld) of a global buffer of %lld bytes", role, (long long)(address - first),
             (long long)(address - first + int64_t(bytes)), (long long)(end - first));
    Core& me = core();
    if (writes)
        me.monitor->write_global(me, address, bytes, role, first);
    else
        me.monitor->read_global(me, address, bytes, role, first);
}

}  // namespace ascendc_host
