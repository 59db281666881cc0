#include "sync.h"

#include "deletion.h"
#include "monitor.h"

namespace ascendc_host {
namespace {

void require_id(const char* function, int32_t id, Site site) {
    if (id < 0 || id >= kEventIds) fail(function, site, "event ID between 0 and %d is required, found %d", kEventIds - 1, id);
}

}  // namespace

void set_flag(AscendC::HardEvent event, int32_t id, Site site) {
    if (is_left_out("SetFlag", site)) return;
    require_id("SetFlag", id, site);
    core().monitor->set_flag(core(), int(event), id, site, false);
}

void wait_flag(AscendC::HardEvent event, int32_t id, Site site) {
    if (is_left_out("WaitFlag", site)) return;
    require_id("WaitFlag", id, site);
    core().monitor->wait_flag(core(), int(event), id, site);
}

void pipe_barrier(pipe_t pipe, Site site) {
    if (is_left_out("PipeBarrier", site)) return;
    Core& me = core();
    const bool vector_pipe = pipe == PIPE_V || pipe == PIPE_MTE3;
    const bool cube_pipe = pipe == PIPE_M || pipe == PIPE_MTE1 || pipe == PIPE_FIX;
    if ((me.kind == CoreKind::kCube && vector_pipe) || (me.kind == CoreKind::kVector && cube_pipe))
        fail("PipeBarrier", site, "this core has no pipe %s", kPipeName[pipe]);
    me.monitor->barrier(me, pipe);
}

}  // namespace ascendc_host
