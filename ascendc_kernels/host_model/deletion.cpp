#include "deletion.h"

#include <mutex>
#include <set>
#include <string>

namespace ascendc_host {
namespace {

std::mutex mutex;
std::set<std::string> visited;
std::string chosen;

std::string place(const char* function, Site site) { return std::string(site.file) + ":" + std::to_string(site.line) + " " + function; }

}  // namespace

bool is_left_out(const char* function, Site site) {
    const std::string here = place(function, site);
    std::lock_guard<std::mutex> lock(mutex);
    visited.insert(here);
    return here == chosen;
}

}  // namespace ascendc_host

// Leaves out the call at `place`, a line of ascendc_host_visited; "" for none.
extern "C" __attribute__((visibility("default"))) void ascendc_host_leave_out(const char* place) {
    std::lock_guard<std::mutex> lock(ascendc_host::mutex);
    ascendc_host::chosen = place;
}

// Places of all synchronisation calls since the library was loaded, one a line: "file:line function".
extern "C" __attribute__((visibility("default"))) const char* ascendc_host_visited() {
    static std::string text;
    std::lock_guard<std::mutex> lock(ascendc_host::mutex);
    text.clear();
    for (const std::string& place : ascendc_host::visited) text += place + "\n";
    return text.c_str();
}
