"""Every limit of the modelled core is caught, with the place, the condition and the values; what is not modelled does not compile."""

import re
import subprocess

import pytest
import torch
from host_library import KernelError, library

from ascendc_kernels.host_model import build

CAPACITY = {
    "ub_overflow": r"InitBuffer at limits.cpp:\d+: 1 x 94240 bytes do not fit: 102400 of the 196608 bytes of UB are taken",
    "l1_overflow": r"1 x 32 bytes do not fit: 524288 of the 524288 bytes of L1 are taken",
    "l0a_overflow": r"2 x 33280 bytes do not fit: 0 of the 65536 bytes of L0A are taken",
    "l0b_overflow": r"1 x 65568 bytes do not fit: 0 of the 65536 bytes of L0B",
    "l0c_overflow": r"1 x 131136 bytes do not fit: 0 of the 131072 bytes of L0C",
    "too_many_buffers": r"65 buffers exceed the 64 of a TPipe",
    "cast_none_to_bf16": r"Cast at limits.cpp:\d+: this pair of types does not take RoundMode 0",
    "gemv": r"Mmad at limits.cpp:\d+: m == 1 is GEMV mode on a device",
    "fixpipe_wrong_quant": r"quantPre=0 does not fit the type of dst",
    "no_free_buffer": r"AllocTensor at limits.cpp:\d+: none of the 1 buffers of the queue is free: FreeTensor or InitBuffer is missing",
    "empty_queue": r"DeQue at limits.cpp:\d+: the queue is empty: EnQue is missing",
    "queue_too_deep": r"EnQue at limits.cpp:\d+: the queue holds 1 tensors, its depth: DeQue is missing",
    "foreign_tensor": r"the tensor belongs to another queue",
    "get_beyond_buffer": r"TBuf::GetWithOffset at limits.cpp:\d+: bytes \[32, 288\) are outside a buffer of 256 bytes",
    "sync_in_plain_vector_kernel": r"no cross-core scheduler for KERNEL_TYPE_AIV_ONLY",
    "hanging_sync_all": r"deadlock:\n  block 0, vector core 0 waits for SyncAll at limits.cpp:\d+",
    "hanging_flag": r"deadlock:\n  block 0, cube core waits for CrossCoreWaitFlag\(3\) at limits.cpp:\d+",
    "half_set_flag": r"deadlock:\n  block 0, cube core waits for CrossCoreWaitFlag\(5\)",
    "flag_16": r"flag 16 is not below 16",
    "flag_counter": r"flag 4 of block 0, vector core 0 was set more than 15 times without a wait",
    "vector_only_sync_on_cube": r"isAIVOnly=true on a cube core",
    "mixed_sync_in_vector_kernel": r"isAIVOnly=false needs KERNEL_TYPE_MIX_AIC_1_2",
    "no_kernel_type": r"KERNEL_TASK_TYPE_DEFAULT is missing",
}
CHECKED_ONLY = {
    "out_of_buffer": r"out_of_buffer, block 0, vector core 0: Adds at limits.cpp:\d+: src covers bytes \[0, 260\), outside UB buffer 0 of VECCALC "
    r"\(InitBuffer at limits.cpp:\d+, 256 bytes\)",
    "out_of_buffer_by_stride": r"Adds at .*: src covers bytes \[288, 544\), outside UB buffer 0 of VECCALC",
    "out_of_global_memory": r"DataCopy at .*: dst covers bytes \[4000, 4256\) of a global buffer of 4096 bytes",
    "never_allocated": r"Adds at limits.cpp:\d+: src was never allocated",
    "misaligned_operand": r"Adds at .*: src starts 4 bytes past a multiple of 32 bytes",
    "partial_block_copy": r"DataCopy at .*: a count of whole 32-byte blocks is required, found 12",
    "misaligned_copy": r"DataCopy at .*: src starts 16 bytes past a multiple of 32 bytes",
    "repeat_256": r"Adds at .*: 1 <= repeatTime <= 255 is required, found 256",
    "reduce_repeat_256": r"WholeReduceSum at .*: 1 <= repeatTime <= 255 is required, found 256",
    "mask_65": r"1 <= mask <= 64 is required, found 65",
    "mask_bits_too_high": r"mask\[1\] == 0 for 32-bit elements is required, found 1",
    "cut_tree": r"a mask that does not cut a sum tree .* is required, found 1",
    "odd_compare": r"a count of whole repeats of 256 bytes is required, found 63",
    "in_place_after_a_read": r"hazard: pipe V writes dst, bytes \[0, 256\) of UB buffer 0 .*, which Adds \(pipe V\) read at limits.cpp:\d+; PipeBarrier<PIPE_V> is missing",
    "event_id_8": r"SetFlag at .*: event ID between 0 and 7 is required, found 8",
    "mmad_from_l1": r"Mmad at .*: the left matrix may not lie in L1 buffer 0 of A1",
    "mmad_beyond_l0c": r"Mmad at .*: dst covers bytes \[0, 2048\), outside L0C buffer 0 of CO1",
    "vector_on_cube": r"block 0, cube core: Duplicate at .*: a cube core has no pipe V: guard it with ASCEND_IS_AIV",
    "cube_on_vector": r"LoadData at .*: a vector core has no pipe MTE1: guard it with ASCEND_IS_AIC",
    "used_after_free": r"Duplicate at .*: dst is used after FreeTensor or before AllocTensor: UB buffer 0 of VECOUT",
    "left_in_queue": r"end of kernel at limits.cpp:\d+: UB buffer 0 of VECOUT .* is still queued: DeQue is missing",
    "left_flag": r"SetFlag at .*: event ID 3 of HardEvent V_MTE3 is still set at the end of the kernel: WaitFlag is missing",
    "flag_never_waited_for": r"vector core 0: flag 4 was set 1 times more than waited for, last at limits.cpp:\d+: CrossCoreWaitFlag is missing",
}


def run(name: str, flavour: str, blocks: int = 2, threads: int = 1) -> torch.Tensor:
    out = torch.zeros(1024)
    library("limits.cpp", flavour).run(name, out, blocks, threads)
    return out


@pytest.mark.parametrize("name", CAPACITY)
@pytest.mark.parametrize("flavour", ["fast", "checked"])
def test_caught_in_both_flavours(name, flavour):
    with pytest.raises(KernelError, match=CAPACITY[name]) as error:
        run(name, flavour)
    assert str(error.value).startswith(name)


@pytest.mark.parametrize("name", CHECKED_ONLY)
def test_caught_in_the_checked_flavour(name):
    with pytest.raises(KernelError, match=CHECKED_ONLY[name]) as error:
        run(name, "checked", blocks=1)
    assert str(error.value).startswith(name)


def test_a_full_memory_is_fine():
    run("ub_exactly_full", "fast")
    run("ub_exactly_full", "checked")


def test_fresh_buffers_hold_nan():
    assert run("fresh_buffer", "checked", blocks=1).isnan().all()


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("name", ["hanging_sync_all", "hanging_flag", "gemv"])
def test_errors_end_a_launch_with_any_number_of_threads(name, threads):
    for _ in range(20):
        with pytest.raises(KernelError, match="deadlock|GEMV"):
            run(name, "fast", blocks=7, threads=threads)
    run("ub_exactly_full", "fast", blocks=7, threads=threads)


def test_launch_arguments():
    with pytest.raises(KernelError, match="blocks=0 and threads=1 must be at least 1"):
        run("ub_exactly_full", "fast", blocks=0)


# ---- what is not modelled

TENSORS = "LocalTensor<float> f; LocalTensor<half> h; LocalTensor<bfloat16_t> b; LocalTensor<int32_t> i; GlobalTensor<float> g;"
MODELLED = "Add(f, f, f, 64); Muls(h, h, half(2.0f), 64); Cast(b, f, RoundMode::CAST_RINT, 64); Fixpipe(g, f, FixpipeParamsV220());"
UNMODELLED = {
    "Add(b, b, b, 64);": "Add: this data type is not modelled",
    "Div(i, i, i, 64);": "Div: this data type is not modelled",
    "Exp(h, h, 64);": "Exp: this data type is not modelled",
    "ReduceSum(h, h, h, 64);": "ReduceSum: this data type is not modelled",
    "Cast(b, h, RoundMode::CAST_RINT, 64);": "Cast: this pair of data types is not modelled",
    "LocalTensor<int8_t> s; Duplicate(s, int8_t(0), 64);": "Duplicate: this data type is not modelled",
    "Mmad(f, f, f, MmadParams());": "Mmad: these data types are not modelled",
    "Mmad(f, h, b, MmadParams());": "Mmad: these data types are not modelled",
    "LoadData(f, f, LoadData2DParams());": "LoadData: this data type is not modelled",
    "Fixpipe<float, float, CFG_NZ>(g, f, FixpipeParamsV220());": "Fixpipe: only CFG_ROW_MAJOR is modelled",
    "TQue<TPosition::VECCALC, 1> q; q.AllocTensor<float>();": "TQue: this position is not modelled",
    "PipeBarrier<PIPE_S>();": "PipeBarrier: the hardware orders the scalar pipe itself",
    "CrossCoreSetFlag<4, PIPE_V>(0);": "CrossCoreSetFlag: mode 0, 1 or 2",
    "SetAtomicAdd<float>();": "'SetAtomicAdd' was not declared",
    "Rsqrt(f, f, 64);": "'Rsqrt' was not declared",
    "Axpy(f, f, 2.0f, 64);": "'Axpy' was not declared",
    "DataCopy(f, f, 64);": "no matching function for call to 'DataCopy",
    "LoadData(h, h, LoadData3DParamsV2<half>());": "'LoadData3DParamsV2' was not declared",
    "ReduceSum(f, f, f, 64, 2, 8);": "no matching function for call to 'ReduceSum",
}


def compiler_errors(snippets: list[str]) -> list[str]:
    """What the compiler says about each snippet: one translation unit, one function and one #line name for each."""
    functions = [f'#line 1 "snippet{i}"\nvoid kernel{i}() {{ {TENSORS} {snippet} }}' for i, snippet in enumerate(snippets)]
    program = "\n".join(['#include "kernel_operator.h"', "using namespace AscendC;", *functions, ""])
    command = [build.compiler(), "-fsyntax-only", "-w", *build.COMMON_FLAGS, *build.KERNEL_FLAGS, "-x", "c++", "-"]
    text = subprocess.run(command, input=program, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"}).stderr
    said, current = [""] * len(snippets), 0
    for line in text.splitlines():  # a failing static_assert is reported in a header, after the line that names the snippet
        if named := re.search(r"snippet(\d+):", line):
            current = int(named[1])
        if "error:" in line:
            said[current] += line + "\n"
    return said


def test_unmodelled_overloads_do_not_compile():
    modelled, *unmodelled = compiler_errors([MODELLED, *UNMODELLED])
    assert not modelled
    for (snippet, message), errors in zip(UNMODELLED.items(), unmodelled, strict=True):
        assert message in errors, f"{snippet} -> {errors or 'compiles'}"
