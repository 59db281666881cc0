"""Options of a run: what they make, and what is refused before anything starts."""

import pytest

from megatron_ext.rl import config as configuration
from megatron_ext.rl.main import main, parse

REQUIRED = ["--hf", "model", "--prompts", "prompts.jsonl", "--reward", "m:f", "--steps", "3", "--out", "run"]


def test_megatron_flags_pass_through():
    config = parse([*REQUIRED, "--lr", "1e-5", "--clip-grad", "0.5"])
    assert config.megatron_flags == ("--lr", "1e-5", "--clip-grad", "0.5")


def test_options_from_a_file(tmp_path):
    file = tmp_path / "run.args"
    file.write_text("# a comment\n--train-tp 2 --train-ep 2  # layout\n--reward 'm:g=0.5'\n")
    config = parse([*REQUIRED, f"@{file}"])
    assert (config.train.tp, config.train.ep, config.rewards) == (2, 2, ("m:f", "m:g=0.5"))


def test_policy_follows_consistency():
    assert parse(REQUIRED).logdiff_policy == "stop"
    assert parse([*REQUIRED, "--no-consistency"]).logdiff_policy == "warn"


def test_identity_is_what_decides_the_bits(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("{}\n")
    base = [*REQUIRED, "--prompts", str(prompts)]
    identity = parse(base).identity()
    assert parse([*base, "--rollout-tp", "2", "--rollout-engines", "2", "--max-num-seqs", "3", "--train-tp", "2"]).identity() == identity
    for option in (["--seed", "1"], ["--lr", "0.1"], ["--clip-ratio-low", "0.1"], ["--mmad-order", "groups16"], ["--temperature", "0.9"]):
        assert parse([*base, *option]).identity() != identity
    prompts.write_text("{} \n")
    assert parse(base).identity() != identity


@pytest.mark.parametrize(("options", "message"), [
    (["--samples-per-prompt", "1"], "--samples-per-prompt 1"),
    (["--temperature", "0"], "expected > 0"),
    (["--updates-per-step", "3"], "does not divide --prompts-per-step 16"),
    (["--eval-interval", "2"], "needs --heldout"),
    (["--steps", "0"], "steps: expected > 0, found 0"),
    (["--keep-checkpoints", "-1"], "keep_checkpoints: expected >= 0"),
    (["--importance-level", "sequence"], "seq-mean-token-mean"),
    (["--no-consistency", "--verify-old-logprob"], "leave one of them out"),
    (["--no-consistency", "--logdiff-policy", "stop"], "use warn"),
    (["--resume", "--overwrite"], "leave one of them out"),
    (["--max-num-batched-tokens", "64"], "at least --max-num-seqs 128"),
    (["--tensor-model-parallel-size", "2"], "use --train-tp"),
    (["--save=x"], "use --out"),
    (["--train-tp", "2", "--train-ep", "4", "--train-dp", "1"], "does not divide tp x dp"),
    (["--clip-ratio-low", "2"], "clip_low"),
    (["--rollout-engines", "0"], "rollout_engines: expected > 0"),
])  # fmt: skip
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        parse([*REQUIRED, *options])


def test_every_option_has_help():
    parser = configuration.add_arguments(configuration.argparse.ArgumentParser())
    obvious = {"help", "train_tp", "train_ep", "train_pp", "dispatcher", "rollout_tp", "kernel_backend", "mmad_order", "prompts_per_step",
               "clip_ratio_low", "tensorboard"}  # fmt: skip
    assert [action.dest for action in parser._actions if not action.help and action.dest not in obvious] == []


def test_a_run_is_not_overwritten(tmp_path, capsys):
    """Nor does its refusal start an engine."""
    (tmp_path / "metrics.jsonl").write_text("")
    assert main([*REQUIRED, "--out", str(tmp_path)]) == 1
    assert "holds a run already (metrics.jsonl): --resume goes on with it, --overwrite" in capsys.readouterr().err
    assert main([*REQUIRED, "--out", str(tmp_path), "--resume"]) == 1
    assert "no finished checkpoint" in capsys.readouterr().err




@pytest.mark.parametrize(("lines", "options", "message"), [
    (['{"prompt": "abcdefg="}'], [], "PromptError: {}:2: not JSON"),
    ([], [], "--prompts-per-step 16: {} holds only 1"),
    ([], ["--max-response-len", "8000"], "--max-prompt-len + --max-response-len = 9024, the model has 4096 positions"),
    ([], ["--reward", "megatron_ext.rl.rewards:nothing"], "RewardError: reward 'megatron_ext.rl.rewards:nothing'"),
    ([], ["--heldout", "absent.jsonl"], "PromptError: absent.jsonl: cannot be read"),
], ids=["bad line", "too few", "too long", "no such reward", "no such file"])  # fmt: skip
def test_refused_before_an_engine_starts(task, tmp_path, capsys, lines, options, message):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abcdefg=", "answer": ""}\n' + ("{broken\n" if lines else ""))
    out = tmp_path / "out"
    reward = [] if "--reward" in options else ["--reward", "megatron_ext.rl.rewards:exact_match"]
    rest = ["--steps", "3", "--out", str(out), *reward, *options]
    options = [*rest, "--prompts-per-step", "1"] if not message.startswith("--prompts") else rest
    assert main(["--hf", str(task / "model"), "--prompts", str(prompts), *options]) == 1
    assert message.format(prompts) in capsys.readouterr().err
    assert not (out / "logs").exists()
