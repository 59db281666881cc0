"""Run by test_against_verl.py with verl on the path: its advantages, losses and gradients for inputs from a file.

    python verl_values.py INPUTS.json    prints JSON
"""

import json
import sys

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig


def advantages(case):
    rewards, mask = torch.tensor(case["rewards"])[:, None], torch.ones(len(case["rewards"]), 1)
    groups = np.arange(len(rewards)) // case["group_size"]
    found, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, groups, norm_adv_by_std_in_grpo=case["by_std"])
    return found[:, 0].tolist()


def policy_loss(case):
    """Loss and its gradient by the logprobs, padded [B, T] as verl has them."""
    logprobs = torch.tensor(case["logprobs"], requires_grad=True)
    old, mask = torch.tensor(case["old"]), torch.tensor(case["mask"])
    advantages = torch.tensor(case["advantages"])[:, None].expand_as(mask)
    low, high = case["clip_low"], case["clip_high"]
    config = ActorConfig(strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=low, clip_ratio_low=low, clip_ratio_high=high,
                         clip_ratio_c=1e9)  # fmt: skip
    function = core_algos.compute_policy_loss_gspo if case["level"] == "sequence" else core_algos.compute_policy_loss_vanilla
    loss, metrics = function(old, logprobs, advantages, mask, case["aggregation"], config)
    if case["kl_coef"]:
        kl = core_algos.kl_penalty(logprobs, torch.tensor(case["reference"]), "low_var_kl")
        loss = loss + case["kl_coef"] * core_algos.agg_loss(kl, mask, case["aggregation"])
    loss.backward()
    return {"loss": loss.item(), "grad": (logprobs.grad * mask).tolist(), "clipfrac": metrics["actor/pg_clipfrac"], "ppo_kl": metrics["actor/ppo_kl"]}


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        inputs = json.load(file)
    print(json.dumps({"advantages": [advantages(c) for c in inputs["advantages"]], "losses": [policy_loss(c) for c in inputs["losses"]]}))
