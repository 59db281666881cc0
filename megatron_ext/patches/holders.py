"""Find every place in the process that holds a foreign object, so that a rebind reaches all of them.

`from module import name` copies the object into another namespace; so do class attributes, default arguments, decorators
and module-level tables. A rebind which misses one leaves part of the engine on the stock path without a word. The scan
covers every module alive in the process (in sys.modules or not) and what hangs directly on it:

- names of modules, attributes of classes (nested ones too, also inside staticmethod/classmethod),
- items of module-level dicts and lists,
- default arguments and closure cells of functions.

Module-level tuples, sets, frozensets and partials cannot be changed in place: they are returned with no way to write.
Instances made earlier are out of reach, which is why `enable` comes before the model is built and hits are counted.
"""

import ast
import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OWN_PACKAGE = "megatron_ext"
# What neither is a stock object's holder nor leads to one.
_LEAVES = frozenset((type(None), bool, int, float, complex, str, bytes, types.ModuleType, types.BuiltinFunctionType, property))
# Interned or shared by the whole process, so identity does not tell where a value came from.
_SHARED_TYPES = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, type(...), type(NotImplemented))


@dataclass(frozen=True)
class Place:
    """One place that holds a stock object. `write` is None where it cannot be changed."""

    target: str
    label: str  # package.module:name
    write: Callable[[Any], None] | None

    @property
    def is_ours(self) -> bool:
        return self.label.partition(":")[0].split(".")[0] == _OWN_PACKAGE


def find_holders(stock: dict[str, Any]) -> list[Place]:
    """Every place that holds one of the `stock` objects (target -> object).

    The targets' own attributes are among them, except for values such as None or True, which are followed by the
    from-import statements in the modules' sources.
    """
    wanted = {id(value): target for target, value in stock.items() if not isinstance(value, _SHARED_TYPES)}
    by_import = {target: value for target, value in stock.items() if isinstance(value, _SHARED_TYPES)}
    if not stock:
        return []
    places: list[Place] = []
    seen: set[int] = set()
    for module in live_modules():
        name = str(vars(module).get("__name__"))
        places += _scan_namespace(module, name, wanted, seen)
        places += _imported_values(module, name, by_import)
    return places


def live_modules() -> list[types.ModuleType]:
    """Every module object of the process: those in sys.modules, and those dropped from it but still alive."""
    found = {id(item): item for item in list(sys.modules.values()) if isinstance(item, types.ModuleType)}
    found.update((id(item), item) for item in gc.get_objects() if issubclass(type(item), types.ModuleType))
    return list(found.values())


def foreign_subclasses(stock: type) -> list[str]:
    """Subclasses outside this package: replacing the name of their base leaves them on the stock base."""
    names = (f"{cls.__module__}:{cls.__qualname__}" for cls in type.__subclasses__(stock))
    return sorted(name for name in names if not name.startswith(_OWN_PACKAGE + "."))


def _scan_namespace(owner: Any, label: str, wanted: dict[int, str], seen: set[int]) -> Iterator[Place]:
    """Places in the namespace of a module or class and in what hangs on it."""
    namespace = dict(vars(owner))
    is_module = issubclass(type(owner), types.ModuleType)
    separator = ":" if is_module else "."
    if not wanted.keys().isdisjoint(map(id, namespace.values())):
        for name, value in namespace.items():
            if id(value) in wanted:
                yield Place(wanted[id(value)], f"{label}{separator}{name}", functools.partial(setattr, owner, name))
    # type(), not isinstance(): lazy proxies lie about their class. A process has a million names, few are of interest.
    for name, value in [item for item in namespace.items() if type(item[1]) not in _LEAVES]:
        kind = type(value)
        if kind is staticmethod or kind is classmethod:
            if id(value.__func__) in wanted:
                write = functools.partial(_write_descriptor, owner, name, kind)
                yield Place(wanted[id(value.__func__)], f"{label}{separator}{name}", write)
            value, kind = value.__func__, type(value.__func__)
        if kind is types.FunctionType:
            if value.__defaults__ or value.__kwdefaults__ or value.__closure__:
                yield from _scan_function(value, f"{label}{separator}{name}", wanted, seen)
        elif issubclass(kind, type):
            if id(value) not in seen and id(value) not in wanted:
                seen.add(id(value))
                yield from _scan_namespace(value, f"{value.__module__}:{value.__qualname__}", wanted, seen)
        elif is_module and kind in _CONTAINER_SCANS:
            yield from _CONTAINER_SCANS[kind](value, f"{label}:{name}", wanted)


def _scan_function(function: types.FunctionType, label: str, wanted: dict[int, str], seen: set[int]) -> Iterator[Place]:
    """Default arguments and closure cells."""
    if id(function) in seen:
        return
    seen.add(id(function))
    for index, value in enumerate(function.__defaults__ or ()):
        if id(value) in wanted:
            yield Place(wanted[id(value)], f"{label}(default {index})", functools.partial(_write_default, function, index))
    for name, value in (function.__kwdefaults__ or {}).items():
        if id(value) in wanted:
            yield Place(wanted[id(value)], f"{label}(default {name})", functools.partial(function.__kwdefaults__.__setitem__, name))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        if id(value) in wanted:
            yield Place(wanted[id(value)], f"{label}(closure {name})", functools.partial(setattr, cell, "cell_contents"))


def _scan_dict(table: dict, label: str, wanted: dict[int, str]) -> Iterator[Place]:
    if wanted.keys().isdisjoint(map(id, list(table.values()))):
        return
    for key, value in list(table.items()):
        if id(value) in wanted:
            yield Place(wanted[id(value)], f"{label}[{key!r}]", functools.partial(table.__setitem__, key))


def _scan_list(items: list, label: str, wanted: dict[int, str]) -> Iterator[Place]:
    if wanted.keys().isdisjoint(map(id, items)):
        return
    for index, value in enumerate(items):
        if id(value) in wanted:
            yield Place(wanted[id(value)], f"{label}[{index}]", functools.partial(items.__setitem__, index))


def _scan_fixed(items: Any, label: str, wanted: dict[int, str]) -> Iterator[Place]:
    yield from (Place(wanted[id(value)], label, None) for value in tuple(items) if id(value) in wanted)


def _scan_partial(call: functools.partial, label: str, wanted: dict[int, str]) -> Iterator[Place]:
    yield from _scan_fixed((call.func, *call.args, *call.keywords.values()), label, wanted)


_CONTAINER_SCANS = {
    dict: _scan_dict, list: _scan_list, tuple: _scan_fixed, set: _scan_fixed, frozenset: _scan_fixed,
    functools.partial: _scan_partial,
}  # fmt: skip


def _write_descriptor(owner: Any, name: str, descriptor: type, value: Any) -> None:
    setattr(owner, name, descriptor(value))


def _write_default(function: types.FunctionType, index: int, value: Any) -> None:
    defaults = list(function.__defaults__)
    defaults[index] = value
    function.__defaults__ = tuple(defaults)


def _imported_values(module: types.ModuleType, label: str, by_import: dict[str, Any]) -> Iterator[Place]:
    """Names bound by `from target_module import NAME` where the value itself (None, True, 8) cannot tell."""
    candidates = {}
    for target, value in by_import.items():
        home, _, name = target.partition(":")
        if label != home and any(held is value for held in vars(module).values()):
            candidates[home, name] = target
    if not candidates:
        return
    for home, name, alias in _from_imports(module, {name for _, name in candidates}):
        target = candidates.get((home, name))
        if target is not None and vars(module).get(alias, _ABSENT) is by_import[target]:
            yield Place(target, f"{label}:{alias}", functools.partial(setattr, module, alias))


_ABSENT = object()


def _from_imports(module: types.ModuleType, names: set[str]) -> Iterator[tuple[str, str, str]]:
    """(module, name, alias) of the module's own from-imports of one of `names`; nothing without source."""
    file = vars(module).get("__file__")
    if not isinstance(file, str) or not file.endswith(".py"):
        return
    source = Path(file).read_bytes()
    if not any(name.encode() in source for name in names):
        return
    package = (vars(module).get("__package__") or "").split(".")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            home = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((home, alias.name, alias.asname or alias.name) for alias in node.names if alias.name in names)
