"""docs/design/private_names.md against the code, and against the packages that are installed."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ray.util.annotations import AnnotationType

from tests.house import PACKAGES, ROOT

PAGE = (ROOT / "docs/design/private_names.md").read_text("utf-8")
LIBRARIES = ("ray", "transformers", "huggingface_hub", "torch")
STANDARD = {"_exit", "_asdict", "_getframe"}  # of os, named tuples and sys, whose names they are


def _rows() -> Iterator[tuple[str, str]]:
    """(dotted name, file) of every row."""
    for line in PAGE.splitlines():
        if line.startswith("| `"):
            names, files = (re.findall(r"`([^`]+)`", cell) for cell in line.split(" | ")[:2])
            yield from ((name, file) for name in names for file in files)


ROWS = sorted(_rows())


def _last(name: str) -> str:
    """The part of a name that code shows: a keyword, or what follows the last dot."""
    return re.split(r"[.(]", name.removesuffix("=)"))[-1]


def _private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@cache
def _trees() -> dict[str, ast.Module]:
    folders = (*PACKAGES, "benchmarks", "tests")
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text("utf-8")) for path in paths}


@cache
def _own() -> set[str]:
    """Every name that our code defines."""
    found = set()
    for node in (node for tree in _trees().values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
    return found


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _used(tree: ast.Module) -> Iterator[str]:
    """The private names of others in a file, each by its last part."""
    for node in ast.walk(tree):
        for name in _imported(node):
            if name.startswith(tuple(f"{each}." for each in LIBRARIES)):
                yield from [_last(name)] if any(map(_private, name.split("."))) else []
        if isinstance(node, ast.Attribute) and _private(node.attr):
            yield from [node.attr] if node.attr not in _own() else []
        elif isinstance(node, ast.keyword) and node.arg and _private(node.arg):
            yield from [node.arg] if node.arg not in _own() else []
        elif isinstance(node, ast.Call) and _name(node.func) in ("getattr", "setattr"):
            name = getattr(node.args[1], "value", "")
            yield from [name] if _private(str(name)) and name not in _own() else []


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _overridden() -> Iterator[tuple[str, str]]:
    """The private methods of Ray's classes that ours replace, with the file."""
    module = importlib.import_module("deployments.driver.routing.router")
    for _, own in inspect.getmembers(module, inspect.isclass):
        if own.__module__ == module.__name__:
            above = {name for base in own.__mro__[1:] for name in vars(base)}
            for name in filter(_private, vars(own).keys() & above):
                if inspect.isroutine(vars(own)[name]):
                    yield name, "deployments/driver/routing/router.py"


def _unmarked() -> Iterator[tuple[str, str]]:
    """The names of Ray that the server uses and Ray does not mark as public, with the file."""
    for file, tree in _trees().items():
        if file.startswith("deployments/"):
            for node in ast.walk(tree):
                names = {ast.unparse(node)} if isinstance(node, ast.Attribute) else _imported(node)
                for name in names:
                    if re.fullmatch(r"ray(\.\w+)+", name) and _is_unmarked(name):
                        yield _last(name), file
                if isinstance(node, ast.Attribute) and _name(node.value) == "internal_kv":
                    yield node.attr, file


def _is_unmarked(name: str) -> bool:
    try:
        found, above = _resolved(name), _resolved(name.rpartition(".")[0])
    except (AttributeError, ImportError):
        return False  # not Ray's, or a part of a longer name
    is_code = inspect.isclass(found) or inspect.isroutine(found)
    return is_code and not _is_marked(found) and not (inspect.isclass(above) and _is_marked(above))


def _is_marked(found: Any) -> bool:
    marked = (AnnotationType.PUBLIC_API, AnnotationType.DEVELOPER_API)
    return getattr(found, "_annotated_type", None) in marked


def _resolved(name: str) -> Any:
    """What a dotted name is; ImportError or AttributeError if nothing."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def test_the_page_names_every_private_name_and_no_other() -> None:
    found = {(name, f) for f, tree in _trees().items() for name in _used(tree)}
    found = {(name, f) for name, f in found if name not in STANDARD}
    found |= {*_overridden(), *_unmarked()}
    assert sorted(found) == sorted({(_last(name), file) for name, file in ROWS})


@pytest.mark.parametrize("name", sorted({name for name, _ in ROWS}))
def test_the_name_is_where_it_was(name: str) -> None:
    function, _, keyword = name.removesuffix("=)").partition("(")
    if keyword:
        assert keyword in inspect.signature(_resolved(function)).parameters
    elif name == "torch.nn.Module._non_persistent_buffers_set":
        assert hasattr(_resolved("torch.nn.Module")(), _last(name))  # an attribute of instances
    elif name == "ray.util.annotations._annotated_type":
        assert hasattr(_resolved("ray.init"), _last(name))  # what its decorators set
    else:
        _resolved(name)


def test_every_row_says_why() -> None:
    rows = [line.strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    assert all(len(row) == 3 and len(row[2].split()) > 4 for row in rows)
    assert all(Path(ROOT / file).is_file() for _, file in ROWS)
