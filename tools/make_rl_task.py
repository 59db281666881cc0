"""Make a small task for reinforcement learning: prompts with answers, and a tiny Qwen3-MoE that can half do it.

    python tools/make_rl_task.py OUT [--seed 0 --length 7 ...]

    OUT/model          Hugging Face folder (bf16)
    OUT/train.jsonl    {"prompt": "k7m2qab=", "answer": "x03sfpc", "data_source": "symbol_map"}, one a line
    OUT/heldout.jsonl  the same; its prompts are in neither train.jsonl nor the supervised start
    OUT/made_by.json   written last

The answer is the prompt, each symbol through one fixed permutation, then the end token: one symbol is one token. The
supervised start copies a teacher that has a second answer for every symbol: rarely for most, but more often than the right
one for a quarter of them. So the model soon knows where to look and what to choose between, samples the whole answer about one
time in three however long it is taught, and the reward has to teach it which of two answers is right.
"""

import argparse
import dataclasses
import json
import random
import string
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from make_tiny_model import END_OF_TEXT, TURN_END, is_made, make_config, mark_made, save_folder
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

SYMBOLS = string.ascii_lowercase + string.digits
ASK = "="
SPECIAL = [END_OF_TEXT, TURN_END, UNKNOWN := "<|unknown|>"]
MEASURE_EVERY = 5  # steps of the supervised start
# How often the teacher errs. Above one half, so that the likeliest answer of the model is wrong as well.
HARD_SYMBOLS, HARD_SLIP, EASY_SLIP = len(SYMBOLS) // 4, 0.55, 0.02


class TaskError(RuntimeError):
    """The task cannot be made with these options."""


@dataclasses.dataclass(frozen=True)
class Teacher:
    """The rule of the task (`right`), and the errors of the supervised examples: `wrong` with probability `slip`."""

    right: dict[str, str]
    wrong: dict[str, str]
    slip: dict[str, float]

    def answer(self, prompt: str) -> str:
        return "".join(self.right[symbol] for symbol in prompt.removesuffix(ASK))

    def taught(self, prompt: str, rng: random.Random) -> str:
        """An answer as the supervised examples give it, errors included."""
        symbols = prompt.removesuffix(ASK)
        return "".join((self.wrong if rng.random() < self.slip[symbol] else self.right)[symbol] for symbol in symbols)


def make_teacher(rng: random.Random) -> Teacher:
    order = _shuffled(rng)
    right = dict(zip(order, order[1:] + order[:1], strict=True))
    wrong = dict(zip(order, order[2:] + order[:2], strict=True))  # never the right one
    hard = set(_shuffled(rng)[:HARD_SYMBOLS])
    return Teacher(right, wrong, {symbol: HARD_SLIP if symbol in hard else EASY_SLIP for symbol in SYMBOLS})


def _shuffled(rng: random.Random) -> list[str]:
    return sorted(SYMBOLS, key=lambda _: rng.random())  # random() alone is promised to stay the same over Python versions


def distinct_prompts(rng: random.Random, length: int) -> Iterator[str]:
    """Random prompts, never one twice. Endless as far as the options can ask."""
    seen = set()
    while True:
        prompt = "".join(rng.choices(SYMBOLS, k=length)) + ASK
        if prompt not in seen:
            seen.add(prompt)
            yield prompt


def make_tokenizer(max_positions: int) -> PreTrainedTokenizerFast:
    """One token per symbol. Any other character is UNKNOWN."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *SYMBOLS, ASK])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=END_OF_TEXT, unk_token=UNKNOWN,
        model_max_length=max_positions, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def token_rows(tokenizer: PreTrainedTokenizerFast, prompts: list[str], answers: list[str]) -> torch.Tensor:
    """int64 [len(prompts), 2 * length + 2]: prompt, answer, end token."""
    texts = [prompt + answer + TURN_END for prompt, answer in zip(prompts, answers, strict=True)]
    return torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"])


def answer_logprobs(model: torch.nn.Module, rows: torch.Tensor, length: int) -> torch.Tensor:
    """fp32 [rows, length + 1]: log-probability of each token of the answer and of the end token."""
    logprobs = model(rows[:, :-1], use_cache=False).logits[:, length:].float().log_softmax(-1)
    return logprobs.gather(-1, rows[:, length + 1 :, None]).squeeze(-1)


@torch.no_grad()
def exact_match(model: torch.nn.Module, rows: torch.Tensor, length: int) -> float:
    """Probability that a sample at temperature 1 is the answer, mean over the rows. Exact: nothing is sampled."""
    return answer_logprobs(model, rows, length).sum(1).exp().mean().item()


def supervised_start(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace,
    teacher: Teacher, prompts: Iterator[str], rng: random.Random, heldout: torch.Tensor,
) -> None:  # fmt: skip
    """Train in place until exact match on `heldout` lies in [--low, --high]. TaskError after --max-steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    reached = []
    for step in range(1, args.max_steps + 1):
        optimizer.param_groups[0]["lr"] = args.lr * min(1.0, step / 20)
        asked = [next(prompts) for _ in range(args.batch)]
        rows = token_rows(tokenizer, asked, [teacher.taught(prompt, rng) for prompt in asked])
        optimizer.zero_grad()
        (-answer_logprobs(model, rows, args.length).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % MEASURE_EVERY == 0:
            reached.append(exact_match(model, heldout, args.length))
            if args.low <= reached[-1] <= args.high:
                print(f"supervised start: {step} steps, exact match {reached[-1]:.3f}")
                return
    raise TaskError(
        f"exact match after {args.max_steps} steps is not in [{args.low}, {args.high}]; measured "
        f"{', '.join(f'{value:.3f}' for value in reached)}; use another --seed, a wider range or more --max-steps"
    )


def write_prompts(path: Path, prompts: list[str], teacher: Teacher) -> None:
    records = [{"prompt": prompt, "answer": teacher.answer(prompt), "data_source": "symbol_map"} for prompt in prompts]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_task(out: Path, args: argparse.Namespace) -> None:
    """Write the whole folder. TaskError if the supervised start does not reach its range."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "made_by.json").unlink(missing_ok=True)
    rng = random.Random(args.seed)
    teacher = make_teacher(rng)
    prompts = distinct_prompts(rng, args.length)
    heldout = [next(prompts) for _ in range(args.heldout_prompts)]
    write_prompts(out / "heldout.jsonl", heldout, teacher)
    write_prompts(out / "train.jsonl", [next(prompts) for _ in range(args.train_prompts)], teacher)

    tokenizer = make_tokenizer(args.max_positions)
    torch.manual_seed(args.seed)
    model = Qwen3MoeForCausalLM(make_config(args, tokenizer)).float()
    with torch.no_grad():  # transformers zeroes this row; the norm of a zero vector would send gradients of thousands through it
        model.model.embed_tokens.weight[tokenizer.pad_token_id].normal_(0.0, model.config.initializer_range)
    model.set_experts_implementation("eager")  # one matmul per expert: the fastest here on a CPU
    rows = token_rows(tokenizer, heldout, [teacher.answer(prompt) for prompt in heldout])
    supervised_start(model, tokenizer, args, teacher, prompts, rng, rows)
    save_folder(out / "model", model.to(torch.bfloat16), tokenizer)
    mark_made(out, "make_rl_task", args)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write (made if needed)")
    parser.add_argument("--seed", type=int, default=0, help="of the task, the prompts and the model")
    parser.add_argument("--length", type=int, default=7, help="symbols of a prompt and of its answer")
    parser.add_argument("--train-prompts", type=int, default=1024)
    parser.add_argument("--heldout-prompts", type=int, default=256)
    start = parser.add_argument_group("supervised start")
    start.add_argument("--low", type=float, default=0.25, help="stop once exact match on the held-out prompts is in [low, high]")
    start.add_argument("--high", type=float, default=0.4)
    start.add_argument("--max-steps", type=int, default=400)
    start.add_argument("--batch", type=int, default=64)
    start.add_argument("--lr", type=float, default=2e-3)
    shape = parser.add_argument_group("model")
    shape.add_argument("--layers", type=int, default=2)
    shape.add_argument("--hidden", type=int, default=128)
    shape.add_argument("--heads", type=int, default=4)
    shape.add_argument("--kv-heads", type=int, default=2)
    shape.add_argument("--head-dim", type=int, default=64)
    shape.add_argument("--experts", type=int, default=8)
    shape.add_argument("--top-k", type=int, default=2)
    shape.add_argument("--expert-width", type=int, default=128)
    shape.add_argument("--max-positions", type=int, default=4096)
    parser.set_defaults(vocab=len(SPECIAL) + len(SYMBOLS) + len(ASK), dense=False, tied=False, dense_width=256)  # for make_config
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if not is_made(args.out, args):
        make_task(args.out, args)
    print(args.out)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # the products are too small for more
    sys.exit(main())
