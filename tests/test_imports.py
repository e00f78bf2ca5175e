# SPDX-License-Identifier: BSD-3-Clause
"""Who may import whom: arrows point down only (docs/ARCHITECTURE.md has the picture)."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vllm_superl8"

LINES = (
    ("tools",),
    ("plugin",),
    ("models", "platform"),
    ("quant", "attention"),
    ("patches",),
    ("checkpoint", "ops"),
    ("formats",),
    ("envs", "device", "compat"),
)
"""Top to bottom. What stands on one line does not import its neighbours."""

RANK = {name: rank for rank, line in enumerate(LINES) for name in line}
VLLM_FREE_FROM = RANK["ops"]
PRIVATE_VLLM = ("patches", "platform")
LAYOUT = "formats.layout"


def imported(tree: ast.AST, module: str) -> Iterator[str]:
    """Full names of everything that a module's source imports, at its top or inside functions."""
    package = ["vllm_superl8", *module.split(".")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: -node.level] if node.level else []
            parts = [*base, *([node.module] if node.module else [])]
            yield from (".".join([*parts, alias.name]) for alias in node.names)


def violations(module: str, source: str) -> list[str]:
    """What the source of vllm_superl8.<module> imports and may not."""
    found = []
    part = module.split(".")[0]
    for name in imported(ast.parse(source), module):
        root, *rest = name.split(".")
        if root == "vllm_superl8" and rest[0] in RANK:
            other = rest[0]
            if other != part and RANK[other] <= RANK[part]:
                found.append(f"{part} may not import {other}, which is not below it: {name}")
        if root == "vllm" and RANK[part] >= VLLM_FREE_FROM:
            found.append(f"{part} may not import vLLM: {name}")
        if root == "vllm" and part not in PRIVATE_VLLM and any(word.startswith("_") for word in rest):
            found.append(f"only {' and '.join(PRIVATE_VLLM)} may import private names of vLLM: {name}")
        if name.startswith("vllm_superl8._C") and module != "ops.registry":
            found.append(f"only ops.registry may import the compiled module: {name}")
        if module == LAYOUT and root not in sys.stdlib_module_names:
            found.append(f"{LAYOUT} may import the standard library only: {name}")
    return found


def modules() -> list[tuple[str, Path]]:
    """Dotted name inside the package, and file, of every module but the package's own __init__."""
    files = {path: path.relative_to(PACKAGE).with_suffix("").parts for path in sorted(PACKAGE.rglob("*.py"))}
    return [(".".join(parts), path) for path, parts in files.items() if parts != ("__init__",)]


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_module_imports_only_what_is_below_it(module, path):
    assert module.split(".")[0] in RANK, f"{module} is in none of the lines; put it there or move it"
    assert violations(module, path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("ops.gemm", "from vllm_superl8.quant import linear", "ops may not import quant"),
        ("ops.gemm", "def f():\n    from vllm_superl8.checkpoint import x", "ops may not import checkpoint"),
        ("ops.gemm", "import vllm.logger", "ops may not import vLLM"),
        ("quant.linear", "import vllm_superl8.attention.backend", "quant may not import attention"),
        ("quant.linear", "from ..platform import volta", "quant may not import platform"),
        ("quant.__init__", "from ..platform import volta", "quant may not import platform"),
        ("quant.linear", "from .. import platform", "quant may not import platform"),
        ("quant.linear", "from vllm.utils import _secret", "private names of vLLM"),
        ("quant.linear", "import vllm._custom_ops", "private names of vLLM"),
        ("tools.doctor", "from vllm_superl8 import _C", "compiled module"),
        ("formats.layout", "import torch", "standard library only"),
        ("device", "from vllm_superl8 import envs", "device may not import envs"),
    ],
)
def test_rule_refuses_a_wrong_arrow(module, source, expected):
    assert any(expected in text for text in violations(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tools.doctor", "from vllm_superl8 import plugin, device, __version__\nimport json, torch, vllm"),
        ("platform.volta", "from vllm._custom_ops import _x\nfrom vllm_superl8.attention import backend"),
        ("quant.moe", "from vllm_superl8.quant.linear import a\nfrom .options import b"),
        ("ops.registry", "from vllm_superl8 import _C, envs"),
    ],
)
def test_rule_accepts_a_right_arrow(module, source):
    assert violations(module, source) == []
