#include "cube.h"

namespace ascendc_host {

CubeScratch& cube_scratch() {
    static thread_local CubeScratch* scratch = new CubeScratch;  // one per worker, kept until the process ends
    return *scratch;
}

}  // namespace ascendc_host
