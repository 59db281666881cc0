"""The patch machinery on a small foreign package: what it binds, and everything it must refuse."""

import importlib
import sys
import types

import pytest

from megatron_ext.patches import PatchError, apply, hit, original, report, unapply, verify
from megatron_ext.patches.seams import Seam

FUNCTION_NAMES = ("add", "Layer.forward", "Layer.make", "Layer.named")
ADD = "fake_engine.core:add"


def apply_rows(contract, *rows, facts=None, required=(), consistency=True):
    return apply("train", contract(consistency), facts or {}, rows=rows, required=required)


def assert_refused(contract, *rows, match, **kwargs):
    """The rows are refused with one error that names `match`, and nothing was bound."""
    core = sys.modules.get("fake_engine.core") or importlib.import_module("fake_engine.core")
    before = dict(vars(core))
    with pytest.raises(PatchError, match=match) as caught:
        apply_rows(contract, *rows, **kwargs)
    assert {name: vars(core).get(name) for name in before} == before
    assert report().rows == []
    return str(caught.value)


class TestBinding:
    def test_functions_methods_and_values(self, engine, ours, contract, row):
        core = engine.module("core")
        ours()
        apply_rows(contract, *(row(name) for name in FUNCTION_NAMES), row("LIMIT", "NEW_LIMIT", must_hit=False))
        assert core.add(1, 2) == ("ours", 3)
        assert core.Layer().forward(4) == ("ours", 5)
        assert core.Layer.make(6) == core.Layer().make(6) == ("ours", 6)
        assert core.Layer.named(7) == core.Layer().named(7) == ("ours", "Layer", 7)
        assert core.LIMIT == 7

    def test_every_holder_is_rebound(self, engine, ours, contract, row):
        user = engine.module("user")
        ours()
        apply_rows(contract, row("add"), row("LIMIT", "NEW_LIMIT", must_hit=False))
        new = ("ours", 3)
        assert user.plus(1, 2) == user.TABLE["add"](1, 2) == user.LIST[0](1, 2) == new
        assert user.Holder.operation(1, 2) == user.Holder.Inner().operation(1, 2) == new
        assert user.with_default(1, 2) == (new, new)
        assert user.closed(1, 2) == new
        assert user.CAP == 7
        verify()

    def test_class_is_rebound_and_counts_itself(self, engine, ours, contract, row):
        user = engine.module("user")
        ours()
        apply_rows(contract, row("Norm"))
        with pytest.raises(PatchError, match="fake_engine.core:Norm .* never used"):
            report().assert_hit()
        assert user.StockNorm().forward(1) == ("ours", 1)
        report().assert_hit()
        verify()

    def test_module_dropped_from_sys_modules_is_rebound(self, engine, ours, contract, row):
        user = engine.module("user")
        del sys.modules["fake_engine.user"]
        ours()
        apply_rows(contract, row("add"))
        assert user.plus(1, 2) == ("ours", 3)

    def test_later_import_gets_ours(self, engine, ours, contract, row):
        engine.module("core")
        ours()
        apply_rows(contract, row("add"))
        assert engine.module("user").plus(1, 2) == ("ours", 3)
        verify()

    def test_inherited_method_is_bound_on_the_subclass_only(self, engine, ours, contract, row):
        core = engine.module("core")
        made = engine.add_module("sub", "from fake_engine import core\nclass Sub(core.Layer):\n    pass\n")
        ours()
        apply_rows(contract, row("Layer.forward", target="fake_engine.sub:Sub.forward"))
        assert core.Layer().forward(1) == 2
        assert made.Sub().forward(1) == ("ours", 2)
        unapply()
        assert "forward" not in vars(made.Sub) and made.Sub().forward(1) == 2

    def test_unapply_restores_everything(self, engine, ours, contract, row):
        core, user = engine.module("core"), engine.module("user")
        before = {module: dict(vars(module)) for module in (core, user)}
        classes = {cls: dict(vars(cls)) for cls in (core.Layer, core.Norm)}
        ours()
        apply_rows(contract, *(row(name) for name in (*FUNCTION_NAMES, "Norm")), row("LIMIT", "NEW_LIMIT", must_hit=False))
        unapply()
        assert all(dict(vars(owner)) == names for owner, names in (before | classes).items())
        assert user.with_default(1, 2) == (3, 3) and user.closed(1, 2) == 3 and user.Holder.operation(1, 2) == 3
        assert report().rows == []

    def test_native_seam_is_verified_but_not_rebound(self, engine, ours, contract, row):
        core = engine.module("core")
        stock = core.Norm
        ours()
        apply_rows(contract, row("Norm", seam="spec"))
        assert core.Norm is stock
        hit("fake_engine.core:Norm")
        report().assert_hit()

    def test_original(self, engine, ours, contract, row):
        core = engine.module("core")
        stock = core.add, vars(core.Layer)["make"].__func__
        ours()
        assert original(ADD) is stock[0]
        apply_rows(contract, row("add"), row("Layer.make"))
        assert (original(ADD), original("fake_engine.core:Layer.make")) == stock


class TestHits:
    def test_counted_per_row(self, engine, ours, contract, row):
        core = engine.module("core")
        ours()
        apply_rows(contract, row("add"), row("scale"))
        core.add(1, 2), core.add(1, 2)
        assert {item["target"]: item["hits"] for item in report().rows} == {ADD: 2, "fake_engine.core:scale": 0}
        with pytest.raises(PatchError, match="fake_engine.core:scale .* never used") as caught:
            report().assert_hit()
        assert ADD not in str(caught.value)

    def test_row_that_need_not_be_hit(self, engine, ours, contract, row):
        ours()
        apply_rows(contract, row("add", must_hit=False)).assert_hit()

    def test_unknown_target(self, engine, ours, contract, row):
        ours()
        apply_rows(contract, row("add"))
        with pytest.raises(PatchError, match="no active row .* fake_engine.core:scale|fake_engine.core:scale.*no active row"):
            hit("fake_engine.core:scale")

    def test_value_must_not_be_counted(self, engine, ours, contract, row):
        engine.module("core")
        ours()
        assert_refused(contract, row("LIMIT", "NEW_LIMIT"), match="use cannot be counted")


class TestActivity:
    def test_condition_over_facts(self, engine, ours, contract, row):
        core = engine.module("core")
        ours()
        rows = row("add", active_when="ep > 1 and dispatcher == 'alltoall'"), row("scale", active_when="dispatcher in ('x',)")
        result = apply_rows(contract, *rows, facts={"ep": 2, "dispatcher": "alltoall"})
        assert [item["active"] for item in result.rows] == [True, False]
        assert core.add(1, 2)[0] == "ours" and core.scale(2) == 4

    def test_missing_fact(self, engine, ours, contract, row):
        ours()
        assert_refused(contract, row("add", active_when="ep > 1"), match=r"needs the facts \['ep'\]")

    @pytest.mark.parametrize("condition", ["__import__('os')", "ep.real", "[x for x in (1,)]", "ep >", "ep + 1"])
    def test_condition_only_compares(self, row, condition):
        with pytest.raises(PatchError, match="condition"):
            row("add", active_when=condition)

    def test_without_consistency_only_the_device_rows(self, engine, ours, contract, row):
        core = engine.module("core")
        ours()
        apply_rows(contract, row("add"), row("scale", consistency_only=False), consistency=False)
        assert core.add(1, 2) == 3 and core.scale(2) == ("ours", 2)

    def test_second_apply(self, engine, ours, contract, row):
        ours()
        rows = (row("add"),)
        first = apply_rows(contract, *rows)
        assert apply_rows(contract, *rows).rows == first.rows
        with pytest.raises(PatchError, match="already enabled"):
            apply_rows(contract, *rows, facts={"ep": 2})
        with pytest.raises(PatchError, match="side is 'both'"):
            apply("both", contract(), {}, rows=rows, required=())


class TestRefused:
    def test_changed_source(self, engine, ours, contract, row):
        engine.edit("core.py", "return a + b", "return b + a")
        ours()
        message = assert_refused(contract, row("add"), match="fake_engine.core:add.*not the one")
        assert "record_patches.py" in message

    @pytest.mark.parametrize("name", [*FUNCTION_NAMES, "Norm", "LIMIT"])
    def test_changed_source_of_every_kind(self, engine, ours, contract, row, name):
        changes = {"add": ("a + b", "b + a"), "Layer.forward": ("x + 1", "1 + x"), "Layer.make": ('"stock"', '"stack"'),
                   "Layer.named": ("(cls.__name__, x)", "(cls.__qualname__, x)"),
                   "Norm": ("return x\n", "return +x\n"), "LIMIT": ("LIMIT = None", "LIMIT = False")}  # fmt: skip
        engine.edit("core.py", *changes[name])
        ours()
        new_name = "NEW_LIMIT" if name == "LIMIT" else None
        assert_refused(contract, row(name, new_name, must_hit=name != "LIMIT"), match="not the one")

    def test_wrapped_by_somebody_else(self, engine, ours, contract, row):
        core = engine.module("core")
        engine.add_module("patcher", """
            import functools
            from fake_engine import core
            def wrap(function):
                @functools.wraps(function)
                def wrapper(*args):
                    return function(*args)
                return wrapper
            core.add = wrap(core.add)
        """)  # fmt: skip
        assert core.add(1, 2) == 3
        ours()
        assert_refused(contract, row("add"), match="not the one")

    def test_renamed_target(self, engine, ours, contract, row):
        engine.edit("core.py", "def add(", "def plus(")
        ours()
        # user.py cannot be imported then, core can
        assert_refused(contract, row("add"), match="fake_engine.core:add: expected to find it.*has no attribute 'add'")

    def test_renamed_class_of_a_method(self, engine, ours, contract, row):
        engine.edit("core.py", "class Layer:", "class Stratum:")
        ours()
        assert_refused(contract, row("Layer.forward"), match="has no attribute 'Layer'")

    def test_module_gone(self, engine, ours, contract, row):
        ours()
        assert_refused(contract, row("add", target="fake_engine.moved:add"), match="ModuleNotFoundError")

    def test_wrong_version(self, engine, ours, contract, row):
        ours()
        assert_refused(contract, row("add", versions=">=1,<2"), match=r"written for pytest >=1,<2, found \d")
        assert_refused(contract, row("add", versions="about one"), match="no PEP 440 specifier")
        assert_refused(contract, row("add", distribution="no-such-engine"), match="not installed")

    def test_two_rows_one_target(self, engine, ours, contract, row):
        ours()
        assert_refused(contract, row("add"), row("add", "scale"), match="claimed by two active rows")

    def test_two_rows_excluding_each_other(self, engine, ours, contract, row):
        core = engine.module("core")
        ours()
        apply_rows(contract, row("add", active_when="ep > 1"), row("add", "wrong_signature", active_when="ep == 1"), facts={"ep": 2})
        assert core.add(1, 2) == ("ours", 3)

    def test_one_object_under_two_names(self, engine, ours, contract, row):
        engine.module("user")
        ours()
        second = row("add", target="fake_engine.user:plus")
        assert_refused(contract, row("add"), second, match="are one object")

    def test_row_inside_another(self, engine, ours, contract, row):
        engine.module("core")
        ours()
        assert_refused(contract, row("Norm"), row("Norm.forward", "forward", source_sha="0" * 64), match="lies inside")

    def test_foreign_subclass(self, engine, ours, contract, row):
        engine.add_module("sub", "from fake_engine import core\nclass Sub(core.Norm):\n    pass\n")
        ours()
        assert_refused(contract, row("Norm"), match="fake_engine.sub:Sub is a subclass")
        apply_rows(contract, row("Norm", keeps_old=("fake_engine.sub:Sub",)))

    @pytest.mark.parametrize("expression", ["(plus,)", "{plus}", "frozenset([plus])", "functools.partial(plus, 1)"])
    def test_holder_that_cannot_be_changed(self, engine, ours, contract, row, expression):
        engine.add_module("fixed", f"import functools\nfrom fake_engine.core import add as plus\nHELD = {expression}\n")
        ours()
        assert_refused(contract, row("add"), match="fake_engine.fixed:HELD holds the stock")
        apply_rows(contract, row("add", keeps_old=("fake_engine.fixed:HELD",)))
        verify()

    def test_own_module_imports_the_stock_function(self, engine, ours, contract, row):
        core = engine.module("core")
        vars(ours())["stock_add"] = core.add
        assert_refused(contract, row("add"), match="megatron_ext.fake_ours:stock_add holds the stock.*original")

    def test_replacement_missing_or_of_another_kind(self, engine, ours, contract, row):
        ours()
        assert_refused(contract, row("add", "gone"), match="megatron_ext.fake_ours:gone cannot be imported")
        assert_refused(contract, row("Norm", "add"), match="is a class, its replacement .* a function")
        assert_refused(contract, row("add", "NEW_LIMIT"), match="is a function, its replacement .* a int")

    def test_signature(self, engine, ours, contract, row):
        ours()
        assert_refused(contract, row("add", "wrong_signature"), match=r"does not take \['b'\]")

    def test_not_recorded(self, engine, ours, contract, row):
        ours()
        assert_refused(contract, row("add", source_sha=""), match="no source fingerprint was recorded")

    def test_bad_fields(self, row):
        for changes in ({"side": "both"}, {"seam": "magic"}, {"why": " "}, {"target": "no_colon"}, {"replacement": "a:b c"}):
            with pytest.raises(PatchError, match=next(iter(changes))):
                row("add", **changes)

    def test_all_problems_in_one_error_and_nothing_bound(self, engine, ours, contract, row):
        engine.edit("core.py", "return a + b", "return b + a")
        ours()
        message = assert_refused(contract, row("Layer.forward"), row("add"), row("scale", versions="<1"), match="2 problems")
        assert "fake_engine.core:add" in message and "fake_engine.core:scale" in message

    def test_failing_bind_takes_the_others_back(self, engine, ours, contract, row):
        core = engine.module("core")
        frozen = types.new_class("Frozen", (), {"metaclass": _frozen_metaclass()}, lambda body: body.update(add=core.scale))
        vars(core)["Frozen"] = frozen
        ours()
        bad = row("scale", target="fake_engine.core:Frozen.add", source_sha=row("scale").source_sha)
        assert_refused(contract, row("add"), bad, match="Frozen.add: binding .* failed")


class TestSeams:
    SEAM = Seam("addition", "order of the sum", ("fake_engine.core:add",))

    def test_removed_row(self, engine, ours, contract, row):
        ours()
        assert_refused(contract, row("scale"), required=[self.SEAM], match="fake_engine.core:add: no active row covers it")
        apply_rows(contract, row("scale"), row("add"), required=[self.SEAM])

    def test_row_switched_off_by_its_condition(self, engine, ours, contract, row):
        ours()
        off = row("add", active_when="ep > 1")
        assert_refused(contract, off, required=[self.SEAM], facts={"ep": 1}, match="no active row covers it")

    def test_seam_not_in_force(self, engine, ours, contract, row):
        ours()
        seam = Seam("addition", "order", (ADD,), active_when="ep > 1")
        apply_rows(contract, row("scale"), required=[seam], facts={"ep": 1})

    def test_device_seam_also_without_consistency(self, engine, ours, contract, row):
        ours()
        seams = [self.SEAM, Seam("scaling", "no such device", ("fake_engine.core:scale",), consistency_only=False)]
        assert_refused(contract, required=seams, consistency=False, match="1 problem .*\n.*core:scale: no active row")


class TestVerify:
    def test_replaced_after_the_fact(self, engine, ours, contract, row):
        core = engine.module("core")
        ours()
        apply_rows(contract, row("add"))
        verify()
        ours_bound, core.add = core.add, lambda a, b: 0
        with pytest.raises(PatchError, match="fake_engine.core:add now resolves to .*lambda"):
            verify()
        core.add = ours_bound

    def test_stock_object_put_back_elsewhere(self, engine, ours, contract, row):
        user = engine.module("user")
        ours()
        apply_rows(contract, row("add"))
        user.plus = original(ADD)
        with pytest.raises(PatchError, match="fake_engine.user:plus holds the stock"):
            verify()

    def test_nothing_applied(self):
        verify()


def _frozen_metaclass():
    class Frozen(type):
        def __setattr__(cls, name, value):
            raise TypeError("immutable")

    return Frozen
