// How a modelled function names its caller, and how a kernel ends in an error.
#pragma once
#include "build_flavour.h"

namespace ascendc_host {

// Place of the call in kernel code. As the last, defaulted parameter of a modelled function it leaves calls as documented.
struct Site {
    const char* file;
    int line;
    static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

// Ends the launch with "kernel, core: function at file:line: message". Never returns: the fiber is abandoned, which is why kernel-side
// objects own nothing.
[[noreturn]] void fail(const char* function, Site site, const char* format, ...) __attribute__((format(printf, 3, 4)));

}  // namespace ascendc_host
