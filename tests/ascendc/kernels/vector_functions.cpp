// Every modelled vector function. All of them share the code of their forms, so each form is tried with one of them.
// p[0] is the count or the mask, then repeats and strides.
#include "harness.h"

#define BINARY(NAME, SUFFIX, T) VECTOR_CASE(NAME##_##SUFFIX, NAME(o.out<T>(), o.in<T>(0), o.in<T>(1), o.p(0)))
#define BINARY_IN_PLACE(NAME) VECTOR_CASE(NAME##_inplace_f32, NAME(o.out<float>(), o.out<float>(), o.in<float>(1), o.p(0)))
#define BINARY_MASK(NAME, SUFFIX, T) \
    VECTOR_CASE(NAME##_mask_##SUFFIX, NAME(o.out<T>(), o.in<T>(0), o.in<T>(1), uint64_t(o.p(0)), o.p(1), o.binary(2)))
#define BINARY_BITS(NAME, SUFFIX, T)                                                                        \
    VECTOR_CASE(NAME##_bits_##SUFFIX, uint64_t bits[2] = {uint64_t(o.c->p[10]), uint64_t(o.c->p[11])};      \
                NAME(o.out<T>(), o.in<T>(0), o.in<T>(1), bits, o.p(1), o.binary(2)))

#define ARITHMETIC(SUFFIX, T) BINARY(Add, SUFFIX, T) BINARY(Sub, SUFFIX, T) BINARY(Mul, SUFFIX, T) BINARY(Max, SUFFIX, T) BINARY(Min, SUFFIX, T)
ARITHMETIC(f32, float)
ARITHMETIC(f16, half)
ARITHMETIC(i32, int32_t)
BINARY(Div, f32, float)
BINARY(Div, f16, half)
BINARY_IN_PLACE(Add)
BINARY_IN_PLACE(Sub)
BINARY_IN_PLACE(Mul)
BINARY_IN_PLACE(Div)
BINARY_IN_PLACE(Max)
BINARY_IN_PLACE(Min)
BINARY_MASK(Add, f32, float)
VECTOR_CASE(Add_mask_inplace_f32, Add(o.out<float>(), o.out<float>(), o.in<float>(0), uint64_t(o.p(0)), o.p(1), o.binary(2)))
BINARY_MASK(Add, f16, half)
BINARY_BITS(Add, f32, float)
BINARY_BITS(Mul, f16, half)

#define SCALAR(NAME, SUFFIX, T)                                                                                             \
    VECTOR_CASE(NAME##_##SUFFIX, NAME(o.out<T>(), o.in<T>(0), o.scalar<T>(), o.p(0)))                                       \
    VECTOR_CASE(NAME##_mask_##SUFFIX, NAME(o.out<T>(), o.in<T>(0), o.scalar<T>(), uint64_t(o.p(0)), o.p(1), o.unary(2)))
SCALAR(Adds, f32, float)
SCALAR(Muls, f32, float)
SCALAR(Maxs, f32, float)
SCALAR(Muls, f16, half)

#define UNARY(NAME)                                                                                                   \
    VECTOR_CASE(NAME##_f32, NAME(o.out<float>(), o.in<float>(0), o.p(0)))                                             \
    VECTOR_CASE(NAME##_mask_f32, NAME(o.out<float>(), o.in<float>(0), uint64_t(o.p(0)), o.p(1), o.unary(2)))
UNARY(Exp)
UNARY(Ln)
UNARY(Sqrt)

#define CAST(SUFFIX, TO, FROM) \
    VECTOR_CASE(Cast_##SUFFIX, Cast(o.out<TO>(), o.in<FROM>(0), RoundMode(o.p(1)), uint32_t(o.p(0))))
CAST(f32_f16, float, half)
CAST(f32_bf16, float, bfloat16_t)
CAST(f16_f32, half, float)
CAST(bf16_f32, bfloat16_t, float)
CAST(i32_f32, int32_t, float)
CAST(f32_i32, float, int32_t)
CAST(f32_f32, float, float)
CAST(f16_u8, half, uint8_t)
CAST(u8_f16, uint8_t, half)
VECTOR_CASE(Cast_mask_f32_f16, Cast(o.out<float>(), o.in<half>(0), RoundMode::CAST_NONE, uint64_t(o.p(0)), o.p(1), o.unary(2)))

VECTOR_CASE(Duplicate_f32, Duplicate(o.out<float>(), o.scalar<float>(), o.p(0)))
VECTOR_CASE(Duplicate_bf16, Duplicate(o.out<bfloat16_t>(), o.scalar<bfloat16_t>(), o.p(0)))
VECTOR_CASE(Duplicate_mask_f32, Duplicate(o.out<float>(), o.scalar<float>(), uint64_t(o.p(0)), o.p(1), uint16_t(o.p(2)), uint8_t(o.p(3))))
VECTOR_CASE(Brcb_f32, Brcb(o.out<float>(), o.in<float>(0), o.p(0), BrcbRepeatParams(uint16_t(o.p(1)), uint16_t(o.p(2)))))
VECTOR_CASE(Brcb_f16, Brcb(o.out<half>(), o.in<half>(0), o.p(0), BrcbRepeatParams(uint16_t(o.p(1)), uint16_t(o.p(2)))))
VECTOR_CASE(Gather_f32, Gather(o.out<float>(), o.in<float>(0), o.in<uint32_t>(1), uint32_t(o.p(1)), uint32_t(o.p(0))))
VECTOR_CASE(Gather_f16, Gather(o.out<half>(), o.in<half>(0), o.in<uint32_t>(1), uint32_t(o.p(1)), uint32_t(o.p(0))))
VECTOR_CASE(Compare_f32, Compare(o.out<uint8_t>(), o.in<float>(0), o.in<float>(1), CMPMODE(o.p(1)), uint32_t(o.p(0))))
VECTOR_CASE(Compare_f16, Compare(o.out<uint8_t>(), o.in<half>(0), o.in<half>(1), CMPMODE(o.p(1)), uint32_t(o.p(0))))
VECTOR_CASE(Compares_f32, Compares(o.out<uint8_t>(), o.in<float>(0), o.scalar<float>(), CMPMODE(o.p(1)), uint32_t(o.p(0))))
VECTOR_CASE(Select_f32,
            Select(o.out<float>(), o.in<uint8_t>(2), o.in<float>(0), o.in<float>(1), SELMODE::VSEL_TENSOR_TENSOR_MODE, uint32_t(o.p(0))))
VECTOR_CASE(Select_f16,
            Select(o.out<half>(), o.in<uint8_t>(2), o.in<half>(0), o.in<half>(1), SELMODE::VSEL_TENSOR_TENSOR_MODE, uint32_t(o.p(0))))
VECTOR_CASE(Select_scalar_f32,
            Select(o.out<float>(), o.in<uint8_t>(2), o.in<float>(0), o.scalar<float>(), SELMODE::VSEL_TENSOR_SCALAR_MODE, uint32_t(o.p(0))))

VECTOR_CASE(ReduceSum_f32, ReduceSum(o.out<float>(), o.in<float>(0), o.in<float>(1), o.p(0)))
VECTOR_CASE(ReduceMax_f32, ReduceMax(o.out<float>(), o.in<float>(0), o.in<float>(1), o.p(0), o.p(1) != 0))
VECTOR_CASE(ReduceMax_f16, ReduceMax(o.out<half>(), o.in<half>(0), o.in<half>(1), o.p(0), o.p(1) != 0))
VECTOR_CASE(WholeReduceSum_f32, WholeReduceSum(o.out<float>(), o.in<float>(0), o.p(0), o.p(1), o.p(2), o.p(3), o.p(4)))
VECTOR_CASE(WholeReduceSum_inplace_f32, WholeReduceSum(o.out<float>(), o.out<float>(), o.p(0), o.p(1), o.p(2), o.p(3), o.p(4)))
VECTOR_CASE(WholeReduceSum_ahead_f32, WholeReduceSum(o.out<float>()[128], o.out<float>(), o.p(0), o.p(1), o.p(2), o.p(3), o.p(4)))
VECTOR_CASE(BlockReduceSum_f32, BlockReduceSum(o.out<float>(), o.in<float>(0), o.p(1), o.p(0), o.p(2), o.p(3), o.p(4)))
VECTOR_CASE(PairReduceSum_f32, PairReduceSum(o.out<float>(), o.in<float>(0), o.p(1), o.p(0), o.p(2), o.p(3), o.p(4)))
VECTOR_CASE(BlockReduceMax_f32, BlockReduceMax(o.out<float>(), o.in<float>(0), o.p(1), o.p(0), o.p(2), o.p(3), o.p(4)))
VECTOR_CASE(WholeReduceMax_f32, WholeReduceMax(o.out<float>(), o.in<float>(0), o.p(0), o.p(1), o.p(2), o.p(3), o.p(4), ReduceOrder(o.p(5))))
VECTOR_CASE(WholeReduceMax_f16, WholeReduceMax(o.out<half>(), o.in<half>(0), o.p(0), o.p(1), o.p(2), o.p(3), o.p(4), ReduceOrder(o.p(5))))

VECTOR_CASE(ReduceRepeat_sum_f32, ReduceRepeat<ReduceType::SUM>(o.out<float>(), o.in<float>(0), o.p(0), o.p(1), o.p(2), o.p(3), o.p(4)))
VECTOR_CASE(ReduceRepeat_max_f32,
            ReduceRepeat<ReduceType::MAX>(o.out<float>(), o.in<float>(0), o.p(0), o.p(1), o.p(2), o.p(3), o.p(4), ReduceOrder(o.p(5))))

// The mask that is set apart from the instruction.
VECTOR_CASE(Add_counter_f32, SetMaskCount(); SetVectorMask<float, MaskMode::COUNTER>(o.p(0));
            Add<float, false>(o.out<float>(), o.in<float>(0), o.in<float>(1), uint64_t(0), 1, o.binary(2)); SetMaskNorm(); ResetMask())
VECTOR_CASE(Add_normal_f32, SetMaskNorm(); SetVectorMask<float>(uint64_t(0), uint64_t(o.c->p[10]));
            Add<float, false>(o.out<float>(), o.in<float>(0), o.in<float>(1), uint64_t(0), o.p(1), o.binary(2)); ResetMask())
VECTOR_CASE(GetSet_f32, LocalTensor<float> out = o.out<float>(); out.SetValue(1, o.in<float>(0).GetValue(3) + 1.0f))
