"""Assumptions about flags. The data are whole numbers, so that the order of addition cannot show; only a missed wait can."""

from __future__ import annotations

import torch

from megatron_ext.probe.device import Device
from megatron_ext.probe.question import Answer, Question, all_hold, compare

ROW = 8192  # elements, as in probe_tiling.h
ROUNDS = 3
CORES, TURNS = 8, 20  # SyncAll never returns with more blocks than there are cores; every device has 8


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def between_pipes(device: Device) -> Answer:
    """Rows chase each other through two slots, on one core and on several."""
    x = whole_numbers(64, ROW, seed=1)
    return all_hold([compare(device.flags(x, blocks), x + 1.0, f"{blocks} blocks") for blocks in (1, 8) for _ in range(ROUNDS)])


def between_cores(device: Device) -> Answer:
    """Tiles of the linear kernel go from the cube core to its vector cores through two slots, many tiles per block."""
    x, w = whole_numbers(1024, 128, seed=2), whole_numbers(1024, 128, seed=3)
    expected = (x.double() @ w.double().T).float()
    return all_hold([compare(device.linear(x.bfloat16(), w.bfloat16(), segments=8), expected, "linear") for _ in range(ROUNDS)])


def all_cores(device: Device) -> Answer:
    """Rows go around the cores, each of which reads what another one has just written."""
    x = whole_numbers(CORES, ROW, seed=4)
    expected = torch.stack([x.roll(-r, 0) + r + 1.0 for r in range(TURNS)])
    return all_hold([compare(device.sync(x, TURNS), expected, f"{CORES} cores") for _ in range(ROUNDS)])


QUESTIONS = (
    Question("flags", "SetFlag and WaitFlag order two pipes, event by event", "promise", between_pipes),
    Question("cross_core_flags", "CrossCoreSetFlag and CrossCoreWaitFlag order the cores of a block", "promise", between_cores),
    Question("sync_all", "SyncAll orders what all vector cores write and read", "promise", all_cores),
)
