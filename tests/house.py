"""Measures of the source tree: ``python -m tests.house [FOLDER]`` prints them.

FOLDER: another checkout, to compare with.
A line of code is a line that is not blank, not a comment and not part of a docstring.
"""

import ast
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("configs", "sharding", "sources", "scheduler", "modeling", "deployments")
FOLDERS = ("scheduler", "modeling", "deployments.rank", "deployments.driver", "deployments.ingress")

_SILENT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file. name: dotted. code, comments: numbers of lines."""

    name: str
    path: Path
    tree: ast.Module
    lines: int
    code: int
    comments: int

    @property
    def room(self) -> str:
        """The package of the module."""
        return self.name.rpartition(".")[0]


def modules(root: Path = ROOT) -> list[Module]:
    """Read every module of the packages; empty ``__init__.py`` files are left out."""
    paths = (path for package in PACKAGES for path in sorted((root / package).rglob("*.py")))
    return [_module(path, root) for path in paths if path.stat().st_size]


def functions(module: Module) -> Iterator[Function]:
    """All functions and methods of a module, inner ones too."""
    return (node for node in ast.walk(module.tree) if isinstance(node, Function))


def length(function: Function) -> int:
    """The lines of a function, from its ``def`` to its end, its docstring not counted."""
    body = function.body
    doc = body[0] if ast.get_docstring(function) is not None else None
    documented = 0 if doc is None else (doc.end_lineno or 0) - doc.lineno + 1
    return (function.end_lineno or 0) - function.lineno + 1 - documented


def imports(found: list[Module]) -> dict[str, set[str]]:
    """Which of these modules each of them imports, inside functions too."""
    names = {module.name for module in found}
    edges: dict[str, set[str]] = {}
    for module in found:
        edges[module.name] = set()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                whole = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
                edges[module.name] |= (whole & names) - {module.name}
    return edges


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other in a circle (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(stack[at:])
            del stack[at:]

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def rooms(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Which packages the modules of each package import from."""
    arrows: dict[str, set[str]] = defaultdict(set)
    for name, others in edges.items():
        room = name.rpartition(".")[0]
        arrows[room] |= {other.rpartition(".")[0] for other in others} - {room}
    return arrows


def folder_graph(edges: dict[str, set[str]], folder: str) -> tuple[int, int, int, int]:
    """Import graph of the modules under a folder.

    Returns its modules, the arrows between them, its rooms, and the arrows between the rooms.
    """
    prefix = f"{folder}."
    inner = {
        name: {other for other in others if other.startswith(prefix)}
        for name, others in edges.items()
        if name.startswith(prefix)
    }
    between = rooms(inner)
    return len(inner), _arrows(inner), len(between), _arrows(between)


def _arrows(edges: dict[str, set[str]]) -> int:
    return sum(map(len, edges.values()))


def _module(path: Path, root: Path) -> Module:
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    docs = _docstring_lines(tree)
    code: set[int] = set()
    comments = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in _SILENT and token.type != tokenize.ENDMARKER:
            code |= set(range(token.start[0], token.end[0] + 1))
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    return Module(name, path, tree, text.count("\n"), len(code - docs), len(comments))


def _docstring_lines(tree: ast.Module) -> set[int]:
    """The lines of docstrings, and of strings after a constant."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def report(root: Path = ROOT) -> str:
    """All measures as text."""
    found = modules(root)
    edges = imports(found)
    lengths = [length(function) for module in found for function in functions(module)]
    code = sum(module.code for module in found)
    comments = sum(module.comments for module in found)
    between = rooms(edges)
    lines = [
        f"modules                      {len(found)}",
        f"lines                        {sum(module.lines for module in found)}",
        f"lines of code                {code}",
        f"comments a 100 lines of code {100 * comments / code:.1f}",
        f"functions                    {len(lengths)}",
        f"lines a function, mean       {sum(lengths) / len(lengths):.1f}",
        f"functions over 50 lines      {sum(each > 50 for each in lengths)}",
        f"files over 400 lines         {sum(module.lines > 400 for module in found)}",
        f"import circles               {len(circles(edges))}",
        f"rooms, arrows between them   {len(between)}, {_arrows(between)}",
    ]
    for package in PACKAGES:
        own = [module for module in found if module.name.split(".")[0] == package]
        lines.append(f"  {package:<14} {len(own):>4} modules {sum(m.code for m in own):>7} of code")
    lines.append("folder                  modules  arrows   rooms  arrows between rooms")
    for folder in FOLDERS:
        counts = folder_graph(edges, folder)
        lines.append(f"  {folder:<20}" + "".join(f"{count:>8}" for count in counts))
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(Path(sys.argv[1]).resolve() if sys.argv[1:] else ROOT))
