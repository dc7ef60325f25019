"""What FlashInfer's sources say of its ICP functions, read without importing them.

To import FlashInfer one needs the packages that it needs; to read its files, nothing. `FOLDER` is None
where it is not installed.
"""

from __future__ import annotations

import ast
import importlib.util
import math
from functools import cache
from inspect import Parameter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

FUNCTIONS = "msa_ops/cake_icp_indexer.py"
EXPORTS = "msa_ops/__init__.py"
KERNELS = "experimental/cake_msa_icp_indexer/cake_backend.py"
LAUNCHER = "experimental/cake_msa_icp_indexer/cake_jit.py"
FACADE = "experimental/cake_msa_icp_indexer/cake_indexer.py"


def _folder() -> Path | None:
    spec = importlib.util.find_spec("flashinfer")
    folders = list(spec.submodule_search_locations or []) if spec else []
    return Path(folders[0]) if folders else None


FOLDER = _folder()
MISSING = (
    "flashinfer is not installed"
    if FOLDER is None
    else None
    if (FOLDER / FUNCTIONS).exists()
    else f"the flashinfer in {FOLDER} has no {FUNCTIONS}; 0.7.4 has"
)


@cache
def module(file: str) -> ast.Module:
    """The syntax tree of a file of the package."""
    assert FOLDER is not None
    return ast.parse((FOLDER / file).read_text())


def functions(file: str) -> dict[str, ast.FunctionDef]:
    """The functions that a file defines, by name."""
    return {node.name: node for node in module(file).body if isinstance(node, ast.FunctionDef)}


def classes(file: str) -> dict[str, ast.ClassDef]:
    """The classes that a file defines, by name."""
    return {node.name: node for node in module(file).body if isinstance(node, ast.ClassDef)}


def methods(of: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """The public methods of a class, by name."""
    found = {node.name: node for node in of.body if isinstance(node, ast.FunctionDef)}
    return {name: node for name, node in found.items() if not name.startswith("_")}


def attributes(file: str, name: str) -> set[str]:
    """The public attributes that a class gives itself, those of its bases in the file among them."""
    of = classes(file)[name]
    bases = [base.id for base in of.bases if isinstance(base, ast.Name) and base.id in classes(file)]
    return _own_attributes(of).union(*(attributes(file, base) for base in bases))


def _own_attributes(of: ast.ClassDef) -> set[str]:
    stored = (n for n in ast.walk(of) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    names = {n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self"}
    return {name for name in names if not name.startswith("_")}


def fields(of: ast.ClassDef) -> list[tuple[str, bool]]:
    """(name, has a default) of a dataclass's fields."""
    return [
        (node.target.id, node.value is not None)
        for node in of.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def exported(name: str) -> set[str]:
    """What `msa_ops` imports from its module `name`."""
    imports = (n for n in module(EXPORTS).body if isinstance(n, ast.ImportFrom) and n.module == name)
    return {alias.asname or alias.name for node in imports for alias in node.names}


def parameters(of: ast.FunctionDef) -> list[Parameter]:
    """The parameters with kinds, order and values of defaults; without annotations."""
    a = of.args
    plain = [*a.posonlyargs, *a.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(a.defaults)) + list(a.defaults)
    kinds = [Parameter.POSITIONAL_ONLY] * len(a.posonlyargs) + [Parameter.POSITIONAL_OR_KEYWORD] * len(a.args)
    found = [_parameter(x, kind, default) for x, kind, default in zip(plain, kinds, defaults, strict=True)]
    if a.vararg:
        found.append(_parameter(a.vararg, Parameter.VAR_POSITIONAL, None))
    for x, default in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        found.append(_parameter(x, Parameter.KEYWORD_ONLY, default))
    if a.kwarg:
        found.append(_parameter(a.kwarg, Parameter.VAR_KEYWORD, None))
    return found


def _parameter(argument: ast.arg, kind: Any, default: ast.expr | None) -> Parameter:
    value = Parameter.empty if default is None else evaluate(default)
    return Parameter(argument.arg, kind, default=value)


def evaluate(expression: ast.expr) -> Any:
    """The value of a constant expression."""
    return eval(compile(ast.Expression(expression), "default", "eval"), {"__builtins__": {}})


def run_sizes(processors: int) -> SimpleNamespace:
    """FlashInfer's functions of sizes alone, executed on a pretended device of so many multiprocessors.

    They stand in a module that loads kernels, so its functions and constants are taken out one by one.
    """
    launcher = {
        target.id: evaluate(node.value)
        for node in module(LAUNCHER).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id == "MAX_DECODE_SPLITS"
    }
    names: dict[str, Any] = {
        "cake_jit": SimpleNamespace(sm_count=lambda index: processors, **launcher),
        "math": math,
        "torch": torch,
    }
    kept = [
        node
        for node in module(KERNELS).body
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.Assign) and not any(isinstance(n, ast.Call) for n in ast.walk(node)))
    ]
    tree = ast.Module([ast.ImportFrom("__future__", [ast.alias("annotations")], 0), *kept], [])
    exec(compile(ast.fix_missing_locations(tree), KERNELS, "exec"), names)
    return SimpleNamespace(**names)
