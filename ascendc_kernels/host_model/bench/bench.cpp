// Kernels of the benchmark: each modelled instruction on tiles that stay in a core's buffers, Mmad, and empty launches.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "kernel_operator.h"
#include "runtime.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace AscendC;

namespace {

double now_ns() {
    return double(std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count());
}

void require_success(const char* error) {
    if (error == nullptr) return;
    std::fprintf(stderr, "%s\n", error);
    std::abort();
}

// Smallest time of one call, over rounds that are long enough for the clock.
template <typename Call>
double best_ns(Call call) {
    constexpr double kRoundNs = 50e3;
    constexpr int kRounds = 30;
    double best = 1e30;
    int64_t calls = 1;
    for (int round = 0; round < kRounds;) {
        const double start = now_ns();
        for (int64_t i = 0; i < calls; ++i) call();
        const double elapsed = now_ns() - start;
        if (elapsed < kRoundNs) {
            calls *= 2;
            continue;
        }
        if (elapsed / double(calls) < best) best = elapsed / double(calls);
        ++round;
    }
    return best;
}

// ---- vector and copy instructions

constexpr int32_t kLargest = 12 * 1024;  // floats; three such operands and the small ones fill UB
constexpr int32_t kRowLength = 128;      // of the row-wise forms

struct Tile {
    int32_t count;
    LocalTensor<float> a, b, dst, few;  // few: 1024 floats
    LocalTensor<uint8_t> bits;
    GlobalTensor<float> from, to;

    uint8_t repeats() const { return uint8_t(count / 64); }
    LocalTensor<half> half_of(const LocalTensor<float>& x) const { return x.ReinterpretCast<half>(); }
    LocalTensor<bfloat16_t> bf16_of(const LocalTensor<float>& x) const { return x.ReinterpretCast<bfloat16_t>(); }
    LocalTensor<int32_t> int_of(const LocalTensor<float>& x) const { return x.ReinterpretCast<int32_t>(); }
};

using Body = void (*)(const Tile&);

struct Case {
    const char* name;
    double bytes;  // read and written per element
    Body body;
};

// The mask forms take up to 255 repeats a call.
template <typename Call>
void for_repeats(const Tile& t, Call call) {
    for (int32_t first = 0; first < t.count; first += 128 * 64) call(first, uint8_t((t.count - first < 128 * 64 ? t.count - first : 128 * 64) / 64));
}

// x[row][128] with one block of b per row, or one row of b for all.
void add_row_scalar(const Tile& t) {
    const int32_t rows = t.count / kRowLength;
    for (int32_t c = 0; c < kRowLength; c += 64)
        Add(t.dst[c], t.a[c], t.b, uint64_t(64), uint8_t(rows), BinaryRepeatParams(1, 1, 0, kRowLength / 8, kRowLength / 8, 1));
}
void mul_one_block(const Tile& t) {
    for_repeats(t, [&](int32_t first, uint8_t repeats) {
        Mul(t.dst[first], t.a[first], t.b, uint64_t(64), repeats, BinaryRepeatParams(1, 1, 0, 8, 8, 0));
    });
}
void mul_one_row(const Tile& t) {
    const int32_t rows = t.count / kRowLength;
    for (int32_t c = 0; c < kRowLength; c += 64)
        Mul(t.dst[c], t.a[c], t.b[c], uint64_t(64), uint8_t(rows), BinaryRepeatParams(1, 1, 1, kRowLength / 8, kRowLength / 8, 0));
}
void add_masked(const Tile& t) {
    for_repeats(t, [&](int32_t first, uint8_t repeats) {
        Add(t.dst[first], t.a[first], t.b[first], uint64_t(40), repeats, BinaryRepeatParams());
    });
}
void exp_masked(const Tile& t) {
    for_repeats(t, [&](int32_t first, uint8_t repeats) { Exp(t.dst[first], t.a[first], uint64_t(40), repeats, UnaryRepeatParams()); });
}
void brcb(const Tile& t) { Brcb(t.dst, t.a, uint8_t(t.count / 64), BrcbRepeatParams(1, 8)); }
void whole_sum(const Tile& t) {
    for_repeats(t, [&](int32_t first, uint8_t repeats) { WholeReduceSum(t.few[first / 64], t.a[first], 64, repeats, 1, 1, 8); });
}
void block_sum(const Tile& t) {
    for_repeats(t, [&](int32_t first, uint8_t repeats) { BlockReduceSum(t.dst[first / 8], t.a[first], repeats, 64, 1, 1, 8); });
}
void pair_sum(const Tile& t) {
    for_repeats(t, [&](int32_t first, uint8_t repeats) { PairReduceSum(t.dst[first / 2], t.a[first], repeats, 64, 1, 1, 8); });
}
void whole_max(const Tile& t, ReduceOrder order) {
    for_repeats(t, [&](int32_t first, uint8_t repeats) { WholeReduceMax(t.few[first / 32], t.a[first], 64, repeats, 1, 1, 8, order); });
}
void block_max(const Tile& t) {
    for_repeats(t, [&](int32_t first, uint8_t repeats) { BlockReduceMax(t.dst[first / 8], t.a[first], repeats, 64, 1, 1, 8); });
}
void copy_gaps(const Tile& t) {  // every other row of 128
    DataCopy(t.dst, t.from, DataCopyParams(uint16_t(t.count / kRowLength), kRowLength / 8, kRowLength / 8, 0));
}
void copy_pad(const Tile& t) {  // rows of 100, padded to 104
    DataCopyPad(t.dst, t.from, DataCopyExtParams(uint16_t(t.count / 104), 400, 0, 0, 0), DataCopyPadExtParams<float>(true, 0, 4, 0.0f));
}
void copy_pad_out(const Tile& t) { DataCopyPad(t.to, t.a, DataCopyExtParams(uint16_t(t.count / 104), 400, 0, 0, 0)); }
void cast(const Tile& t, RoundMode mode) { Cast(t.int_of(t.dst), t.a, mode, uint32_t(t.count)); }

const Case kCases[] = {
    {"memcpy", 8, [](const Tile& t) { std::memcpy(t.dst.host_data(), t.a.host_data(), t.count * sizeof(float)); }},
    {"Add", 12, [](const Tile& t) { Add(t.dst, t.a, t.b, t.count); }},
    {"Sub", 12, [](const Tile& t) { Sub(t.dst, t.a, t.b, t.count); }},
    {"Mul", 12, [](const Tile& t) { Mul(t.dst, t.a, t.b, t.count); }},
    {"Div", 12, [](const Tile& t) { Div(t.dst, t.a, t.b, t.count); }},
    {"Max", 12, [](const Tile& t) { Max(t.dst, t.a, t.b, t.count); }},
    {"Add half", 6, [](const Tile& t) { Add(t.half_of(t.dst), t.half_of(t.a), t.half_of(t.b), t.count); }},
    {"Adds", 8, [](const Tile& t) { Adds(t.dst, t.a, 1.5f, t.count); }},
    {"Muls", 8, [](const Tile& t) { Muls(t.dst, t.a, 1.5f, t.count); }},
    {"Muls half", 4, [](const Tile& t) { Muls(t.half_of(t.dst), t.half_of(t.a), half(1.5f), t.count); }},
    {"Exp", 8, [](const Tile& t) { Exp(t.dst, t.a, t.count); }},
    {"Ln", 8, [](const Tile& t) { Ln(t.dst, t.a, t.count); }},
    {"Sqrt", 8, [](const Tile& t) { Sqrt(t.dst, t.a, t.count); }},
    {"Duplicate", 4, [](const Tile& t) { Duplicate(t.dst, 1.5f, t.count); }},
    {"Cast fp32 to bf16, RINT", 6, [](const Tile& t) { Cast(t.bf16_of(t.dst), t.a, RoundMode::CAST_RINT, uint32_t(t.count)); }},
    {"Cast bf16 to fp32", 6, [](const Tile& t) { Cast(t.dst, t.bf16_of(t.a), RoundMode::CAST_NONE, uint32_t(t.count)); }},
    {"Cast fp32 to half, RINT", 6, [](const Tile& t) { Cast(t.half_of(t.dst), t.a, RoundMode::CAST_RINT, uint32_t(t.count)); }},
    {"Cast half to fp32", 6, [](const Tile& t) { Cast(t.dst, t.half_of(t.a), RoundMode::CAST_NONE, uint32_t(t.count)); }},
    {"Cast fp32 to int32, RINT", 8, [](const Tile& t) { cast(t, RoundMode::CAST_RINT); }},
    {"Cast fp32 to int32, TRUNC", 8, [](const Tile& t) { cast(t, RoundMode::CAST_TRUNC); }},
    {"Cast int32 to fp32", 8, [](const Tile& t) { Cast(t.dst, t.int_of(t.a), RoundMode::CAST_RINT, uint32_t(t.count)); }},
    {"Compare", 8.125, [](const Tile& t) { Compare(t.bits, t.a, t.b, CMPMODE::GT, uint32_t(t.count)); }},
    {"Compares", 4.125, [](const Tile& t) { Compares(t.bits, t.a, 0.5f, CMPMODE::LE, uint32_t(t.count)); }},
    {"Select, two tensors", 12.125, [](const Tile& t) { Select(t.dst, t.bits, t.a, t.b, SELMODE::VSEL_TENSOR_TENSOR_MODE, uint32_t(t.count)); }},
    {"Select, scalar", 8.125, [](const Tile& t) { Select(t.dst, t.bits, t.a, -1.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, uint32_t(t.count)); }},
    {"Gather", 12, [](const Tile& t) { Gather(t.dst, t.a, t.b.ReinterpretCast<uint32_t>(), 0, uint32_t(t.count)); }},
    {"Brcb", 4.5, brcb},
    {"Add, a block per row of 128", 8.25, add_row_scalar},
    {"Mul, one block for all", 8, mul_one_block},
    {"Mul, one row of 128 for all", 8, mul_one_row},
    {"Add, mask of 40", 12, add_masked},
    {"Exp, mask of 40", 8, exp_masked},
    {"WholeReduceSum", 4, whole_sum},
    {"BlockReduceSum", 4.5, block_sum},
    {"PairReduceSum", 6, pair_sum},
    {"ReduceSum", 4, [](const Tile& t) { ReduceSum(t.few, t.a, t.few[64], t.count); }},
    {"WholeReduceMax, value", 4, [](const Tile& t) { whole_max(t, ReduceOrder::ORDER_ONLY_VALUE); }},
    {"WholeReduceMax, value and index", 4, [](const Tile& t) { whole_max(t, ReduceOrder::ORDER_VALUE_INDEX); }},
    {"BlockReduceMax", 4.5, block_max},
    {"ReduceMax", 4, [](const Tile& t) { ReduceMax(t.few, t.a, t.few[64], t.count, false); }},
    {"ReduceMax with index", 4, [](const Tile& t) { ReduceMax(t.few, t.a, t.few[64], t.count, true); }},
    {"ReduceMax half with index", 2, [](const Tile& t) { ReduceMax(t.half_of(t.few), t.half_of(t.a), t.half_of(t.few[64]), t.count, true); }},
    {"DataCopy in", 8, [](const Tile& t) { DataCopy(t.dst, t.from, uint32_t(t.count)); }},
    {"DataCopy out", 8, [](const Tile& t) { DataCopy(t.to, t.a, uint32_t(t.count)); }},
    {"DataCopy, rows of 128 with gaps", 8, copy_gaps},
    {"DataCopyPad in, rows of 100", 8, copy_pad},
    {"DataCopyPad out, rows of 100", 8, copy_pad_out},
};
constexpr int kCaseCount = sizeof(kCases) / sizeof(Case);

float global_memory[2][2 * kLargest];

void fill(const Tile& t, bool offsets) {
    uint32_t state = 1;
    for (int32_t i = 0; i < t.count; ++i) {
        state = state * 1664525u + 1013904223u;
        t.a.SetValue(i, float(state >> 8) * (8.0f / (1 << 24)) - 2.0f);
        t.b.SetValue(i, float(state >> 8 & 0xFFFF) * (1.0f / (1 << 16)) + 0.5f);
        if (offsets) t.int_of(t.b).SetValue(i, int32_t((state >> 8) % uint32_t(t.count) * sizeof(float)));
    }
}

double time_case(const Case& c, int32_t count) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    TPipe pipe;
    TBuf<> operands[3], few, bits;
    for (TBuf<>& operand : operands) pipe.InitBuffer(operand, uint32_t(count * sizeof(float)));
    pipe.InitBuffer(few, 1024 * sizeof(float));
    pipe.InitBuffer(bits, kLargest / 8);
    Tile t = {count, operands[0].Get<float>(), operands[1].Get<float>(), operands[2].Get<float>(), few.Get<float>(), bits.Get<uint8_t>(), {}, {}};
    t.from.SetGlobalBuffer(global_memory[0], 2 * kLargest);
    t.to.SetGlobalBuffer(global_memory[1], 2 * kLargest);
    fill(t, std::strcmp(c.name, "Gather") == 0);
    Compare(t.bits, t.a, t.b, CMPMODE::GT, uint32_t(count));
    return best_ns([&] {
        c.body(t);
        __asm__ volatile("" ::: "memory");
    });
}

// ---- cube

double time_mmad(int m, int k, int n) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
    TPipe pipe;
    TBuf<TPosition::A2> a;
    TBuf<TPosition::B2> b;
    TBuf<TPosition::CO1> c;
    pipe.InitBuffer(a, uint32_t(m * k * 2));
    pipe.InitBuffer(b, uint32_t(k * n * 2));
    pipe.InitBuffer(c, uint32_t(m * n * 4));
    LocalTensor<bfloat16_t> left = a.Get<bfloat16_t>(), right = b.Get<bfloat16_t>();
    for (int i = 0; i < m * k; ++i) left.host_data()[i] = bfloat16_t(float(i % 37) - 18.0f);
    for (int i = 0; i < k * n; ++i) right.host_data()[i] = bfloat16_t(float(i % 41) * 0.125f - 2.0f);
    LocalTensor<float> out = c.Get<float>();
    const MmadParams params{uint16_t(m), uint16_t(n), uint16_t(k), 0, false, true};
    return best_ns([&] { Mmad(out, left, right, params); });
}

// ---- launches

void empty_kernel() { KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY); }

void mixed_kernel() {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
    if (ASCEND_IS_AIC)
        CrossCoreSetFlag<2, PIPE_FIX>(3);
    else
        CrossCoreWaitFlag(3);
}

void copy_kernel() {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    constexpr int32_t kCount = 2048;
    TPipe pipe;
    TQue<TPosition::VECIN, 1> in;
    TQue<TPosition::VECOUT, 1> out;
    TBuf<> first, second;
    pipe.InitBuffer(in, 1, kCount * sizeof(float));
    pipe.InitBuffer(out, 1, kCount * sizeof(float));
    pipe.InitBuffer(first, kCount * sizeof(float));
    pipe.InitBuffer(second, kCount * sizeof(float));
    GlobalTensor<float> from, to;
    from.SetGlobalBuffer(global_memory[0] + GetBlockIdx() * kCount, kCount);
    to.SetGlobalBuffer(global_memory[1] + GetBlockIdx() * kCount, kCount);
    LocalTensor<float> x = in.AllocTensor<float>();
    DataCopy(x, from, kCount);
    in.EnQue(x);
    x = in.DeQue<float>();
    LocalTensor<float> y = out.AllocTensor<float>();
    Adds(y, x, 1.0f, kCount);
    out.EnQue(y);
    in.FreeTensor(x);
    y = out.DeQue<float>();
    DataCopy(to, y, kCount);
    out.FreeTensor(y);
}

}  // namespace

EXPORT int case_count() { return kCaseCount; }
EXPORT const char* case_name(int index) { return kCases[index].name; }
EXPORT double case_bytes(int index) { return kCases[index].bytes; }

// Nanoseconds per call on a tile of count floats.
EXPORT double case_ns(int index, int count) {
    double ns = 0;
    require_success(ascendc_host::launch({"case", 1}, [&] { ns = time_case(kCases[index], count); }));
    return ns;
}

EXPORT double mmad_ns(int m, int k, int n, int order) {
    double ns = 0;
    require_success(ascendc_host::launch({"mmad", 1, 1, order}, [&] { ns = time_mmad(m, k, n); }));
    return ns;
}

// kind: 0 an empty kernel, 1 four buffers and a copy in and out, 2 cores that exchange a flag.
EXPORT double launch_ns(int kind, int blocks, int threads) {
    void (*const kernels[])() = {empty_kernel, copy_kernel, mixed_kernel};
    return best_ns([&] { require_success(ascendc_host::launch({"launch", blocks, threads}, kernels[kind])); });
}
