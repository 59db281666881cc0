// The hazard mode of the checked flavour: which instruction last touched which bytes, and what orders the next one after it.
//
// Pipes of a core run concurrently on a device; here they run in program order, so a missing flag changes no result. The monitor
// finds it by vector clocks: every pipe counts its instructions and remembers up to which count of every other pipe it has waited.
#pragma once
#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "core.h"

namespace ascendc_host {

using Clock = std::vector<uint32_t>;

struct AccessRecord {
    int component = -1;  // pipe of a core; -1: never accessed
    uint32_t count = 0;
    const char* function = "";
    Site site = {"", 0};
};

// Byte-exact history of an address range.
class AccessMap {
 public:
    struct Interval {
        uintptr_t end;
        AccessRecord write;
        std::vector<AccessRecord> reads;  // of each pipe the last two, oldest first: the last may be by the instruction that now writes

        void add_read(const AccessRecord& read);
    };
    // Calls visit(interval) on the intervals that exactly cover [begin, end); splits and creates intervals as needed.
    template <typename Visit>
    void cover(uintptr_t begin, uintptr_t end, Visit visit) {
        for (uintptr_t at = begin; at < end;) {
            auto piece = piece_at(at, end);
            visit(piece->second);
            at = piece->second.end;
        }
    }
    void forget(uintptr_t begin, uintptr_t end);

 private:
    std::map<uintptr_t, Interval> intervals_;
    std::map<uintptr_t, Interval>::iterator piece_at(uintptr_t at, uintptr_t end);
    void split(uintptr_t at);
};

// One queue or event flag: what the waiting pipe learns.
struct Flag {
    enum State : uint8_t { kClear, kSet, kQueueOwned } state = kClear;
    Clock clock;
    Site site = {"", 0};
};

class Monitor {
 public:
    explicit Monitor(int64_t blocks);

    // An instruction: begin, then its reads and writes. own_pipe_ordered: the hardware orders it after its own pipe without a barrier.
    void begin(Core& core, pipe_t pipe, const char* function, Site site, bool own_pipe_ordered);
    void read_local(Core& core, const Buffer& buffer, const uint8_t* address, size_t bytes, const char* role);
    void write_local(Core& core, const Buffer& buffer, const uint8_t* address, size_t bytes, const char* role);
    // first: start of the global buffer, for messages.
    void read_global(Core& core, const uint8_t* address, size_t bytes, const char* role, const uint8_t* first);
    void write_global(Core& core, const uint8_t* address, size_t bytes, const char* role, const uint8_t* first);

    void set_flag(Core& core, int event, int id, Site site, bool by_queue);
    void wait_flag(Core& core, int event, int id, Site site);
    int free_event_id(Core& core, int event, const char* function, Site site);
    void barrier(Core& core, pipe_t pipe);
    void forget(Core& core, const Buffer& buffer);

    // Between cores: what pipe `pipe` has completed; and: everything issued from now on comes after it.
    Clock completed(Core& core, pipe_t pipe);
    void join_core(Core& core, const Clock& clock);
    static void join(Clock& into, const Clock& other);

    void check_end(Core& core);

 private:
    struct CoreState {
        Clock pipes[kPipes], issue;
        uint32_t issued[kPipes] = {};
        Flag flags[kEvents][kEventIds];
        AccessMap local;
    };
    struct Current {
        pipe_t pipe;
        AccessRecord record;
        bool own_pipe_ordered;
    };
    struct Place {  // for messages
        const char* role;
        const Buffer* buffer;  // nullptr: global memory
        uintptr_t origin, begin, end;
    };
    std::vector<CoreState> cores_;
    AccessMap global_;
    Current current_;

    CoreState& state(Core& core) { return cores_[core.number]; }
    static int component(const Core& core, pipe_t pipe) { return core.number * kPipes + pipe; }
    void read(Core& core, AccessMap& map, const Place& place);
    void write(Core& core, AccessMap& map, const Place& place);
    void require_order(Core& core, const AccessRecord& earlier, bool earlier_wrote, bool now_writes, const Place& place);
    std::string advice(const Core& core, const AccessRecord& earlier) const;
};

std::string core_name(int number);
std::string describe(const Buffer& buffer);
std::string describe(Site site);

}  // namespace ascendc_host
