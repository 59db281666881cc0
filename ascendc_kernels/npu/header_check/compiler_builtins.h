// What bisheng defines by itself and the public Ascend C headers take for granted, so that g++ can parse them. Declarations only: nothing
// that is compiled with this runs.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

#define __aicore__
#define __global__
#define __gm__
#define __ubuf__
#define __cbuf__
#define __ca__
#define __cb__
#define __cc__
#define __fbuf__
#define __ssbuf__
#define __biasbuf__
#define __inout_pipe__(...)
#define __in_pipe__(...)
#define __out_pipe__(...)
#define __check_sync_alias__
#define __sync_alias__
#define __sync_noalias__
#define __sync_in__
#define __sync_out__
#define __simd_callee__
#define __simd_vf__
#define __simt_callee__
#define GM_ADDR uint8_t*

// The headers convert from int implicitly; the host model does not, so kernels cannot lean on it.
struct half {
    uint16_t bits;
    half() = default;
    template <typename T>
    half(T) {}
    explicit operator float() const { return 0.0f; }
};
struct bfloat16_t {
    uint16_t bits;
    bfloat16_t() = default;
    template <typename T>
    bfloat16_t(T) {}
    explicit operator float() const { return 0.0f; }
};

enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_FIX, PIPE_ALL, PIPE_V2, PIPE_MTE4, PIPE_MTE5 };
enum event_t { EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };
enum QuantMode_t { NoQuant, F322F16, F322BF16, DEQF16, VDEQF16, QF322B8_PRE, VQF322B8_PRE, REQ8, VREQ8, DEQS16, VDEQS16 };
enum cache_line_t { SINGLE_CACHE_LINE, ENTIRE_DATA_CACHE };
enum dcci_dst_t { CACHELINE_ALL, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };
enum pad_t { PAD_NONE };
enum unit_flag_t {};
enum addr_cal_mode_t { inc, dec };
enum bm_t {};
enum mem_t { L1, L0A, L0B, L0C, UB, BT };
enum mem_dsb_t { DSB_ALL, DSB_DDR, DSB_UB, DSB_SEQ };

#define COMPILER_BUILTIN(name)          \
    template <typename... Arguments>    \
    inline uint64_t name(Arguments...) { \
        return 0;                       \
    }
COMPILER_BUILTIN(wait_flag)
COMPILER_BUILTIN(set_flag)
COMPILER_BUILTIN(set_vector_mask)
COMPILER_BUILTIN(set_padding)
COMPILER_BUILTIN(set_l1_3d_size)
COMPILER_BUILTIN(set_mask_norm)
COMPILER_BUILTIN(set_mask_count)
COMPILER_BUILTIN(set_atomic_none)
COMPILER_BUILTIN(get_ctrl)
COMPILER_BUILTIN(set_ctrl)
COMPILER_BUILTIN(sbitset0)
COMPILER_BUILTIN(sbitset1)
COMPILER_BUILTIN(get_rsvd_cnt)
COMPILER_BUILTIN(pipe_barrier)
COMPILER_BUILTIN(sff0)
COMPILER_BUILTIN(img2colv2_cbuf_to_ca)
COMPILER_BUILTIN(img2colv2_cbuf_to_cb)
COMPILER_BUILTIN(vcmpv_eq)
COMPILER_BUILTIN(vcmpvs_eq)
COMPILER_BUILTIN(set_l3d_rpt)
COMPILER_BUILTIN(set_fmatrix)
COMPILER_BUILTIN(set_fmatrix_b)
COMPILER_BUILTIN(mad_sp)
COMPILER_BUILTIN(get_subblockdim)
COMPILER_BUILTIN(get_subblockid)
COMPILER_BUILTIN(get_block_num)
COMPILER_BUILTIN(get_block_idx)
COMPILER_BUILTIN(get_pc)
COMPILER_BUILTIN(get_coreid)
COMPILER_BUILTIN(dcci)
COMPILER_BUILTIN(dsb)
#undef COMPILER_BUILTIN
