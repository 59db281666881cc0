#include "monitor.h"

#include <algorithm>
#include <cstring>

namespace ascendc_host {

std::string describe(Site site) {
    const char* slash = std::strrchr(site.file, '/');
    return std::string(slash ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

std::string describe(const Buffer& buffer) {
    static constexpr const char* kPositions[] = {"GM", "A1", "A2", "B1", "B2", "CO1", "VECIN", "VECOUT", "VECCALC"};
    return std::string(kMemoryName[int(buffer.memory)]) + " buffer " + std::to_string(buffer.index) + " of " +
           kPositions[int(buffer.position)] + " (InitBuffer at " + describe(buffer.created) + ", " + std::to_string(buffer.bytes) + " bytes)";
}

std::string core_name(int number) {
    const int in_block = number % kCoresPerBlock;
    const std::string kind = in_block == kCubeInBlock ? "cube core" : "vector core " + std::to_string(in_block);
    return "block " + std::to_string(number / kCoresPerBlock) + ", " + kind;
}

void AccessMap::Interval::add_read(const AccessRecord& read) {
    const auto of_its_pipe = [&](const AccessRecord& seen) { return seen.component == read.component; };
    const auto last = std::find_if(reads.rbegin(), reads.rend(), of_its_pipe);
    if (last == reads.rend()) return reads.push_back(read);
    if (last->count == read.count) return;
    const AccessRecord before = *last;
    reads.erase(std::remove_if(reads.begin(), reads.end(), of_its_pipe), reads.end());
    reads.insert(reads.end(), {before, read});
}

void AccessMap::split(uintptr_t at) {
    auto after = intervals_.upper_bound(at);
    if (after == intervals_.begin()) return;
    auto found = std::prev(after);
    if (found->first == at || found->second.end <= at) return;
    Interval tail = found->second;
    found->second.end = at;
    intervals_.emplace(at, std::move(tail));
}

std::map<uintptr_t, AccessMap::Interval>::iterator AccessMap::piece_at(uintptr_t at, uintptr_t end) {
    split(at);
    auto found = intervals_.lower_bound(at);
    if (found == intervals_.end() || found->first > at) {  // a gap: new bytes
        const uintptr_t stop = found == intervals_.end() ? end : std::min(end, found->first);
        return intervals_.emplace(at, Interval{stop, {}, {}}).first;
    }
    if (found->second.end > end) {
        split(end);
        found = intervals_.find(at);
    }
    return found;
}

void AccessMap::forget(uintptr_t begin, uintptr_t end) {
    split(begin);
    split(end);
    intervals_.erase(intervals_.lower_bound(begin), intervals_.lower_bound(end));
}

Monitor::Monitor(int64_t blocks) : cores_(blocks * kCoresPerBlock) {
    for (CoreState& core : cores_) {
        for (Clock& clock : core.pipes) clock.assign(cores_.size() * kPipes, 0);
        core.issue.assign(cores_.size() * kPipes, 0);
    }
}

void Monitor::join(Clock& into, const Clock& other) {
    if (into.size() < other.size()) into.resize(other.size(), 0);
    for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

void Monitor::begin(Core& core, pipe_t pipe, const char* function, Site site, bool own_pipe_ordered) {
    CoreState& me = state(core);
    join(me.pipes[pipe], me.issue);
    current_ = {pipe, {component(core, pipe), ++me.issued[pipe], function, site}, own_pipe_ordered || pipe == PIPE_S};
}

std::string Monitor::advice(const Core& core, const AccessRecord& earlier) const {
    const int earlier_core = earlier.component / kPipes;
    const std::string from = kPipeName[earlier.component % kPipes], to = kPipeName[current_.pipe];
    if (earlier_core != core.number)
        return "that was " + core_name(earlier_core) + ": CrossCoreSetFlag/CrossCoreWaitFlag or SyncAll is missing";
    if (from == to) return "PipeBarrier<PIPE_" + to + "> is missing";
    return "SetFlag/WaitFlag<HardEvent::" + from + "_" + to + "> or a queue step is missing";
}

void Monitor::require_order(Core& core, const AccessRecord& earlier, bool earlier_wrote, bool now_writes, const Place& place) {
    if (earlier.component < 0) return;
    const bool own_pipe = earlier.component == current_.record.component;
    if (own_pipe && (earlier.count == current_.record.count || current_.own_pipe_ordered)) return;
    if (state(core).pipes[current_.pipe][earlier.component] >= earlier.count) return;
    const std::string where = place.buffer ? describe(*place.buffer) : "a global buffer";
    fail(current_.record.function, current_.record.site, "hazard: pipe %s %s %s, bytes [%llu, %llu) of %s, which %s (pipe %s) %s at %s; %s",
         kPipeName[current_.pipe], now_writes ? "writes" : "reads", place.role, (unsigned long long)(place.begin - place.origin),
         (unsigned long long)(place.end - place.origin), where.c_str(), earlier.function, kPipeName[earlier.component % kPipes],
         earlier_wrote ? "wrote" : "read", describe(earlier.site).c_str(), advice(core, earlier).c_str());
}

void Monitor::read(Core& core, AccessMap& map, const Place& place) {
    map.cover(place.begin, place.end, [&](AccessMap::Interval& piece) {
        require_order(core, piece.write, true, false, place);
        piece.add_read(current_.record);
    });
}

void Monitor::write(Core& core, AccessMap& map, const Place& place) {
    map.cover(place.begin, place.end, [&](AccessMap::Interval& piece) {
        for (const AccessRecord& seen : piece.reads) require_order(core, seen, false, true, place);  // the later ones, so named first
        require_order(core, piece.write, true, true, place);
        piece.write = current_.record;
        piece.reads.clear();
    });
}

void Monitor::read_local(Core& core, const Buffer& buffer, const uint8_t* address, size_t bytes, const char* role) {
    read(core, state(core).local, {role, &buffer, uintptr_t(buffer.start), uintptr_t(address), uintptr_t(address) + bytes});
}

void Monitor::write_local(Core& core, const Buffer& buffer, const uint8_t* address, size_t bytes, const char* role) {
    write(core, state(core).local, {role, &buffer, uintptr_t(buffer.start), uintptr_t(address), uintptr_t(address) + bytes});
}

void Monitor::read_global(Core& core, const uint8_t* address, size_t bytes, const char* role, const uint8_t* first) {
    read(core, global_, {role, nullptr, uintptr_t(first), uintptr_t(address), uintptr_t(address) + bytes});
}

void Monitor::write_global(Core& core, const uint8_t* address, size_t bytes, const char* role, const uint8_t* first) {
    write(core, global_, {role, nullptr, uintptr_t(first), uintptr_t(address), uintptr_t(address) + bytes});
}

Clock Monitor::completed(Core& core, pipe_t pipe) {
    CoreState& me = state(core);
    Clock clock = me.issue;
    for (int p = 0; p < kPipes; ++p) {
        if (pipe != PIPE_ALL && p != pipe) continue;
        join(clock, me.pipes[p]);
        clock[component(core, pipe_t(p))] = me.issued[p];
    }
    return clock;
}

void Monitor::join_core(Core& core, const Clock& clock) { join(state(core).issue, clock); }

void Monitor::barrier(Core& core, pipe_t pipe) {
    if (pipe == PIPE_ALL)
        join_core(core, completed(core, PIPE_ALL));
    else
        join(state(core).pipes[pipe], completed(core, pipe));
}

void Monitor::set_flag(Core& core, int event, int id, Site site, bool by_queue) {
    Flag& flag = state(core).flags[event][id];
    if (flag.state != Flag::kClear)
        fail("SetFlag", site, "event ID %d of HardEvent %s_%s is already set, %s at %s, and not waited for", id,
             kPipeName[kEventPipes[event].from], kPipeName[kEventPipes[event].to],
             flag.state == Flag::kQueueOwned ? "by a queue step" : "by SetFlag", describe(flag.site).c_str());
    flag = {by_queue ? Flag::kQueueOwned : Flag::kSet, completed(core, kEventPipes[event].from), site};
}

void Monitor::wait_flag(Core& core, int event, int id, Site site) {
    Flag& flag = state(core).flags[event][id];
    const pipe_t to = kEventPipes[event].to;
    if (flag.state == Flag::kClear)
        fail("WaitFlag", site, "event ID %d of HardEvent %s_%s was not set before: SetFlag is missing, the pipe would wait for ever", id,
             kPipeName[kEventPipes[event].from], kPipeName[to]);
    if (to == PIPE_S)
        join_core(core, flag.clock);  // the scalar pipe issues all others
    else
        join(state(core).pipes[to], flag.clock);
    flag.state = Flag::kClear;
}

int Monitor::free_event_id(Core& core, int event, const char* function, Site site) {
    for (int id = 0; id < kEventIds; ++id)
        if (state(core).flags[event][id].state == Flag::kClear) return id;
    fail(function, site, "all %d event IDs of HardEvent %s_%s are pending", kEventIds, kPipeName[kEventPipes[event].from],
         kPipeName[kEventPipes[event].to]);
}

void Monitor::forget(Core& core, const Buffer& buffer) {
    state(core).local.forget(uintptr_t(buffer.start), uintptr_t(buffer.start) + buffer.bytes);
}

void Monitor::check_end(Core& core) {
    for (int event = 0; event < kEvents; ++event)
        for (int id = 0; id < kEventIds; ++id) {
            const Flag& flag = state(core).flags[event][id];
            if (flag.state == Flag::kSet)
                fail("SetFlag", flag.site, "event ID %d of HardEvent %s_%s is still set at the end of the kernel: WaitFlag is missing", id,
                     kPipeName[kEventPipes[event].from], kPipeName[kEventPipes[event].to]);
        }
}

}  // namespace ascendc_host
