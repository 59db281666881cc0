// Mutation of a kernel while it runs (checked flavour): one synchronisation call, named by its place in the source, has no effect. A test
// leaves out each call in turn and demands that the model reports it.
#pragma once
#include "failure.h"

namespace ascendc_host {

// Whether this call is the one that is left out. Remembers every place that was asked for.
bool is_left_out(const char* function, Site site);

static inline bool left_out(const char* function, Site site) {
    if constexpr (kChecked) return is_left_out(function, site);
    return false;
}

}  // namespace ascendc_host
