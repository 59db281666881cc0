// Ways in which a device may differ from what this model takes for granted. One of them can be turned on, in libraries that are compiled with
// -DASCENDC_HOST_DEVIATIONS: the tests of ../probe show by them that every question of the probe can be answered with no. Elsewhere all of
// this compiles to nothing.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace ascendc_host {

#define ASCENDC_HOST_DEVIATION_LIST(X)                                                       \
    X(none)                                                                                  \
    X(mmad_descending)           /* terms in descending k */                                 \
    X(mmad_restarts)             /* a call adds its terms from +0, then to the accumulator */ \
    X(mmad_rows_differ)          /* rows from 16 on take the other order */                  \
    X(mmad_columns_differ)       /* columns from 16 on take the other order */               \
    X(mmad_few_rows_differ)      /* m <= 16 takes the other order */                         \
    X(mmad_by_core)              /* every second core takes the other order */               \
    X(mmad_beyond_k)             /* what L0A and L0B hold beyond k takes part */             \
    X(mmad_takes_a_lone_row)     /* m == 1 reads L0A as any other m does */                  \
    X(mmad_flushes)              /* subnormal operands, products and sums become zero */     \
    X(vector_flushes)            /* subnormal results of vector instructions become zero */  \
    X(exp_other_bits)            /* Exp, Ln, Sqrt and Div are one last bit off */            \
    X(exp_by_lane)               /* the same in the last lane of a block only */             \
    X(exp_by_core)               /* the same on every second core */                         \
    X(sum_ascending)             /* lanes of a repeat one after another, not in a tree */    \
    X(sum_repeats_descending)    /* ReduceSum adds the last repeat first */                  \
    X(sum_starts_with_a_repeat)  /* ReduceSum begins with the first repeat, not with +0 */   \
    X(masked_lanes_enter)        /* a sum takes the masked lanes of a repeat */              \
    X(adds_loses_the_sign)       /* -0 + -0 gives +0 */                                      \
    X(max_drops_nan)             /* the maximum of NaN and a number is a number */           \
    X(max_prefers_positive_zero) /* the maximum of zeros is +0 if one of them is */         \
    X(cast_saturates)            /* fp32 to half gives the largest number, not infinity */   \
    X(copies_are_late)           /* a consumer that waited finds the first half of a copy */ \
    X(cross_core_flags_ignored)  /* CrossCoreWaitFlag does not wait */                       \
    X(sync_all_ignored)          /* SyncAll does not wait */

enum class Deviation : int32_t {
#define ASCENDC_HOST_DEVIATION_ENUMERATOR(name) name,
    ASCENDC_HOST_DEVIATION_LIST(ASCENDC_HOST_DEVIATION_ENUMERATOR)
#undef ASCENDC_HOST_DEVIATION_ENUMERATOR
};

extern Deviation chosen_deviation;  // by ascendc_host_deviate (deviation.cpp)

#if defined(ASCENDC_HOST_DEVIATIONS)
constexpr bool kMayDeviate = true;
#else
constexpr bool kMayDeviate = false;
#endif

static inline bool deviates(Deviation which) { return kMayDeviate && chosen_deviation == which; }

static inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// The other last bit; zeros, infinities and NaN stay.
static inline float last_bit_off(float x) {
    if (x == 0.0f || !std::isfinite(x)) return x;
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(x));
    bits ^= 1;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
}

}  // namespace ascendc_host
