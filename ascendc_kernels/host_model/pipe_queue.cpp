#include "pipe_queue.h"

#include <cstring>

#include "monitor.h"

namespace ascendc_host {
namespace {

constexpr int kPoison = 0xFF;  // a NaN in half, bfloat16 and float

void poison(const Buffer& buffer) {
    if (core().monitor) std::memset(buffer.start, kPoison, buffer.bytes);
}

void require_state(const char* function, const Buffer& buffer, bool holds, Site site) {
    if (!holds) fail(function, site, "not allowed on a buffer that is %s: %s", kBufferStateName[int(buffer.state)], describe(buffer).c_str());
}

void take_step(Buffer& buffer, BufferState state, Site site) {
    buffer.state = state;
    buffer.last_step = site;
}

void set_event(Buffer& buffer, AscendC::HardEvent event, const char* function, Site site) {
    Core& me = core();
    if (!me.monitor) return;
    buffer.event_id = me.monitor->free_event_id(me, int(event), function, site);
    me.monitor->set_flag(me, int(event), buffer.event_id, site, true);
}

void wait_event(Buffer& buffer, AscendC::HardEvent event, Site site) {
    Core& me = core();
    if (me.monitor && buffer.event_id >= 0) me.monitor->wait_flag(me, int(event), buffer.event_id, site);
    buffer.event_id = -1;
}

}  // namespace

void start_pipe(Site site) {
    Core& me = core();
    for (int i = 0; i < me.buffer_count; ++i)
        if (me.buffers[i].state != BufferState::kOpen && me.buffers[i].state != BufferState::kFree)
            fail("TPipe", site, "%s of an earlier TPipe is still %s", describe(me.buffers[i]).c_str(),
                 kBufferStateName[int(me.buffers[i].state)]);
    me.buffer_count = 0;
    for (uint32_t& used : me.used) used = 0;
}

Buffer* init_buffers(AscendC::TPosition position, Memory memory, BufferState state, int count, uint32_t bytes, Site site) {
    Core& me = core();
    const char* name = kMemoryName[int(memory)];
    const uint32_t limit = kMemoryBytes[int(memory)], rounded = (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    if (count < 1 || bytes < 1) fail("InitBuffer", site, "num >= 1 and len >= 1 are required, found num=%d, len=%u", count, bytes);
    if (uint64_t(rounded) * count + me.used[int(memory)] > limit)
        fail("InitBuffer", site, "%d x %u bytes do not fit: %u of the %u bytes of %s are taken", count, rounded, me.used[int(memory)], limit, name);
    if (me.buffer_count + count > kMaxBuffers)
        fail("InitBuffer", site, "%d buffers exceed the %d of a TPipe", me.buffer_count + count, kMaxBuffers);
    Buffer* first = &me.buffers[me.buffer_count];
    for (int i = 0; i < count; ++i) {
        Buffer& buffer = me.buffers[me.buffer_count++];
        buffer = Buffer{me.memory[int(memory)] + me.used[int(memory)], rounded, memory, position, state, i, -1, site, site};
        me.used[int(memory)] += rounded;
        poison(buffer);
    }
    return first;
}

int fetch_event_id(AscendC::HardEvent event, Site site) {
    Core& me = core();
    return me.monitor ? me.monitor->free_event_id(me, int(event), "FetchEventID", site) : 0;
}

void step_alloc(Buffer& buffer, QueueEvents events, Site site) {
    wait_event(buffer, events.emptied, site);
    take_step(buffer, BufferState::kAllocated, site);
    poison(buffer);
}

void step_enque(Buffer& buffer, QueueEvents events, Site site) {
    require_state("EnQue", buffer, buffer.state == BufferState::kAllocated, site);
    set_event(buffer, events.filled, "EnQue", site);
    take_step(buffer, BufferState::kQueued, site);
}

void step_deque(Buffer& buffer, QueueEvents events, Site site) {
    wait_event(buffer, events.filled, site);
    take_step(buffer, BufferState::kDequeued, site);
}

void step_free(Buffer& buffer, QueueEvents events, Site site) {
    require_state("FreeTensor", buffer, buffer.state == BufferState::kDequeued || buffer.state == BufferState::kAllocated, site);
    set_event(buffer, events.emptied, "FreeTensor", site);
    take_step(buffer, BufferState::kFree, site);
}

}  // namespace ascendc_host
