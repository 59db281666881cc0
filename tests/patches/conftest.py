"""A small foreign package, made anew for every test, and the pieces to patch it with."""

import ast
import hashlib
import importlib
import sys
import textwrap
import types

import pytest

from megatron_ext.patches import Patch, unapply

FILES = {
    "core.py": '''
        """The foreign package's definitions."""
        LIMIT = None
        WIDTH = 8

        def add(a, b):
            return a + b

        def scale(a):
            return 2 * a

        class Layer:
            def forward(self, x):
                return x + 1

            @staticmethod
            def make(x):
                return ("stock", x)

            @classmethod
            def named(cls, x):
                return (cls.__name__, x)

        class Norm:
            def forward(self, x):
                return x
    ''',
    "user.py": '''
        """Holds the names of core in every way the scan knows."""
        from fake_engine.core import LIMIT as CAP
        from fake_engine.core import Norm as StockNorm
        from fake_engine.core import add as plus

        TABLE = {"add": plus}
        LIST = [plus]

        class Holder:
            operation = staticmethod(plus)

            class Inner:
                operation = staticmethod(plus)

        def with_default(a, b, operation=plus, *, again=plus):
            return operation(a, b), again(a, b)

        def _closure(operation):
            return lambda a, b: operation(a, b)

        closed = _closure(plus)
    ''',
    "__init__.py": "",
}
OURS = '''
    """Our side of the test: lies inside the package's name space, as the real adapters do."""
    from megatron_ext.patches import hit, original
    from fake_engine import core

    NEW_LIMIT = 7

    def add(a, b):
        return ("ours", original("fake_engine.core:add")(a, b))

    def scale(a):
        return ("ours", a)

    def forward(self, x):
        return ("ours", original("fake_engine.core:Layer.forward")(self, x))

    def make(x):
        return ("ours", x)

    def named(cls, x):
        return ("ours", cls.__name__, x)

    class Norm(core.Norm):
        def forward(self, x):
            hit("fake_engine.core:Norm")
            return ("ours", x)

    def wrong_signature(a):
        return a
'''


class Engine:
    """The foreign package on disk and in sys.modules."""

    def __init__(self, root):
        self.root = root / "fake_engine"
        self.root.mkdir()
        for name, text in FILES.items():
            (self.root / name).write_text(textwrap.dedent(text))

    def module(self, name):
        return importlib.import_module(f"fake_engine.{name}")

    def edit(self, name, old, new):
        """Change a source file before it is imported, as an upgrade would."""
        path = self.root / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def add_module(self, name, text):
        (self.root / f"{name}.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return self.module(name)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made = Engine(tmp_path)
    yield made
    unapply()
    for name in [name for name in sys.modules if name.split(".")[0] in ("fake_engine",) or name == "megatron_ext.fake_ours"]:
        del sys.modules[name]


@pytest.fixture
def ours(engine):
    """Import our replacements as megatron_ext.fake_ours (call it once the foreign package is as the test wants it)."""

    def load():
        module = types.ModuleType("megatron_ext.fake_ours")
        exec(textwrap.dedent(OURS), vars(module))
        sys.modules[module.__name__] = module
        return module

    return load


class Contract:
    consistency = True

    def __init__(self, consistency=True):
        self.consistency = consistency

    def digest(self):
        return f"digest-{self.consistency}"


@pytest.fixture
def contract():
    return Contract


def source_sha(name):
    """The fingerprint a row pins, taken here from the text of FILES and not by the code under test."""
    text = textwrap.dedent(FILES["core.py"])
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if getattr(node, "name", None) == name.rpartition(".")[2]:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return hashlib.sha256("".join(lines[first - 1 : node.end_lineno]).encode()).hexdigest()
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return hashlib.sha256(ast.get_source_segment(text, node).encode()).hexdigest()
    raise AssertionError(f"{name} is not in core.py")


@pytest.fixture
def row():
    def make(name, replacement=None, **changes):
        fields = dict(
            target=f"fake_engine.core:{name}",
            replacement=f"megatron_ext.fake_ours:{replacement or name.rpartition('.')[2]}",
            side="train", seam="rebind", versions=">=1", distribution="pytest", why="test", upstream="none",
            remove_when="never", source_sha=source_sha(name),
        )  # fmt: skip
        return Patch(**(fields | changes))

    return make
