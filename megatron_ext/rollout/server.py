"""A rollout engine in a process of its own, so that several run at once and none can take the driver along.

    python -m megatron_ext.rollout.server SOCKET CORES

Serves requests as `megatron_ext.service` says; `client.RolloutWorld` starts it. The contract comes by the environment. A worker
process that dies ends the engine at once, whatever it waits for.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

from megatron_ext.contract import Contract
from megatron_ext.rollout.engine import RolloutEngine, SamplingSpec, is_running
from megatron_ext.service import Channel, Commands, die_with_parent, serve

_WATCH_SECONDS = 0.5


class Server(Commands):
    """The commands: methods of RolloutEngine."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.engine: RolloutEngine | None = None

    def do_start(self, hf_dir: str, **arguments) -> dict[str, Any]:
        self.engine = RolloutEngine(hf_dir, contract=Contract.from_environment(), **arguments)
        threading.Thread(target=_watch, args=(self, self._channel), daemon=True).start()
        return {"pids": list(self.engine.worker_pids)}

    def do_generate(self, prompts: list[list[int]], spec: SamplingSpec) -> dict[str, Any]:
        return {"rollouts": self.engine.generate(prompts, spec, self._channel.progress)}

    def do_load_weights(self, folder: str) -> None:
        self.engine.load_weights(folder)

    def do_digest(self) -> dict[str, Any]:
        return {"digest": self.engine.digest()}

    def do_report(self) -> dict[str, Any]:
        return {"processes": self.engine.report()}

    def do_assert_hit(self) -> None:
        self.engine.assert_hit()

    def do_stats(self) -> dict[str, Any]:
        return {"stats": self.engine.stats()}

    def dead_worker(self) -> str | None:
        """Says which worker process has died, if one has: the cause of whatever else goes wrong then."""
        dead = [pid for pid in self.engine.worker_pids if not is_running(pid)] if self.engine is not None and self.engine.is_open else []
        return f"rollout worker process {dead[0]} died" if dead else None

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


def _watch(server: Server, channel: Channel) -> None:
    """Ends this process when one of the engine's workers is gone: vLLM might wait for its answer for minutes."""
    while server.engine.is_open:
        if said := server.dead_worker():
            channel.report_failure(said)
            os.killpg(os.getpgid(0), signal.SIGKILL)  # the group that the driver started: this process and its workers
        time.sleep(_WATCH_SECONDS)


def main() -> None:
    die_with_parent()
    socket_path, cores = sys.argv[1:]
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    channel = Channel(socket_path, "rollout engine")
    server = Server(channel)
    try:
        channel.answer({"ready": True})
        serve(server, channel)
    except Exception:
        time.sleep(_WATCH_SECONDS)  # a worker that was killed may still be on its way out
        channel.report_failure("\n".join(filter(None, [server.dead_worker(), traceback.format_exc()])))
        raise
    finally:
        server.close()


if __name__ == "__main__":
    main()
