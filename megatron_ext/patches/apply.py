"""Verify every patch row, then bind them all; count their use; take them back.

`apply` reads nothing but the table and the facts of the run. It first collects every problem of every active row and
raises one `PatchError` listing them; only a table without problems is bound, and a bind that fails half way is undone.
One side per process: the training engine and the rollout engine live in different processes.
"""

import functools
import importlib.metadata
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from megatron_ext.patches import seams, table
from megatron_ext.patches.holders import Place, find_holders, foreign_subclasses
from megatron_ext.patches.patch import SIDES, Patch, PatchError
from megatron_ext.patches.target import Target, find_target, fingerprint, load_object

_RECORD_HINT = "compare the adapter with the new source, then run tools/record_patches.py"


@dataclass(frozen=True)
class Report:
    """What the patch table did in one process. `rows`: dicts of target, seam, active, bound, hits, must_hit, why."""

    side: str
    contract_digest: str
    facts: dict[str, object]
    rows: list[dict[str, object]]

    def assert_hit(self) -> None:
        """Raise PatchError naming every active row that had to be used in this process and was not."""
        missed = [row for row in self.rows if row["active"] and row["must_hit"] and not row["hits"]]
        if missed:
            raise PatchError(
                f"{row['target']} ({row['seam']}) was never used in this {self.side} process, expected at least one hit: "
                f"the engine ran its stock path there. Check the wiring of the adapter, or the row's active_when "
                f"for the facts {self.facts}"
                for row in missed
            )

    def __str__(self) -> str:
        lines = [f"megatron_ext patches, {self.side} side, contract {self.contract_digest}"]
        for row in self.rows:
            state = f"{row['hits']} hits" if row["active"] else "not active"
            lines.append(f"  {row['seam']:<12} {row['target']}: {state}")
        return "\n".join(lines)


@dataclass
class _Bound:
    """One row in force. `ours` is what its target resolves to now; `stock` what it was."""

    row: Patch
    found: Target
    ours: Any = None
    places: list[Place] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)

    @property
    def stock(self) -> Any:
        return self.found.stock


@dataclass
class _Process:
    """The state of this process. `bound` is empty until `apply` has succeeded."""

    key: tuple | None = None
    side: str = ""
    contract_digest: str = ""
    facts: dict[str, object] = field(default_factory=dict)
    rows: tuple[Patch, ...] = ()
    bound: dict[str, _Bound] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)


_process = _Process()


def apply(
    side: str,
    contract: Any,
    facts: Mapping[str, object],
    rows: Iterable[Patch] | None = None,
    required: Iterable[seams.Seam] | None = None,
) -> Report:
    """Verify and bind every active row of a side, all or nothing.

    contract: needs `.consistency` (bool) and `.digest()`. facts: what the rows' active_when conditions refer to.
    rows, required: the table and the list of seams it must cover; the project's own unless given (tests).
    A second call with the same arguments returns the report again (vLLM may load a plug-in twice).
    Raises PatchError listing every problem; nothing is bound then.
    """
    if side not in SIDES:
        raise PatchError([f"side is {side!r}, expected one of {SIDES}; correct the call of enable()"])
    rows = tuple(table.rows(side) if rows is None else rows)
    required = tuple(seams.required(side) if required is None else required)
    key = (side, contract.digest(), tuple(sorted(facts.items())), rows)
    if _process.key is not None:
        if _process.key == key:
            return report()
        raise PatchError([
            f"the {_process.side} side is already enabled in this process with contract {_process.contract_digest} and facts "
            f"{_process.facts}; asked for: {side}, contract {key[1]}, facts {dict(facts)}. Use one process per side and contract"
        ])  # fmt: skip
    active = _active_rows(rows, facts, contract.consistency)
    bound = _verify_rows(active, required, facts, contract.consistency)
    _bind(bound)
    _process.key, _process.side, _process.contract_digest = key, side, key[1]
    _process.facts, _process.rows = dict(facts), rows
    _process.bound = {item.row.target: item for item in bound}
    _process.hits.clear()
    return report()


def unapply() -> None:
    """Put every stock object back and forget the hits. For tests; a run never needs it."""
    _unbind(list(_process.bound.values()))
    _process.__init__()


def hit(target: str) -> None:
    """Count one use of a row's adapter in this process. Adapters on native seams and classes call it themselves."""
    if _process.key is not None and target not in _process.bound:
        raise PatchError([
            f"hit({target!r}): no active row of the {_process.side} side has this target; active are {sorted(_process.bound)}. "
            f"Add the row to the table or correct its active_when"
        ])  # fmt: skip
    _process.hits[target] = _process.hits.get(target, 0) + 1


def original(target: str) -> Any:
    """The stock object of a target, for replacements that call it: a plain function for methods. Bound or not."""
    item = _process.bound.get(target)
    return item.stock if item is not None else find_target(target).stock


def report() -> Report:
    """A snapshot of this process: every row of the side's table with its state and hits."""
    bound, hits = _process.bound, _process.hits
    rows = [
        {"target": row.target, "seam": row.seam, "active": bound.get(row.target, _NONE).row is row,
         "bound": bound.get(row.target, _NONE).row is row and row.seam == "rebind",
         "hits": hits.get(row.target, 0), "must_hit": row.must_hit, "why": row.why}
        for row in _process.rows
    ]  # fmt: skip
    return Report(_process.side, _process.contract_digest, dict(_process.facts), rows)


def verify() -> None:
    """Raise PatchError if the table no longer holds: a target replaced after us, or a stock object held again somewhere.

    Call it once the engines are built: another patcher (MindSpeed's `repatch`, a plug-in) may have run in between.
    """
    rebinds = [item for item in _process.bound.values() if item.row.seam == "rebind"]
    problems = []
    for item in rebinds:
        now = find_target(item.row.target)
        if now.stock is not item.ours:
            problems.append(
                f"{item.row.target} now resolves to {_name(now.stock)}, expected our {item.row.replacement}: something replaced "
                f"it after enable(). Call enable() after every other patcher, or disable that one"
            )
    for place in find_holders(_scannable(rebinds)):
        row = _process.bound[place.target].row
        if not _listed(row, place.label) and not (place.is_ours and _process.bound[place.target].found.kind == "class"):
            problems.append(
                f"{place.label} holds the stock {place.target} again, expected our {row.replacement}: it was put back after "
                f"enable(). Find what assigns it and let it run before enable()"
            )
    if problems:
        raise PatchError(problems)


# Checks: each returns its problems, so that one error lists them all.


def _active_rows(rows: tuple[Patch, ...], facts: Mapping[str, object], consistency: bool) -> list[Patch]:
    active, problems = [], []
    for row in rows:
        try:
            if row.is_active(facts, consistency):
                active.append(row)
        except ValueError as error:
            problems.append(f"{row.target}: {error}")
    if problems:
        raise PatchError(problems)
    return active


def _verify_rows(
    active: list[Patch], required: tuple[seams.Seam, ...], facts: Mapping[str, object], consistency: bool
) -> list[_Bound]:
    problems = [*seams.uncovered(required, active, facts, consistency), *_double_claims(active)]
    bound = []
    for row in active:
        item, row_problems = _verify_row(row)
        problems += row_problems
        if item is not None:
            bound.append(item)
    rebinds = [item for item in bound if item.row.seam == "rebind"]
    problems += _same_object_claims(rebinds)
    if not problems:  # the scan needs every replacement imported and every target found
        problems = _collect_places(rebinds)
    if problems:
        raise PatchError(problems)
    return bound


def _double_claims(active: list[Patch]) -> list[str]:
    """Two rows with one target, or a rebind inside a class that another rebind replaces."""
    problems = []
    claimed: dict[str, Patch] = {}
    for row in active:
        if row.target in claimed:
            problems.append(
                f"{row.target} is claimed by two active rows ({claimed[row.target].replacement} and {row.replacement}), "
                f"expected one; merge them or make their active_when exclude each other"
            )
        claimed[row.target] = row
    rebinds = [row.target for row in active if row.seam == "rebind"]
    problems += [
        f"{inner} lies inside {outer}, which another active row replaces whole; keep one of the two rows"
        for outer in rebinds for inner in rebinds if inner.startswith(outer + ".")
    ]  # fmt: skip
    return problems


def _same_object_claims(rebinds: list[_Bound]) -> list[str]:
    """One object claimed under two names: the second rebind would replace the first."""
    problems = []
    claimed: dict[int, str] = {}
    for item in rebinds:
        if item.found.kind != "value" and not item.found.inherited:
            first = claimed.setdefault(id(item.stock), item.row.target)
            if first != item.row.target:
                problems.append(
                    f"{item.row.target} and {first} are one object, expected one row for it; keep the row of the module that "
                    f"defines it (every other module that imported it is rebound as well)"
                )
    return problems


def _verify_row(row: Patch) -> tuple[_Bound | None, list[str]]:
    problems = _version_problems(row)
    try:
        found = find_target(row.target)
    except Exception as error:  # a foreign import may fail in any way
        return None, [
            *problems,
            f"{row.target}: expected to find it in {row.distribution} {row.versions}, found {type(error).__name__}: {error}. "
            f"The target moved or was renamed: find its successor and adapt the row ({row.replacement})",
        ]
    problems += _source_problems(row, found)
    try:
        ours = load_object(row.replacement)
    except Exception as error:
        return None, [
            *problems,
            f"{row.target}: replacement {row.replacement} cannot be imported ({type(error).__name__}: {error}); correct the row",
        ]
    if row.seam == "rebind":
        problems += _replacement_problems(row, found, ours)
    return _Bound(row, found, ours), problems


def _version_problems(row: Patch) -> list[str]:
    try:
        version = importlib.metadata.version(row.distribution)
        if SpecifierSet(row.versions).contains(version, prereleases=True):
            return []
        return [
            f"{row.target}: written for {row.distribution} {row.versions}, found {version}; install a version in range, or "
            f"check the adapter {row.replacement} against {version} and widen the range"
        ]
    except importlib.metadata.PackageNotFoundError:
        return [f"{row.target}: {row.distribution} {row.versions} expected, not installed; run launch/setup.sh"]
    except InvalidSpecifier:
        return [f"{row.target}: versions {row.versions!r} is no PEP 440 specifier; correct the row"]


def _source_problems(row: Patch, found: Target) -> list[str]:
    expected = row.expected_sha()
    if not expected:
        return [f"{row.target}: no source fingerprint was recorded; run tools/record_patches.py"]
    actual = fingerprint(row.target, found, row.distribution)
    if actual == expected:
        return []
    return [
        f"{row.target}: its source is not the one {row.replacement} was written against (expected sha256 {expected[:16]} "
        f"{row.expected_signature()}, found {actual[:16]}); {_RECORD_HINT}"
    ]


def _replacement_problems(row: Patch, found: Target, ours: Any) -> list[str]:
    kind = found.kind
    fits = {
        "class": isinstance(ours, type),
        "property": isinstance(ours, property),
        "value": True,
    }.get(kind, callable(ours) or isinstance(ours, (staticmethod, classmethod)))
    if not fits:
        return [f"{row.target} is a {kind}, its replacement {row.replacement} a {type(ours).__name__}; give one of the same kind"]
    if kind in ("class", "value", "property"):
        problems = []
        if kind == "value" and row.must_hit:
            problems.append(f"{row.target} is a value, whose use cannot be counted; set must_hit=False with the reason in why")
        if kind == "class":
            problems += [
                f"{row.target}: {name} is a subclass of it and would stay on the stock base; give it a row of its own, rebind "
                f"single methods instead, or list it in keeps_old with the reason in why"
                for name in foreign_subclasses(found.raw) if not _listed(row, name)
            ]  # fmt: skip
        return problems
    return _signature_problems(row, found, ours)


def _signature_problems(row: Patch, found: Target, ours: Any) -> list[str]:
    """Every parameter of the stock function must be accepted by ours, under the same name and at the same position."""
    try:
        stock = list(inspect.signature(found.stock).parameters.values())
        mine = inspect.signature(ours).parameters
    except (TypeError, ValueError):
        return []  # C functions do not tell
    kinds = {parameter.kind for parameter in mine.values()}
    any_position, any_name = inspect.Parameter.VAR_POSITIONAL in kinds, inspect.Parameter.VAR_KEYWORD in kinds
    if any_position and any_name:
        return []
    names = list(mine)
    wrong = []
    for index, parameter in enumerate(stock):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            accepted = any_position
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            accepted = any_name
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            accepted = parameter.name in mine or any_name
        else:
            accepted = (index < len(names) and names[index] == parameter.name) or (index == 0 and parameter.name in ("self", "cls"))
        if not accepted:
            wrong.append(parameter.name)
    if not wrong:
        return []
    return [
        f"{row.target}: {row.replacement}{inspect.signature(ours)} does not take {wrong} as the stock function "
        f"{inspect.signature(found.stock)} does; give it the same parameters"
    ]


def _collect_places(rebinds: list[_Bound]) -> list[str]:
    """Fill in where each stock object is held; the problems are the places that cannot be rebound."""
    by_target = {item.row.target: item for item in rebinds}
    problems = []
    for place in find_holders(_scannable(rebinds)):
        item = by_target[place.target]
        if _listed(item.row, place.label):
            continue
        if place.is_ours:
            if item.found.kind != "class":  # a class may be held to subclass it
                problems.append(
                    f"{place.label} holds the stock {place.target}, which {item.row.replacement} replaces; use "
                    f"megatron_ext.patches.original({place.target!r}) where the stock function is meant"
                )
        elif place.write is None:
            problems.append(
                f"{place.label} holds the stock {place.target} and cannot be changed in place; rebind that name by a row of "
                f"its own, or list it in keeps_old with the reason in why"
            )
        else:
            item.places.append(place)
    return problems


def _scannable(rebinds: list[_Bound]) -> dict[str, Any]:
    """The objects to look for. A method the target's class only inherits stays with the base class, rightly so."""
    return {item.row.target: item.stock for item in rebinds if not item.found.inherited}


def _listed(row: Patch, label: str) -> bool:
    return any(label == kept or label.startswith((kept + ":", kept + ".")) for kept in row.keeps_old)


# Binding


def _bind(bound: list[_Bound]) -> None:
    rebinds = [item for item in bound if item.row.seam == "rebind"]
    for item in rebinds:
        try:
            _bind_one(item)
        except Exception as error:
            _unbind(rebinds)
            raise PatchError([
                f"{item.row.target}: binding {item.row.replacement} failed ({type(error).__name__}: {error}); every row was taken "
                f"back. Rebind a name that can be assigned, such as the function that reads it"
            ]) from error  # fmt: skip


def _bind_one(item: _Bound) -> None:
    found = item.found
    ours = item.ours.__func__ if isinstance(item.ours, (staticmethod, classmethod)) else item.ours
    if found.kind in ("function", "staticmethod", "classmethod"):
        ours = _counted(item.row.target, ours)
    item.ours = ours
    descriptor = type(found.raw) if found.kind in ("staticmethod", "classmethod") else None
    setattr(found.owner, found.name, descriptor(ours) if descriptor else ours)
    restore = (delattr, (found.owner, found.name)) if found.inherited else (setattr, (found.owner, found.name, found.raw))
    item.undo.append(functools.partial(restore[0], *restore[1]))
    for place in item.places:
        place.write(ours)
        item.undo.append(functools.partial(place.write, found.stock))


def _unbind(bound: list[_Bound]) -> None:
    for item in reversed(bound):
        while item.undo:
            item.undo.pop()()


def _counted(target: str, function: Callable) -> Callable:
    """`function` with every call counted as a hit of its row."""
    hits = _process.hits

    @functools.wraps(function)
    def call(*args, **kwargs):
        hits[target] = hits.get(target, 0) + 1
        return function(*args, **kwargs)

    return call


def _name(value: Any) -> str:
    module = getattr(value, "__module__", None)
    return f"{module}:{getattr(value, '__qualname__', type(value).__name__)}" if module else repr(value)


class _NONE:
    row = None
