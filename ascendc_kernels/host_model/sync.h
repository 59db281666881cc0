// Synchronisation: between pipes of a core (nothing to do in the fast flavour, which runs in program order) and between cores.
#pragma once
#include "deviation.h"
#include "instruction.h"

namespace ascendc_host {

void set_flag(AscendC::HardEvent event, int32_t id, Site site);
void wait_flag(AscendC::HardEvent event, int32_t id, Site site);
void pipe_barrier(pipe_t pipe, Site site);

}  // namespace ascendc_host

namespace AscendC {

template <HardEvent event>
inline void SetFlag(int32_t eventID, ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(event != HardEvent::MAX, "SetFlag: no such event");
    if constexpr (ascendc_host::kChecked) ascendc_host::set_flag(event, eventID, site);
}

template <HardEvent event>
inline void WaitFlag(int32_t eventID, ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(event != HardEvent::MAX, "WaitFlag: no such event");
    if constexpr (ascendc_host::kChecked) ascendc_host::wait_flag(event, eventID, site);
}

template <pipe_t pipe>
inline void PipeBarrier(ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(pipe != PIPE_S, "PipeBarrier: the hardware orders the scalar pipe itself");
    if constexpr (ascendc_host::kChecked) ascendc_host::pipe_barrier(pipe, site);
}

template <uint8_t modeId, pipe_t pipe>
inline void CrossCoreSetFlag(uint16_t flagId, ascendc_host::Site site = ascendc_host::Site::here()) {
    static_assert(modeId <= 2, "CrossCoreSetFlag: mode 0, 1 or 2");
    static_assert(pipe != PIPE_S && pipe != PIPE_ALL, "CrossCoreSetFlag: not for PIPE_S and PIPE_ALL");
    ascendc_host::cross_core_set(modeId, pipe, flagId, site);
}

template <uint8_t modeId = 0, pipe_t pipe = PIPE_S>
inline void CrossCoreWaitFlag(uint16_t flagId, ascendc_host::Site site = ascendc_host::Site::here()) {
    if (!ascendc_host::deviates(ascendc_host::Deviation::cross_core_flags_ignored)) ascendc_host::cross_core_wait(flagId, site);
}

template <bool isAIVOnly = true>
inline void SyncAll(ascendc_host::Site site = ascendc_host::Site::here()) {
    if (!ascendc_host::deviates(ascendc_host::Deviation::sync_all_ignored)) ascendc_host::sync_all(isAIVOnly, site);
}

}  // namespace AscendC
