"""Reward functions: what cannot be loaded or used is named before it reaches an advantage."""

import numpy as np
import pytest
import torch

from megatron_ext.rl import rewards
from megatron_ext.rl.rewards import RewardError, RewardFunction, Rewards, Sample, load_rewards

BUILT_IN = "megatron_ext.rl.rewards"
FILE = """
import dataclasses

loaded = []

@dataclasses.dataclass
class Counter:
    calls: "int" = 0

counter = Counter()

def length(samples):
    counter.calls += 1
    return [len(sample.response_ids) for sample in samples]

def calls(samples):
    return [counter.calls] * len(samples)

number = 3
"""


def sample(response="", answer="ab", index=7, number=0, **changes):
    record = {} if answer is None else {"answer": answer}
    values = dict(prompt_index=index, prompt_ids=(3, 39), response_ids=(4, 5, 1), prompt="a=", response=response, record=record,
                  finish_reason="stop", step=5, sample=number)  # fmt: skip
    return Sample(**values | changes)


def scored(function, samples):
    return Rewards([RewardFunction("mine", 1.0, function)]).score(samples)["mine"]


@pytest.fixture
def reward_file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize(("response", "answer", "exact", "share"), [
    ("abcd", "abcd", 1.0, 1.0),
    (" abcd\n", "abcd ", 1.0, 1.0),
    ("abcx", "abcd", 0.0, 0.75),
    ("bacd", "abcd", 0.0, 0.5),
    ("ab", "abcd", 0.0, 0.5),
    ("abcdabcd", "abcd", 0.0, 0.5),
    ("", "abcd", 0.0, 0.0),
    ("a", "", 0.0, 0.0),
    ("", "", 1.0, 1.0),
])  # fmt: skip
def test_built_in_values(response, answer, exact, share):
    one = [sample(response, answer)]
    assert rewards.exact_match(one) == [exact] and rewards.token_accuracy(one) == [share]


def test_built_in_needs_a_text_answer():
    loaded = load_rewards([f"{BUILT_IN}:exact_match"])
    with pytest.raises(RewardError, match=r"reward 'exact_match' at step 5 failed: .*prompt 7 has no \"answer\" field") as caught:
        loaded.score([sample("ab", answer=None)])
    assert isinstance(caught.value.__cause__, RewardError)
    with pytest.raises(RewardError, match=r'prompt 7: "answer" must be text, found 42'):
        load_rewards([f"{BUILT_IN}:token_accuracy"]).score([sample("ab", answer=42)])


def test_scores_and_weighted_total():
    loaded = load_rewards([f"{BUILT_IN}:exact_match", f"{BUILT_IN}:token_accuracy=0.5"])
    scores = loaded.score([sample("ab"), sample("ax"), sample("xy")])
    assert scores == {"exact_match": [1.0, 0.0, 0.0], "token_accuracy": [1.0, 0.5, 0.0]}
    assert loaded.total(scores) == [1.5, 0.25, 0.0]


def test_the_sum_is_exact():
    """Weights that a compensated sum (Python's own since 3.12) still gets wrong."""
    functions = [RewardFunction(str(number), weight, None) for number, weight in enumerate([1e100, 1e50, 1.0, -1e100, -1e50])]
    scores = {function.name: [1.0] for function in functions}
    assert Rewards(functions).total(scores) == Rewards(functions[::-1]).total(scores) == [1.0]
    with pytest.raises(RewardError, match="total reward of sample 1 of the batch is inf; expected finite"):
        Rewards([RewardFunction("big", 1e308, None)]).total({"big": [1.0, 100.0]})


def test_functions_from_a_file(reward_file):
    loaded = load_rewards([f"{reward_file}:length=-2", f"{reward_file}:calls"])
    assert [(function.name, function.weight) for function in loaded.functions] == [("length", -2.0), ("calls", 1.0)]
    scores = loaded.score([sample()])
    assert scores == {"length": [3.0], "calls": [1.0]}, "both functions live in one module"
    assert loaded.total(scores) == [-5.0]


@pytest.mark.parametrize(("specs", "message"), [
    ([], r"no reward function was given; expected at least one package.module:function"),
    (["exact_match"], r"reward 'exact_match': expected package.module:function or path"),
    (["module:not a name"], r"reward 'module:not a name': expected package.module:function"),
    (["no_such_package.rewards:f"], r"reward 'no_such_package.rewards:f': cannot import no_such_package.rewards \(ModuleNotFoundError"),
    (["no/such/file.py:f"], r"reward 'no/such/file.py:f': cannot import no/such/file.py \(FileNotFoundError"),
    (["FILE:missing"], r"my_rewards.py:missing': 'missing' in .* is None; expected a function of a list of samples"),
    (["FILE:number"], r"my_rewards.py:number': 'number' in .* is 3; expected a function"),
    (["FILE:length=heavy"], r"my_rewards.py:length=heavy': weight 'heavy'; expected a finite number"),
    (["FILE:length="], r"my_rewards.py:length=': weight ''; expected a finite number"),
    (["FILE:length=inf"], r"weight 'inf'; expected a finite number"),
    (["FILE:length=nan"], r"weight 'nan'; expected a finite number"),
    (["FILE:length", "FILE:length=2"], r"length=2': a function named 'length' was given before; expected different names"),
])  # fmt: skip
def test_refused_specs(reward_file, specs, message):
    with pytest.raises(RewardError, match=message):
        load_rewards([spec.replace("FILE", str(reward_file)) for spec in specs])


def test_a_file_that_fails_can_be_mended(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("1 / 0")
    with pytest.raises(RewardError, match=r"broken.py:f': cannot import .* \(ZeroDivisionError: division by zero\)") as caught:
        load_rewards([f"{path}:f"])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    path.write_text("def f(samples):\n    return [0.0 for _ in samples]  # mended")
    assert load_rewards([f"{path}:f"]).score([sample()]) == {"f": [0.0]}


@pytest.mark.parametrize("returned", [
    [1, 0.5], (True, 0.5), np.array([1.0, 0.5]), np.array([1, 0.5], dtype=np.float32), [np.float32(1), np.float64(0.5)],
    torch.tensor([1.0, 0.5]), torch.tensor([1.0, 0.5], dtype=torch.bfloat16, requires_grad=True),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_accepted_forms(returned):
    scores = scored(lambda samples: returned, [sample(), sample()])
    assert scores == [1.0, 0.5] and all(type(score) is float for score in scores)


@pytest.mark.parametrize(("returned", "message"), [
    ([1.0], r"reward 'mine' at step 5 returned 1 values; expected a list, tuple, array or 1-D tensor of 2 numbers, one per sample"),
    (np.zeros(3), r"returned 3 values; expected .* of 2 numbers"),
    (np.zeros((2, 1)), r"returned shape \(2, 1\); expected .* of 2 numbers"),
    (torch.tensor(1.0), r"returned shape \(\); expected"),
    (None, r"returned NoneType; expected"),
    (1.0, r"returned float; expected"),
    ("ab", r"returned str; expected"),
    ({0: 1.0, 1: 0.0}, r"returned dict; expected"),
    ([1.0, "1.0"], r"reward 'mine' at step 5, prompt 8, sample 3: '1.0'; expected a finite number"),
    ([1.0, None], r"prompt 8, sample 3: None; expected a finite number"),
    ([1.0, [0.0]], r"prompt 8, sample 3: \[0.0\]; expected a finite number"),
    ([1.0, float("nan")], r"reward 'mine' at step 5, prompt 8, sample 3: nan; expected a finite number"),
    (torch.tensor([float("-inf"), 0.0]), r"prompt 7, sample 0: -inf; expected a finite number"),
])  # fmt: skip
def test_refused_returns(returned, message):
    with pytest.raises(RewardError, match=message):
        scored(lambda samples: returned, [sample(), sample(index=8, number=3)])


def test_a_function_that_raises():
    def bad(samples):
        raise KeyError("ground_truth")

    with pytest.raises(RewardError, match=r"reward 'mine' at step 5 failed: KeyError: 'ground_truth'") as caught:
        scored(bad, [sample()])
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_function_cannot_change_what_the_next_one_sees():
    loaded = Rewards([RewardFunction("one", 1.0, lambda samples: [samples.pop() and 1.0 for _ in range(2)]),
                      RewardFunction("two", 1.0, lambda samples: [2.0 for _ in samples])])  # fmt: skip
    assert loaded.score([sample(), sample()]) == {"one": [1.0, 1.0], "two": [2.0, 2.0]}


def test_no_samples_and_odd_finish_reasons():
    with pytest.raises(ValueError, match="no samples to score"):
        Rewards([]).score([])
    with pytest.raises(ValueError, match="finish_reason 'abort': expected one of"):
        sample(finish_reason="abort")
