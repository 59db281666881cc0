"""Every row of the real table, against the real packages: each way in which a row can go wrong is caught."""

import importlib.metadata
import inspect
import sys
import types

import pytest

from megatron_ext.patches import PatchError, apply, holders, original, seams, table, unapply, verify
from megatron_ext.patches.target import find_target

_TRAIN = {"device": "cpu", "experts": 16, "dense_layers": False, "first_stage": True, "last_stage": True, "dispatcher": "alltoall"}
# Sets of facts under which, taken together, every row is active once.
FACTS = {
    "train": [_TRAIN, _TRAIN | {"dispatcher": "allgather", "dense_layers": True}],
    "rollout": [{"device": "cpu", "role": role} for role in ("worker", "core", "frontend")],
}
ROWS = [pytest.param(row, id=f"{row.side}-{row.target}") for side in FACTS for row in table.rows(side)]
REBINDS = [param for param in ROWS if param.values[0].seam == "rebind"]


class Contract:
    def __init__(self, consistency=True):
        self.consistency = consistency

    def digest(self):
        return "test"


@pytest.fixture(autouse=True)
def restored():
    yield
    unapply()


def facts_for(row):
    """The first set of facts under which the row is active."""
    for facts in FACTS[row.side]:
        if row.is_active(facts, consistency=True):
            return facts
    raise AssertionError(f"{row.target} is active under none of the facts of this test: {row.active_when}")


def apply_only(row):
    return apply(row.side, Contract(), facts_for(row), rows=[row], required=())


@pytest.mark.parametrize("consistency", [True, False], ids=["consistent", "stock"])
@pytest.mark.parametrize("side, facts", [(side, facts) for side in FACTS for facts in FACTS[side]], ids=str)
def test_table_applies_and_holds(side, facts, consistency):
    result = apply(side, Contract(consistency), facts)
    verify()
    active = {row["target"] for row in result.rows if row["active"]}
    assert active == {row.target for row in table.rows(side) if row.is_active(facts, consistency)}


@pytest.mark.parametrize("side", FACTS)
def test_every_row_is_named_by_a_seam(side):
    """Else deleting the row would go unnoticed. And every seam has its row."""
    named = {target for seam in seams.required(side) for target in seam.targets}
    assert named == {row.target for row in table.rows(side)}


@pytest.mark.parametrize("row", ROWS)
def test_removed(row):
    facts = facts_for(row)
    rest = [other for other in table.rows(row.side) if other is not row]
    with pytest.raises(PatchError, match=f"{row.target}: no active row covers it"):
        apply(row.side, Contract(), facts, rows=rest)


@pytest.mark.parametrize("row", ROWS)
def test_source_changed(row, monkeypatch):
    getsource, version = inspect.getsource, importlib.metadata.version
    name = row.target.rpartition(":")[2].rpartition(".")[2]

    def changed_source(subject):
        added = f"\n{name} = None\n" if isinstance(subject, types.ModuleType) else "# changed\n"
        return getsource(subject) + added

    monkeypatch.setattr(inspect, "getsource", changed_source)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version(name) + ".1")  # counts for C functions only
    with pytest.raises(PatchError, match=f"{row.target}: its source is not the one"):
        apply_only(row)


@pytest.mark.parametrize("row", ROWS)
def test_target_renamed(row, monkeypatch):
    found = find_target(row.target)
    for holder in [found.owner, *getattr(found.owner, "__mro__", ())]:
        if found.name in vars(holder):
            monkeypatch.delattr(holder, found.name)
    with pytest.raises(PatchError, match=f"{row.target}: expected to find it"):
        apply_only(row)


@pytest.mark.parametrize("row", REBINDS)
def test_old_name_held_elsewhere_and_target_replaced_again(row, monkeypatch):
    """Held before: rebound as well. Put back afterwards, there or at the target: `verify` names both.

    The scan looks at two modules only here, for speed; test_table_applies_and_holds scans the whole process.
    """
    stock = original(row.target)
    elsewhere = types.ModuleType("imported_the_old_name_elsewhere")
    elsewhere.alias = stock
    home = sys.modules[row.target.partition(":")[0]]
    monkeypatch.setattr(holders, "live_modules", lambda: [home, elsewhere])
    apply_only(row)
    found = find_target(row.target)
    assert elsewhere.alias is not stock and elsewhere.alias is found.stock

    elsewhere.alias = stock
    descriptors = {"staticmethod": staticmethod, "classmethod": classmethod}
    monkeypatch.setattr(found.owner, found.name, descriptors.get(found.kind, lambda same: same)(stock))
    with pytest.raises(PatchError) as caught:
        verify()
    problems = "\n".join(caught.value.problems)
    assert f"{row.target} now resolves to" in problems
    assert "imported_the_old_name_elsewhere:alias holds the stock" in problems


@pytest.mark.parametrize("row", [param for param in ROWS if param.values[0].must_hit])
def test_never_used(row):
    with pytest.raises(PatchError, match=f"{row.target} .* was never used"):
        apply_only(row).assert_hit()


@pytest.mark.parametrize("row", ROWS)
def test_reasons(row):
    """A row without must_hit says why, and no row pins a hash by hand."""
    assert row.must_hit or "must_hit" in row.why
    assert not row.source_sha and row.expected_sha()
