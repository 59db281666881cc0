"""launch/: every script is safe bash, documents its variables, and makes a command line that the program it starts accepts."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron_ext.rl.main import parse

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(file.name for file in (ROOT / "launch").glob("*.sh") if file.name not in ("common.sh", "ascend_env.sh"))
TRAINING = {"HF": "model dir", "PROMPTS": "p.jsonl", "REWARD": "m:f", "OUT": "run", "STEPS": "3"}


def run(script, *arguments, **variables):
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "DRY_RUN": "1", **variables}
    return subprocess.run(["bash", str(ROOT / "launch" / script), *arguments], env=environment, capture_output=True, text=True, timeout=60, cwd="/")


def command_of(result):
    assert result.returncode == 0, result.stderr
    return shlex.split(result.stdout)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_stop_at_the_first_error(script):
    text = (ROOT / "launch" / script).read_text()
    assert text.startswith("#!/usr/bin/env bash\n#") and "\nset -euo pipefail\n" in text
    assert subprocess.run(["bash", "-n", str(ROOT / "launch" / script)]).returncode == 0


@pytest.mark.parametrize("script", ["train_cpu.sh", "rollout_server.sh", "ascend_4b.sh", "ascend_30b_a3b.sh"])
def test_every_variable_is_documented_at_the_top(script):
    text = (ROOT / "launch" / script).read_text()
    head, body = text.split("set -euo pipefail")
    used = set(re.findall(r"\$\{([A-Z_]+):?-", body)) | set(re.findall(r"\bneed ([A-Z_]+)", body)) | set(re.findall(r"\$([A-Z_]{2,})\b", body))
    missing = [name for name in used if name != "BASH_SOURCE" and not re.search(rf"^#.*\b{name}\b", head, re.M)]
    assert used and not missing


@pytest.mark.parametrize(("script", "variables"), [
    ("train_cpu.sh", TRAINING), ("rollout_server.sh", {"HF": "model dir"}), ("ascend_4b.sh", TRAINING), ("ascend_30b_a3b.sh", TRAINING),
])  # fmt: skip
def test_a_missing_variable_is_named(script, variables):
    for name in variables:
        result = run(script, **{key: value for key, value in variables.items() if key != name})
        assert result.returncode == 2 and f"{name} is not set" in result.stderr and result.stdout == ""


def test_training_command_line():
    _, _, module, *options = command_of(run("train_cpu.sh", "--lr", "3e-6", **TRAINING, TRAIN_TP="2", TRAIN_EP="2", ROLLOUT_TP="2", ROLLOUT_EP="1",
                                            ALGORITHM="gspo", MODEL="qwen3_30b_a3b"))  # fmt: skip
    config = parse(options)
    assert module == "megatron_ext.rl" and config.hf == "model dir" and config.steps == 3 and config.save_hf
    assert (config.train.tp, config.train.ep, config.rollout.tp, config.rollout.expert_parallel) == (2, 2, 2, True)
    assert config.objective.importance_level == "sequence" and config.megatron_flags[-2:] == ("--lr", "3e-6")
    assert "--moe-ffn-hidden-size" in config.megatron_flags


def test_defaults_of_the_training_script():
    config = parse(command_of(run("train_cpu.sh", **TRAINING))[3:])
    assert (config.train.tp, config.rollout.tp, config.rollout.expert_parallel) == (1, 1, False)
    assert config.objective.importance_level == "token" and config.aggregation == "seq-mean-token-mean"


def test_server_command_line():
    from megatron_ext.contract import ENVIRONMENT_VARIABLE, Contract
    from megatron_ext.rollout import serve

    result = run("rollout_server.sh", "--max-num-seqs", "8", HF="model dir", TP="2", EP="1", PORT="8123", MMAD_ORDER="groups16", KV_CACHE_MIB="64")
    args, more = serve.parse_arguments(command_of(result)[3:])
    command, environment = serve.server_command(args, more), serve.server_environment(args)
    assert command[3:5] == ["--model", "model dir"] and {"--enable-expert-parallel", "--enforce-eager"} <= set(command)
    assert command[command.index("--tensor-parallel-size") + 1] == "2" and command[command.index("--kv-cache-memory-bytes") + 1] == str(64 << 20)
    assert Contract.from_json(environment[ENVIRONMENT_VARIABLE]).order.mmad_order == "groups16"


def test_server_takes_the_order_from_the_probe():
    words = command_of(run("rollout_server.sh", HF="model", NPU_PROBE="probe.json"))
    assert words[words.index("--npu-probe") + 1] == "probe.json" and "--mmad-order" not in words


@pytest.mark.parametrize(("script", "layout"), [("ascend_4b.sh", (8, 1, 8, False)), ("ascend_30b_a3b.sh", (4, 8, 4, True))])
def test_ascend_command_line(script, layout):
    config = parse(command_of(run(script, **TRAINING, ALGORITHM="dapo"))[3:])
    assert (config.train.tp, config.train.ep, config.rollout.tp, config.rollout.expert_parallel) == layout
    assert config.objective.clip_high == 0.28 and "--num-layers" in config.megatron_flags


@pytest.mark.parametrize("script", ["ascend_4b.sh", "ascend_30b_a3b.sh"])
def test_ascend_refuses_what_is_not_built(script):
    several = run(script, **TRAINING, NNODES="2")
    assert several.returncode == 2 and "NNODES=2: runs over several hosts are not built" in several.stderr
    here = run(script, **TRAINING, DRY_RUN="")
    assert here.returncode == 2 and ("no NPU platform" in here.stderr or "torch_npu cannot be imported" in here.stderr) and here.stdout == ""


def test_determinism_is_exported_before_anything_starts():
    """The environment of a process that the script would start."""
    script = f'root={ROOT}; source launch/ascend_env.sh; env'
    environment = dict(line.split("=", 1) for line in subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines() if "=" in line)  # fmt: skip
    expected = {"HCCL_DETERMINISTIC": "strict", "LCCL_DETERMINISTIC": "1", "CLOSE_MATMUL_K_SHIFT": "1", "ATB_MATMUL_SHUFFLE_K_ENABLE": "0"}
    assert {name: environment.get(name) for name in expected} == expected
