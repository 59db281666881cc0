// Flags and meetings between cores.
#include "deletion.h"
#include "launch_state.h"

namespace ascendc_host {
namespace {

// The core that calls, in a kernel whose type has a cross-core scheduler.
CoreFiber& waiting_or_setting(const char* function, Site site) {
    CoreFiber& me = *core().fiber;
    if (me.core.launch->type_ == kNoType) fail(function, site, "KERNEL_TASK_TYPE_DEFAULT must come first");
    if (me.core.launch->meetings() == nullptr)
        fail(function, site, "the hardware has no cross-core scheduler for KERNEL_TYPE_AIV_ONLY and KERNEL_TYPE_AIC_ONLY; use a MIX type");
    return me;
}

void require_flag(const char* function, uint16_t flag, Site site) {
    if (flag >= kCrossCoreFlags) fail(function, site, "flag %d is not below %d", int(flag), kCrossCoreFlags);
}

void release(CoreFiber& to, uint16_t flag, const Clock& clock, Site site) {
    if (to.flags[flag].ready.count >= kCrossCoreFlagMax)
        fail("CrossCoreSetFlag", site, "flag %d of %s was set more than %d times without a wait", int(flag), core_name(to.core.number).c_str(),
             kCrossCoreFlagMax);
    to.flags[flag].ready.push(to.core, clock);
    to.flags[flag].last_set = site;
}

// Modes 1 and 2 from a vector core: takes effect when both vector cores have set.
void set_by_vector_core(CoreFiber& me, int mode, uint16_t flag, const Clock& clock, Site site) {
    CoreFiber* fibers = me.block->fibers;
    me.flags[flag].arrived[mode - 1].push(me.core, clock);
    PendingSets& first = fibers[0].flags[flag].arrived[mode - 1];
    PendingSets& second = fibers[1].flags[flag].arrived[mode - 1];
    if (first.count == 0 || second.count == 0) return;
    Clock both = first.pop();
    Monitor::join(both, second.pop());
    if (mode == 2) return release(fibers[kCubeInBlock], flag, both, site);
    for (int v = 0; v < kVectorCores; ++v) release(fibers[v], flag, both, site);
}

void set_by_cube_core(CoreFiber& me, int mode, uint16_t flag, const Clock& clock, Site site) {
    if (mode != 2) fail("CrossCoreSetFlag", site, "mode %d is not for a cube core", mode);
    for (int v = 0; v < kVectorCores; ++v) release(me.block->fibers[v], flag, clock, site);
}

}  // namespace

void cross_core_set(int mode, pipe_t pipe, uint16_t flag, Site site) {
    if (core().monitor && is_left_out("CrossCoreSetFlag", site)) return;
    CoreFiber& me = waiting_or_setting("CrossCoreSetFlag", site);
    require_flag("CrossCoreSetFlag", flag, site);
    Launch& launch = *me.core.launch;
    const Clock clock = me.core.monitor ? me.core.monitor->completed(me.core, pipe) : Clock();
    const bool vector = me.core.kind == CoreKind::kVector;
    if (mode == 0)
        launch.meet(launch.meetings()->group_flags[vector][flag], me.flags[flag].group_sets++, launch.cores_in_launch(vector, !vector), clock);
    else if (launch.type_ != KERNEL_TYPE_MIX_AIC_1_2)
        fail("CrossCoreSetFlag", site, "mode %d needs KERNEL_TYPE_MIX_AIC_1_2", mode);
    else if (vector)
        set_by_vector_core(me, mode, flag, clock, site);
    else
        set_by_cube_core(me, mode, flag, clock, site);
}

void cross_core_wait(uint16_t flag, Site site) {
    if (core().monitor && is_left_out("CrossCoreWaitFlag", site)) return;
    CoreFiber& me = waiting_or_setting("CrossCoreWaitFlag", site);
    require_flag("CrossCoreWaitFlag", flag, site);
    Launch& launch = *me.core.launch;
    const Rendezvous& group = launch.meetings()->group_flags[me.core.kind == CoreKind::kVector][flag];
    CrossCoreFlag& mine = me.flags[flag];
    launch.wait({"CrossCoreWaitFlag", flag, site, &group, mine.group_waits, &mine.ready});
    Clock clock;
    if (mine.ready.count > 0) {
        clock = mine.ready.pop();
    } else {
        const int generation = mine.group_waits++;
        if (me.core.monitor) clock = group.generations[generation].clock;
    }
    if (me.core.monitor) me.core.monitor->join_core(me.core, clock);
}

void sync_all(bool vector_only, Site site) {
    if (core().monitor && is_left_out("SyncAll", site)) return;
    CoreFiber& me = waiting_or_setting("SyncAll", site);
    Launch& launch = *me.core.launch;
    const bool mixed = launch.type_ == KERNEL_TYPE_MIX_AIC_1_2;
    if (vector_only && me.core.kind == CoreKind::kCube) fail("SyncAll", site, "isAIVOnly=true on a cube core");
    if (!vector_only && !mixed) fail("SyncAll", site, "isAIVOnly=false needs KERNEL_TYPE_MIX_AIC_1_2: a vector kernel would hang");
    Monitor* monitor = me.core.monitor;
    if (monitor) monitor->barrier(me.core, PIPE_ALL);
    Rendezvous& meeting = launch.meetings()->sync_all[vector_only];
    const int generation = me.sync_all_count[vector_only]++;
    launch.meet(meeting, generation, launch.cores_in_launch(true, !vector_only), monitor ? monitor->completed(me.core, PIPE_ALL) : Clock());
    launch.wait({"SyncAll", -1, site, &meeting, generation, nullptr});
    if (monitor) monitor->join_core(me.core, meeting.generations[generation].clock);
}

}  // namespace ascendc_host
