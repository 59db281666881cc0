"""Megatron on a CPU with gloo: what Megatron takes for granted about CUDA, answered for a host.

Two parts. The functions and classes here stand in for names of `torch.cuda` and Megatron (rows CPU_ROWS of the patch
table bind them). `HostFactories` answers what no name can be rebound for: literal `device="cuda"` in factory calls,
`.cuda()`, and `Tensor.type()`, whose answer Megatron's optimizer compares with the names of CUDA tensor types.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.overrides import TorchFunctionMode

# Megatron flags without which a CPU run cannot start: no fused CUDA kernels, no CUDA random-number states.
MEGATRON_FLAGS = (
    "--distributed-backend", "gloo",
    "--use-cpu-initialization",
    "--inference-rng-tracker",  # holds no states, so checkpoints can neither save nor restore any
    "--no-save-rng", "--no-load-rng",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
    "--no-persist-layer-norm",
    "--transformer-impl", "local",
)  # fmt: skip
ENVIRONMENT = {
    # Megatron asserts this for TP > 1 on every device older than Blackwell; it orders CUDA queues and means nothing here.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # vLLM sets it to 1 in the process that starts both engines; torch would then call a GPU available because one is counted.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "0",
}


class HostFactories(TorchFunctionMode):
    """While active, tensors asked for on "cuda" are made on the host, and host tensors carry the type names of CUDA.

    Pickling, printing and arithmetic are not touched: only `device` arguments, `Tensor.cuda` and `Tensor.type()`.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    return isinstance(device, str) and device.startswith("cuda") or isinstance(device, torch.device) and device.type == "cuda"


def enter() -> None:
    """Puts HostFactories in force in this thread for the rest of the process."""
    HostFactories().__enter__()


def current_device() -> torch.device:
    return torch.device("cpu")


def device_count() -> int:
    """One: Megatron builds its parallel groups only where it sees a device."""
    return 1


def set_device(device: object) -> None:
    """There is one host."""


def synchronize(device: object = None) -> None:
    """Host code is synchronous."""


def manual_seed(seed: int) -> None:
    """torch.manual_seed has seeded the host already."""


def get_rng_state(device: object = "cuda") -> torch.Tensor:
    """uint8 [0]: there is no second generator, and dropout is refused."""
    return torch.empty(0, dtype=torch.uint8)


def set_rng_state(new_state: torch.Tensor, device: object = "cuda") -> None:
    """Accepts what get_rng_state gave."""


class Stream:
    """A queue that is always empty. All streams are one: comparing two gives True."""

    def __init__(self, device: object = None, priority: int = 0, **kwargs: object) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0


class Event:
    """An event that has already happened."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **kwargs: object) -> None:
        pass

    def record(self, stream: Stream | None = None) -> None:
        pass

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    yield


def current_stream(device: object = None) -> Stream:
    return Stream()


def get_device_arch_version() -> int:
    """Older than every architecture that Megatron gives special rules to."""
    return 0


def compile_helpers() -> None:
    """The wheel ships the compiled dataset helpers but no Makefile, and without one Megatron ends rank 0."""


def maybe_move_tensor_to_cpu(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Megatron moves only CUDA tensors, so on a host its split sizes would stay tensors where numbers are needed."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
