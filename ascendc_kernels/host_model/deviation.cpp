// The deviation that is in force.
#include "deviation.h"

namespace ascendc_host {

Deviation chosen_deviation = Deviation::none;

}  // namespace ascendc_host

// Turns on one deviation by its name, "none" for none. Returns false if there is none of that name.
extern "C" __attribute__((visibility("default"))) bool ascendc_host_deviate(const char* name) {
    using ascendc_host::Deviation;
#define ASCENDC_HOST_DEVIATION_CHOICE(each)                  \
    if (std::strcmp(name, #each) == 0) {                     \
        ascendc_host::chosen_deviation = Deviation::each;    \
        return true;                                         \
    }
    ASCENDC_HOST_DEVIATION_LIST(ASCENDC_HOST_DEVIATION_CHOICE)
#undef ASCENDC_HOST_DEVIATION_CHOICE
    return false;
}

// Names of all deviations, one a line.
extern "C" __attribute__((visibility("default"))) const char* ascendc_host_deviations() {
#define ASCENDC_HOST_DEVIATION_NAME(name) #name "\n"
    return ASCENDC_HOST_DEVIATION_LIST(ASCENDC_HOST_DEVIATION_NAME);
#undef ASCENDC_HOST_DEVIATION_NAME
}
