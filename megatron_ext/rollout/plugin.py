"""Entry point of vLLM's plug-in group `vllm.general_plugins`: runs in every process vLLM starts, before a model is built."""

from __future__ import annotations

import multiprocessing

TARGET = "vllm.plugins:load_general_plugins"
_WORKER_NAME = "VllmWorker"  # vLLM names its worker processes VllmWorker-<rank>
_CORE_NAME = "EngineCore"


def register() -> None:
    """Enables the rollout side under the contract in MEGATRON_EXT_CONTRACT; without that variable vLLM stays as it is."""
    from megatron_ext.contract import Contract

    contract = Contract.from_environment()
    if contract is None:
        return
    import megatron_ext
    from megatron_ext.patches import hit
    from megatron_ext.rollout.wiring import register_adapters

    role = process_role()
    megatron_ext.enable("rollout", contract, {"device": "cpu", "role": role})
    hit(TARGET)
    if contract.consistency:
        register_adapters(role)


def process_role() -> str:
    """"worker" (holds a model), "core" (schedules) or "frontend" (takes requests; may schedule too)."""
    name = multiprocessing.current_process().name
    return "worker" if name.startswith(_WORKER_NAME) else "core" if name.startswith(_CORE_NAME) else "frontend"
