"""launch/rollout_server.sh's server: its token ids and logprobs, over HTTP, are the ones that Megatron recomputes."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from models import make_model

from megatron_ext.contract import Contract
from megatron_ext.parity import session
from megatron_ext.parity.layout import TrainLayout

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
PROMPTS = [[5, 6, 7, 8], list(range(3, 203)), [17]]


def post(port, path, body):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.loads(answer.read())


def wait_until_healthy(port, process, log):
    deadline = time.monotonic() + 900
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        except (urllib.error.URLError, OSError):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(model folder, port)"""
    folder = tmp_path_factory.mktemp("serve")
    model = make_model(folder / "model", "--layers", "2")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "server.log"
    command = [sys.executable, "-m", "megatron_ext.rollout.serve", model, "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512",
               "--kv-cache-memory-bytes", str(64 << 20)]  # fmt: skip
    with open(log, "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)
    try:
        wait_until_healthy(port, process, log)
        yield model, port
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def test_logprobs_are_those_of_training(server, tmp_path):
    model, port = server
    sequences, rollout = [], []
    for index, prompt in enumerate(PROMPTS):
        body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 1.0, "seed": index, "logprobs": 1, "return_token_ids": True, "ignore_eos": True}
        choice = post(port, "/v1/completions", body)["choices"][0]
        sequences.append({"tokens": [*prompt, *choice["token_ids"]], "prompt_len": len(prompt)})
        rollout.append(np.array(choice["logprobs"]["token_logprobs"], np.float32))
    with session.training(model, TrainLayout(), Contract(), session.TrainSettings(weights_only=True), tmp_path / "train.log") as world:
        train = world.call("logprobs", sequences=sequences)["logprobs"]
    assert [len(part) for part in train] == [12] * len(PROMPTS)
    for mine, theirs in zip(train, rollout, strict=True):
        assert (mine.view(np.int32) == theirs.view(np.int32)).all()


def test_a_request_that_changes_the_distribution_is_refused(server):
    model, port = server
    for body in ({"seed": 1, "top_k": 5}, {}):
        with pytest.raises(urllib.error.HTTPError) as error:
            post(port, "/v1/completions", {"model": model, "prompt": [5], "max_tokens": 2, "temperature": 1.0, **body})
        assert error.value.code >= 400
