"""Look up a foreign name without disturbing it, and take the fingerprint of its source."""

import ast
import hashlib
import importlib
import importlib.metadata
import inspect
import sys
import types
from dataclasses import dataclass
from typing import Any

from megatron_ext.patches.patch import split_import_string


@dataclass(frozen=True)
class Target:
    """A foreign attribute as found. `raw` is the stored attribute, a staticmethod still wrapped as such."""

    owner: Any  # module or class
    name: str
    raw: Any
    inherited: bool  # the class only inherits it: undoing a rebind deletes the attribute again

    @property
    def kind(self) -> str:
        """class | staticmethod | classmethod | property | function | value"""
        if isinstance(self.raw, type):
            return "class"
        for descriptor in (staticmethod, classmethod, property):
            if isinstance(self.raw, descriptor):
                return descriptor.__name__
        return "function" if callable(self.raw) else "value"

    @property
    def stock(self) -> Any:
        """What a replacement calls: the function inside a staticmethod or classmethod, else the attribute itself."""
        return self.raw.__func__ if isinstance(self.raw, (staticmethod, classmethod)) else self.raw


def find_target(target: str) -> Target:
    """Resolve `package.module:Class.method`. LookupError says which part is missing; import errors pass through."""
    module_name, path = split_import_string(target)
    owner = importlib.import_module(module_name)
    for part in path[:-1]:
        owner = _static_attribute(owner, part)
        if not isinstance(owner, (type, types.ModuleType)):
            raise LookupError(f"{part!r} in {target!r} is a {type(owner).__name__}, expected a class")
    raw = _static_attribute(owner, path[-1])
    return Target(owner, path[-1], raw, inherited=isinstance(owner, type) and path[-1] not in vars(owner))


def load_object(import_string: str) -> Any:
    """Import our replacement: the plain attribute, descriptors kept."""
    return find_target(import_string).raw


def fingerprint(target: str, found: Target, distribution: str) -> str:
    """sha256 of the target's source text.

    Functions and classes: `inspect.getsource`. Where decorators wrap a function, each layer's module and name count too,
    so that a wrapper put on later by somebody else is seen. Module-level values, and callables without a source of
    their own: the statements which bind the name in its module. What has no Python source at all (C functions): the
    distribution's version and the qualified name, which says no more than "the same release".
    """
    return hashlib.sha256(_source_text(target, found, distribution).encode()).hexdigest()


def signature_text(found: Target) -> str:
    """The call signature as text; "" for values and for callables that do not tell."""
    if found.kind in ("value", "property"):
        return ""
    try:
        return str(inspect.signature(found.stock))
    except (TypeError, ValueError):
        return ""


def _static_attribute(owner: Any, name: str) -> Any:
    if isinstance(owner, types.ModuleType):
        if name not in vars(owner) and not hasattr(owner, name):  # hasattr: a module may load the name lazily
            raise LookupError(f"module {owner.__name__!r} has no attribute {name!r}")
        return vars(owner)[name] if name in vars(owner) else getattr(owner, name)
    try:
        return inspect.getattr_static(owner, name)
    except AttributeError:
        raise LookupError(f"class {owner.__module__}.{owner.__qualname__} has no attribute {name!r}") from None


def _source_text(target: str, found: Target, distribution: str) -> str:
    try:
        if found.kind == "property":
            accessors = (found.raw.fget, found.raw.fset, found.raw.fdel)
            return "".join(_layers(accessor) for accessor in accessors if accessor is not None)
        if found.kind != "value":
            return _layers(found.stock)
    except (TypeError, OSError):
        pass  # no source of its own
    statements = _binding_statements(target)
    if statements:
        return statements
    version = importlib.metadata.version(distribution).partition("+")[0]  # "+cpu" and "+cu130" are one release
    return f"binary {distribution} {version} {target} {type(found.raw).__name__}"


def _layers(function: Any) -> str:
    """Source of the innermost function, after one line for every decorator layer around it."""
    lines = []
    seen = set()
    while inspect.isfunction(function) and hasattr(function, "__wrapped__") and id(function) not in seen:
        seen.add(id(function))
        lines.append(f"# wrapped by {function.__globals__.get('__name__')}:{function.__code__.co_qualname}\n")
        function = function.__wrapped__
    return "".join(lines) + inspect.getsource(function)


def _binding_statements(target: str) -> str:
    """Source of the statements which bind the target's name in its module or class body; "" if there are none."""
    module_name, path = split_import_string(target)
    try:
        source = inspect.getsource(sys.modules[module_name])
    except (TypeError, OSError):
        return ""
    bodies = [ast.parse(source).body]
    for part in path[:-1]:
        bodies = [node.body for body in bodies for node in _statements(body)
                  if isinstance(node, ast.ClassDef) and node.name == part]  # fmt: skip
    found = [node for body in bodies for node in _statements(body) if path[-1] in _bound_names(node)]
    parts = [part for node in found for part in (*getattr(node, "decorator_list", []), node)]
    return "\n".join(ast.get_source_segment(source, part) or "" for part in parts)


def _statements(body: list[ast.stmt]):
    """All statements of a module or class body, those inside if/try/with too, but not those of functions and classes."""
    for node in body:
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for field in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _bound_names(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {name.id for target in targets if target is not None for name in ast.walk(target) if isinstance(name, ast.Name)}
