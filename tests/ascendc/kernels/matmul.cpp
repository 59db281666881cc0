// C = A x B on the cube core, in tiles of k, with each way of loading: A as rows of k or of m, B as rows of k (a weight) or of n.
#include "kernel_operator.h"
#include "runtime.h"

using namespace AscendC;

struct MatmulTiling {
    int32_t m, n, k, k_tile;
    int32_t a_rows_of_m, b_rows_of_n;
};

constexpr int32_t kTileM = 32;

template <typename T, typename Out>
class Matmul {
 public:
    __aicore__ void Init(GM_ADDR a, GM_ADDR b, GM_ADDR c, const MatmulTiling& tiling, TPipe* pipe) {
        tiling_ = tiling;
        first_m_ = int32_t(GetBlockIdx()) * kTileM;
        m_ = tiling.m - first_m_ < kTileM ? tiling.m - first_m_ : kTileM;
        a_.SetGlobalBuffer((__gm__ T*)a, uint64_t(tiling.m) * tiling.k);
        b_.SetGlobalBuffer((__gm__ T*)b, uint64_t(tiling.k) * tiling.n);
        c_.SetGlobalBuffer((__gm__ Out*)c, uint64_t(tiling.m) * tiling.n);
        const uint32_t a_bytes = kTileM * Round(tiling.k_tile) * sizeof(T), b_bytes = Round(tiling.n) * Round(tiling.k_tile) * sizeof(T);
        pipe->InitBuffer(a1_, 2, a_bytes);
        pipe->InitBuffer(b1_, 2, b_bytes);
        pipe->InitBuffer(a2_, 1, a_bytes);
        pipe->InitBuffer(b2_, 1, b_bytes);
        pipe->InitBuffer(co1_, 1, kTileM * Round(tiling.n) * sizeof(float));
    }

    __aicore__ void Process() {
        LocalTensor<float> c = co1_.AllocTensor<float>();
        for (int32_t k = 0; k < tiling_.k; k += tiling_.k_tile) {
            const int32_t length = tiling_.k - k < tiling_.k_tile ? tiling_.k - k : tiling_.k_tile;
            CopyIn(k, length);
            Split(length);
            Compute(c, length, k == 0);
        }
        co1_.EnQue(c);
        CopyOut();
    }

 private:
    MatmulTiling tiling_;
    int32_t first_m_, m_;
    GlobalTensor<T> a_, b_;
    GlobalTensor<Out> c_;
    TQue<TPosition::A1, 2> a1_;
    TQue<TPosition::B1, 2> b1_;
    TQue<TPosition::A2, 1> a2_;
    TQue<TPosition::B2, 1> b2_;
    TQue<TPosition::CO1, 1> co1_;

    static __aicore__ int32_t Round(int32_t size) { return (size + 15) / 16 * 16; }

    // rows x columns of a matrix whose rows are `width` apart
    __aicore__ void LoadMatrix(const LocalTensor<T>& dst, const GlobalTensor<T>& src, int32_t rows, int32_t columns, int32_t width) {
        DataCopy(dst, src, Nd2NzParams(1, uint16_t(rows), uint16_t(columns), 0, uint16_t(width), uint16_t(Round(rows)), 1, 0));
    }

    __aicore__ void CopyIn(int32_t k, int32_t length) {
        LocalTensor<T> a = a1_.AllocTensor<T>();
        if (tiling_.a_rows_of_m)
            LoadMatrix(a, a_[uint64_t(k) * tiling_.m + first_m_], length, m_, tiling_.m);
        else
            LoadMatrix(a, a_[uint64_t(first_m_) * tiling_.k + k], m_, length, tiling_.k);
        a1_.EnQue(a);
        LocalTensor<T> b = b1_.AllocTensor<T>();
        if (tiling_.b_rows_of_n)
            LoadMatrix(b, b_[uint64_t(k) * tiling_.n], length, tiling_.n, tiling_.n);
        else
            LoadMatrix(b, b_[k], tiling_.n, length, tiling_.k);
        b1_.EnQue(b);
    }

    __aicore__ void Split(int32_t length) {
        const uint16_t m1 = Round(m_) / 16, n1 = Round(tiling_.n) / 16, k1 = Round(length) / 16;
        LocalTensor<T> a1 = a1_.DeQue<T>();
        LocalTensor<T> a2 = a2_.AllocTensor<T>();
        if (tiling_.a_rows_of_m)
            LoadData(a2, a1, LoadData2DParams(0, uint8_t(m1 * k1), 1, 0, 0, true, 0));
        else
            for (uint16_t i = 0; i < m1; ++i) LoadData(a2[i * k1 * 256], a1, LoadData2DParams(i, uint8_t(k1), m1, 0, 0, false, 0));
        a2_.EnQue(a2);
        a1_.FreeTensor(a1);
        LocalTensor<T> b1 = b1_.DeQue<T>();
        LocalTensor<T> b2 = b2_.AllocTensor<T>();
        if (tiling_.b_rows_of_n)
            for (uint16_t i = 0; i < k1; ++i)
                LoadDataWithTranspose(b2[i * n1 * 256], b1, LoadData2dTransposeParams(i, uint8_t(n1), k1, 0, 0));
        else
            LoadData(b2, b1, LoadData2DParams(0, uint8_t(n1 * k1), 1, 0, 0, false, 0));
        b2_.EnQue(b2);
        b1_.FreeTensor(b1);
    }

    __aicore__ void Compute(const LocalTensor<float>& c, int32_t length, bool first) {
        LocalTensor<T> a2 = a2_.DeQue<T>();
        LocalTensor<T> b2 = b2_.DeQue<T>();
        Mmad(c, a2, b2, MmadParams(uint16_t(m_), uint16_t(tiling_.n), uint16_t(length), 0, false, first));
        PipeBarrier<PIPE_M>();
        a2_.FreeTensor(a2);
        b2_.FreeTensor(b2);
    }

    __aicore__ void CopyOut() {
        LocalTensor<float> c = co1_.DeQue<float>();
        FixpipeParamsV220 params(uint16_t(Round(tiling_.n)), uint16_t(m_), uint16_t(Round(m_)), uint32_t(tiling_.n), false);
        params.quantPre = sizeof(Out) == 4 ? NoQuant : std::is_same_v<Out, half> ? F322F16 : F322BF16;
        Fixpipe<Out, float, CFG_ROW_MAJOR>(c_[uint64_t(first_m_) * tiling_.n], c, params);
        co1_.FreeTensor(c);
    }
};

template <typename T, typename Out>
__global__ __aicore__ void matmul(GM_ADDR a, GM_ADDR b, GM_ADDR c, GM_ADDR tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
    REGISTER_TILING_DEFAULT(MatmulTiling);
    GET_TILING_DATA_WITH_STRUCT(MatmulTiling, tiling_data, tiling);
    if (GetBlockIdx() * kTileM >= tiling_data.m) return;
    TPipe pipe;
    Matmul<T, Out> op;
    op.Init(a, b, c, tiling_data, &pipe);
    op.Process();
}

#define RUN(NAME, T, OUT)                                                                                                        \
    extern "C" __attribute__((visibility("default"))) const char* NAME(GM_ADDR a, GM_ADDR b, GM_ADDR c, MatmulTiling* tiling,    \
                                                                       int64_t threads, int64_t order) {                         \
        const int64_t blocks = (tiling->m + kTileM - 1) / kTileM;                                                                \
        return ascendc_host::launch({#NAME, blocks, int(threads), int(order)},                                                   \
                                    [=] { matmul<T, OUT>(a, b, c, (GM_ADDR)tiling); });                                          \
    }
RUN(matmul_bf16_f32, bfloat16_t, float)
RUN(matmul_f16_f32, half, float)
RUN(matmul_bf16_bf16, bfloat16_t, bfloat16_t)
RUN(matmul_f16_f16, half, half)
