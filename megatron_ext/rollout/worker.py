"""What RolloutEngine asks of every worker process, through vLLM's `collective_rpc`."""

from __future__ import annotations

import os

from megatron_ext.contract import Contract
from megatron_ext.patches import report, verify
from megatron_ext.rollout.settings import RolloutError


class WorkerExtension:
    """Mixed into vLLM's worker class (`worker_extension_cls`); the names must not be any of the worker's own."""

    def ordered_info(self) -> dict[str, object]:
        """Process id, rank, and the digest of the contract this process holds; "" if the plug-in did not run here."""
        return {"pid": os.getpid(), "rank": self.rank, "contract_digest": report().contract_digest}

    def ordered_report(self) -> dict[str, object]:
        """Patch rows and hits of this process; `must_hit` as the loaded model decides it."""
        from megatron_ext.rollout.wiring import demanded_rows

        verify()
        found = report()
        present = getattr(self.model_runner, "megatron_ext_targets", set())
        return {
            "process": f"rollout worker {self.rank}", "rank": self.rank, "contract_digest": found.contract_digest,
            "rows": demanded_rows(found.rows, present),
        }  # fmt: skip

    def ordered_load_weights(self, folder: str) -> None:
        """Replaces every weight by those of a Hugging Face folder. Raises RolloutError if any was left as it was."""
        if not Contract.from_environment().consistency:
            from megatron_ext.rollout.stock import pack_experts

            self.reload_weights(weights_path=folder)  # the stock layout is packed: vLLM must take it apart and pack again
            pack_experts(self.model_runner.model)
            return
        from megatron_ext.rollout.weights import load_checkpoint

        load_checkpoint(self.model_runner.model, folder)

    def ordered_regions(self) -> dict[str, list]:
        """{Hugging Face tensor name: regions held by this rank}."""
        if not Contract.from_environment().consistency:
            raise RolloutError("stock layers pack their weights for the CPU kernels; digests need contract.consistency=True")
        from megatron_ext.rollout.weights import regions

        return regions(self.model_runner.model)
