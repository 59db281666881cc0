// One modelled function per entry: three inputs and the output's old content are loaded to UB, the body runs, the output is stored.
#pragma once
#include "kernel_operator.h"
#include "runtime.h"

#define ENTRY extern "C" __attribute__((visibility("default"))) const char*

using namespace AscendC;

struct Case {
    uint8_t* src[3];
    uint8_t* dst;
    uint32_t src_bytes[3];
    uint32_t dst_bytes;
    int64_t p[12];
    double scalar;
};

struct Operands {
    LocalTensor<uint8_t> src[3], dst;
    const Case* c;
    template <typename T>
    LocalTensor<T> in(int i) const { return src[i].template ReinterpretCast<T>(); }
    template <typename T>
    LocalTensor<T> out() const { return dst.template ReinterpretCast<T>(); }
    int32_t p(int i) const { return int32_t(c->p[i]); }
    template <typename T>
    T scalar() const { return T(float(c->scalar)); }
    UnaryRepeatParams unary(int first) const {
        return UnaryRepeatParams(uint16_t(p(first)), uint16_t(p(first + 1)), uint8_t(p(first + 2)), uint8_t(p(first + 3)));
    }
    BinaryRepeatParams binary(int first) const {
        return BinaryRepeatParams(uint8_t(p(first)), uint8_t(p(first + 1)), uint8_t(p(first + 2)), uint8_t(p(first + 3)),
                                  uint8_t(p(first + 4)), uint8_t(p(first + 5)));
    }
};

template <typename Body>
inline void vector_case(const Case& c, Body body) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    TPipe pipe;
    TBuf<TPosition::VECCALC> buffers[4];
    Operands operands;
    operands.c = &c;
    GlobalTensor<uint8_t> global;
    for (int i = 0; i < 4; ++i) {
        const uint32_t bytes = i < 3 ? c.src_bytes[i] : c.dst_bytes;
        pipe.InitBuffer(buffers[i], bytes ? bytes : 32);
        LocalTensor<uint8_t> local = buffers[i].Get<uint8_t>();
        global.SetGlobalBuffer(i < 3 ? c.src[i] : c.dst, bytes);
        if (bytes) DataCopyPad(local, global, DataCopyExtParams(1, bytes, 0, 0, 0), DataCopyPadExtParams<uint8_t>());
        (i < 3 ? operands.src[i] : operands.dst) = local;
    }
    PipeBarrier<PIPE_ALL>();
    body(operands);
    PipeBarrier<PIPE_ALL>();
    DataCopyPad(global, operands.dst, DataCopyExtParams(1, c.dst_bytes, 0, 0, 0));
}

#define VECTOR_CASE(NAME, ...)                                                                      \
    ENTRY NAME(const Case* c) {                                                                     \
        return ascendc_host::launch({#NAME, 1}, [c] { vector_case(*c, [](const Operands& o) { __VA_ARGS__; }); }); \
    }
