"""The hardware as the experiments see it: tensors of the CPU in, tensors of the CPU out.

Legend: M rows, N columns, K contraction, X elements, B blocks.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util

import torch

from ascendc_kernels import build, library
from megatron_ext.probe.report import ProbeError
from megatron_ext.reduction_order import FRACTAL, MMAD_ORDERS

DEVICES = ("npu", "model")
BLOCKS = 64  # copies of one computation, more than there are cores of a kind
PACKAGES = ("torch", "torch_npu", "megatron_ext")


class Device:
    """name: "npu", or "model" for the host model, which adds in the order that `mmad_order` names.

    Raises ProbeError where there is no NPU, or no kernels for it.
    """

    def __init__(self, name: str, mmad_order: str = MMAD_ORDERS[0]) -> None:
        if name not in DEVICES:
            raise ProbeError(f"no device {name!r}, expected one of {DEVICES}")
        self.place = _first_npu() if name == "npu" else torch.device("cpu")
        self.order = MMAD_ORDERS.index(mmad_order)
        self.description = torch.npu.get_device_name(self.place) if name == "npu" else f"host model, mmad_order={mmad_order}"
        library.load()
        self.ops = torch.ops.megatron_ext

    def software(self) -> dict[str, str]:
        """Versions of what is installed."""
        versions = {}
        for name in PACKAGES:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
        return versions

    def mmad(
        self, a_MK: torch.Tensor, b_NK: torch.Tensor, m: int | None = None, k: int | None = None, call_k: int | None = None, blocks: int = 1
    ) -> torch.Tensor:
        """fp32 [m, N], or [B, m, N] for several blocks: the first k columns, in calls of call_k; by default one call for all rows and columns."""
        m, k = m or a_MK.shape[0], k or a_MK.shape[1]
        call_k = call_k or a_MK.shape[1]
        c = self.ops.probe_mmad(a_MK.to(self.place), b_NK.to(self.place), m, k, call_k, blocks, self.order).cpu()
        return c if blocks > 1 else c[0]

    def vector(
        self, operation: str, x_X: torch.Tensor, y_X: torch.Tensor | None = None, count: int | None = None, blocks: int = 1
    ) -> torch.Tensor:
        """fp32 [results], or [B, results] for several blocks: one instruction on the first `count` elements."""
        y_X = x_X if y_X is None else y_X
        out = self.ops.probe_vector(operation, x_X.to(self.place), y_X.to(self.place), count or x_X.shape[0], blocks).cpu()
        return out if blocks > 1 else out[0]

    def flags(self, x: torch.Tensor, blocks: int) -> torch.Tensor:
        """x + 1, through local memory, ordered by flags between pipes. fp32 [rows, 8192]."""
        return self.ops.probe_flags(x.to(self.place), blocks).cpu()

    def sync(self, x: torch.Tensor, rounds: int) -> torch.Tensor:
        """[rounds, cores, 8192]: round r of core c is round r - 1 of core c + 1, plus 1. x: fp32 [cores, 8192], round -1 of each core itself."""
        return self.ops.probe_sync(x.to(self.place), rounds).cpu()

    def linear(self, x_MK: torch.Tensor, w_NK: torch.Tensor, segments: int) -> torch.Tensor:
        """fp32 [M, N] of the committed linear kernel, whose cube and vector cores wait for each other."""
        return self.ops.linear_fp32(x_MK.to(self.place), w_NK.to(self.place), segments, self.order).cpu()


def use_model(flavour: str = "fast") -> None:
    """Operators of this process run the Ascend C kernels on the host model from now on."""
    library.load()
    library.use(library.runnable_variants()[0], flavour, path="model")


def _first_npu() -> torch.device:
    if importlib.util.find_spec("torch_npu") is None:
        raise ProbeError("torch_npu is not installed, so there is no NPU to ask; on any machine, --device model asks the host model")
    import torch_npu  # noqa: F401  registers torch.npu

    if not torch.npu.is_available():
        raise ProbeError("torch_npu finds no NPU: is the driver loaded, and is ASCEND_RT_VISIBLE_DEVICES right?")
    if not build.device_library().exists():
        raise ProbeError(f"no device kernels at {build.device_library()}: build them with ascendc_kernels/build.sh --soc SOC")
    return torch.device("npu:0")


def pad_rows(x_MK: torch.Tensor) -> torch.Tensor:
    """Whole fractals of rows, by repeating the first one: as the kernels do it."""
    missing = -x_MK.shape[0] % FRACTAL
    return torch.cat([x_MK, x_MK[:1].expand(missing, -1)]).contiguous()
