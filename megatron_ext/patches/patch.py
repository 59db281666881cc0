"""One row of the patch table, and the one error of this package.

A `Patch` says as data which name of Megatron-core, vLLM or torch we take over, by what, when, and why. Nothing here
imports those packages: a row is only strings until `apply` looks it up.
"""

import ast
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

RECORDED_FILE = Path(__file__).with_name("recorded.json")  # written by tools/record_patches.py

SIDES = ("train", "rollout")
NATIVE_SEAMS = ("spec", "register_oot", "registry", "entry_point")  # the engine calls us: nothing is rebound
SEAMS = ("rebind", *NATIVE_SEAMS)

_CONDITION_NODES = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.Compare, ast.Eq, ast.NotEq, ast.Lt,
    ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Is, ast.IsNot, ast.Name, ast.Load, ast.Constant, ast.Tuple,
    ast.List,
)  # fmt: skip


class PatchError(RuntimeError):
    """The patch table cannot be applied, or no longer holds. `problems` lists every reason found, not only the first."""

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(problems)
        count = len(self.problems)
        heading = f"{count} problem{'s' if count != 1 else ''} with the patch table:"
        super().__init__("\n".join([heading, *(f"  {i}. {text}" for i, text in enumerate(self.problems, 1))]))


@dataclass(frozen=True)
class Patch:
    """One foreign name taken over.

    target: `package.module:function`, `package.module:Class`, `package.module:Class.method` or `package.module:VALUE`.
    replacement: import string of our object, same form; imported only by `apply`.
    seam: "rebind" replaces the attribute. The native seams are served through the engine's own extension points; such a
        row is verified (its target is still what the adapter was written against) and counted, never rebound.
    versions: PEP 440 specifier for `distribution`.
    source_sha: fingerprint of the target's source. Empty (the rule) means: as recorded in recorded.json.
    active_when: a comparison over the run's facts, such as "ep > 1 and dispatcher == 'alltoall'", or "always".
    consistency_only: False for what the device needs even when the stock numeric paths run.
    must_hit: an active row never hit in a process fails the parity run. False only with the reason in `why`.
    keeps_old: `package.module` or `package.module:name` places that may go on holding the stock object; reason in `why`.
    """

    target: str
    replacement: str
    side: str
    seam: str
    versions: str
    distribution: str
    why: str
    upstream: str
    remove_when: str
    source_sha: str = ""
    active_when: str = "always"
    consistency_only: bool = True
    must_hit: bool = True
    keeps_old: tuple[str, ...] = ()

    def __post_init__(self):
        problems = [
            *(f"{field} is {value!r}, expected 'package.module:name'"
              for field, value in (("target", self.target), ("replacement", self.replacement))
              if not _is_import_string(value)),
            *(f"{field} is empty" for field in ("versions", "distribution", "why", "upstream", "remove_when")
              if not getattr(self, field).strip()),
        ]  # fmt: skip
        if self.side not in SIDES:
            problems.append(f"side is {self.side!r}, expected one of {SIDES}")
        if self.seam not in SEAMS:
            problems.append(f"seam is {self.seam!r}, expected one of {SEAMS}")
        try:
            parse_condition(self.active_when)
        except ValueError as error:
            problems.append(str(error))
        if problems:
            raise PatchError(f"row {self.target!r}: {problem}; correct the row" for problem in problems)

    def is_active(self, facts: Mapping[str, object], consistency: bool) -> bool:
        """Whether the row takes part in this run. Raises ValueError for a condition over an unknown fact."""
        return (consistency or not self.consistency_only) and evaluate_condition(self.active_when, facts)

    def expected_sha(self) -> str:
        """The fingerprint the target must have; "" when none was recorded."""
        return self.source_sha or recorded().get(self.target, {}).get("sha256", "")

    def expected_signature(self) -> str:
        """The signature the adapter was written against, for messages; "" when none was recorded."""
        return recorded().get(self.target, {}).get("signature", "")


def split_import_string(text: str) -> tuple[str, list[str]]:
    """`package.module:Class.method` -> ("package.module", ["Class", "method"])."""
    module, _, path = text.partition(":")
    return module, path.split(".")


def recorded() -> dict[str, dict[str, str]]:
    """What tools/record_patches.py found in the installed packages: target -> {sha256, signature, recorded_from}."""
    return json.loads(RECORDED_FILE.read_text()) if RECORDED_FILE.exists() else {}


def parse_condition(condition: str) -> ast.Expression:
    """The syntax tree of a condition; ValueError unless it only compares facts with constants."""
    try:
        tree = ast.parse(condition, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"condition {condition!r} is not an expression ({error.msg})") from None
    for node in ast.walk(tree):
        if not isinstance(node, _CONDITION_NODES):
            raise ValueError(
                f"condition {condition!r} uses {type(node).__name__}; only facts, constants, comparisons, and/or/not are allowed"
            )
    return tree


def evaluate_condition(condition: str, facts: Mapping[str, object]) -> bool:
    """The condition's value for these facts. ValueError names the facts that are missing."""
    if condition == "always":
        return True
    tree = parse_condition(condition)
    missing = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(facts)
    if missing:
        raise ValueError(
            f"condition {condition!r} needs the facts {sorted(missing)}, given were {sorted(facts)}; pass them to enable()"
        )
    return bool(eval(compile(tree, "<condition>", "eval"), {"__builtins__": {}}, dict(facts)))


def _is_import_string(text: str) -> bool:
    module, path = split_import_string(text)
    return all(part.isidentifier() for part in [*module.split("."), *path])
