"""The direction of imports (docs: DESIGN, layers), and that importing the package does nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatron_ext"

# What each layer may import of the package, besides itself. Lower layers never import higher ones.
LOW = {"reduction_order", "contract"}
NUMERICS = LOW | {"reference", "ops", "collectives"}
PROCESSES = {"world", "service"}
ENGINES = NUMERICS | PROCESSES | {"weight_digest", "patches", "platform", "probe", "__init__"}
ALLOWED = {
    "__init__": NUMERICS | {"patches"},
    "reduction_order": set(),
    "contract": {"reduction_order"},
    "reference": LOW,
    "ops": LOW | {"reference"},
    "collectives": LOW | {"reference", "ops"},
    "platform": LOW | {"patches"},
    "probe": LOW | {"reference"},
    "patches": set(),
    "weight_digest": set(),
    "tokenizer": set(),
    "world": set(),
    "service": set(),
    "checkpoint": {"reduction_order", "weight_digest"},
    "train": ENGINES | {"checkpoint"},
    "rollout": ENGINES,
    "parity": ENGINES | {"checkpoint", "tokenizer", "train", "rollout"},
    "rl": ENGINES | {"checkpoint", "tokenizer", "train", "rollout", "parity"},
}
# Modules of the two engines may be imported by the adapters only; everything below runs without them.
ENGINE_PACKAGES = {"megatron", "vllm", "mindspeed", "transformers"}
WITHOUT_ENGINES = NUMERICS | PROCESSES | {"patches", "probe", "__init__"}


def layer_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path):
    """Full names of everything a file imports, inside functions too, but not under TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    type_only = {
        id(inner) for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }  # fmt: skip
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
        if id(node) in type_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            base = base if node.level else node.module
            yield from (f"{base}.{alias.name}" for alias in node.names)


FILES = sorted(PACKAGE.rglob("*.py"))
LAYERS = {layer_of(path) for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_direction_of_imports(path):
    layer = layer_of(path)
    assert layer in ALLOWED, f"{path} lies in no known layer; add it to ALLOWED with what it may import"
    for name in imported_modules(path):
        top, _, rest = name.partition(".")
        if top in ENGINE_PACKAGES:
            assert layer not in WITHOUT_ENGINES, f"{path} imports {name}; only the adapters may"
        if top == "megatron_ext":
            target = rest.partition(".")[0]
            target = target if target in LAYERS else "__init__"  # a name that the package itself defines
            assert target == layer or target in ALLOWED[layer], f"{path} imports {name}; {layer} may import {sorted(ALLOWED[layer])}"


def test_train_and_rollout_do_not_know_each_other():
    for path in FILES:
        other = {"train": "rollout", "rollout": "train"}.get(layer_of(path))
        assert other is None or not any(name.startswith(f"megatron_ext.{other}") for name in imported_modules(path)), path


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("module", ["megatron_ext", "megatron_ext.patches"])
def test_import_is_light(module):
    result = run_python(f"import sys, {module}\nprint(*{{name.partition('.')[0] for name in sys.modules}})")
    assert result.returncode == 0, result.stderr
    assert not {"torch", "numpy", *ENGINE_PACKAGES} & set(result.stdout.split())


@pytest.mark.parametrize("module", ["megatron_ext.ops", "megatron_ext.collectives", "megatron_ext.reference"])
def test_numerics_do_not_touch_the_process(module):
    """No process group, no engine, no thread setting, no environment variable."""
    result = run_python(
        f"import os, sys, torch\nbefore = torch.get_num_threads(), dict(os.environ), torch.get_default_dtype()\n"
        f"import {module}\n"
        f"assert before == (torch.get_num_threads(), dict(os.environ), torch.get_default_dtype())\n"
        f"assert not torch.distributed.is_initialized()\n"
        f"print(*{{name.partition('.')[0] for name in sys.modules}})"
    )
    assert result.returncode == 0, result.stderr
    assert not ENGINE_PACKAGES & set(result.stdout.split())
