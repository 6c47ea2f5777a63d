"""How the code is laid out, in a table: files, who reads whom, cycles, names used twice, lines in all.

    python tools/house.py              # the table; exit code 1 where a figure is beyond its bound
    python tools/house.py --list       # and which files, cycles and names they are
    python tools/house.py --page       # and what one HTML page passes through (takes some seconds)

A file is any module of the package that is not an empty `__init__.py`. An import counts wherever it stands,
at the top or in a function, save under `TYPE_CHECKING`.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/smaragdine"
ONCE = ("device_traces", "split", "activity", "steps_of")

# What a figure may be at most.
BOUNDS = {
    "files": 260,
    "lines of the largest": 620,
    "files with one reader, in their own folder": 24,
    "import cycles": 0,
    "public classes of one name": 0,
}

Module = str


def modules() -> dict[Module, Path]:
    """Every module with something in it, by its dotted name."""
    found: dict[Module, Path] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "__init__.py" and path.stat().st_size == 0:
            continue
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(path: Path, me: Module, known: dict[Module, Path]) -> set[Module]:
    """The modules of ours that a file imports."""
    found: set[Module] = set()
    for node in _outside_of_type_checking(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, me, path.name == "__init__.py")
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in known else base)
    return {name for name in found if name in known and name != me}


def _outside_of_type_checking(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _outside_of_type_checking(child)


def _absolute(node: ast.ImportFrom, me: Module, is_package: bool) -> Module:
    if not node.level:
        return node.module or ""
    parts = me.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def cycles(graph: dict[Module, set[Module]]) -> list[list[Module]]:
    """Groups of files that import one another in a circle (Tarjan's strongly connected components)."""
    index: dict[Module, int] = {}
    low: dict[Module, int] = {}
    stack: list[Module] = []
    found: list[list[Module]] = []

    def visit(node: Module) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group: list[Module] = []
            while not group or group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def one_reader(graph: dict[Module, set[Module]]) -> list[str]:
    """Files that only one other reads, and that one lies beside them."""
    readers: dict[Module, set[Module]] = defaultdict(set)
    for reader, read in graph.items():
        for each in read:
            readers[each].add(reader)
    found: list[str] = []
    for each, by in sorted(readers.items()):
        (only,) = by if len(by) == 1 else ("",)
        if only and only.rpartition(".")[0] == each.rpartition(".")[0] != "smaragdine":
            found.append(f"{each} ← {only}")
    return found


def classes_twice(known: dict[Module, Path]) -> dict[str, list[Module]]:
    where: dict[str, list[Module]] = defaultdict(list)
    for name, path in known.items():
        if path.name.endswith("_pb2.py"):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(name)
    return {name: places for name, places in sorted(where.items()) if len(places) > 1}


def through_a_page() -> tuple[int, Counter[str]]:
    """How many modules an HTML page passes through, and how often each function of `ONCE` runs for it."""
    sys.path.insert(0, str(ROOT / "tests"))
    import recordings
    from smaragdine.cli.main import main as verb

    passed: set[str] = set()
    calls: Counter[str] = Counter()

    def seen(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "/smaragdine/" in (file := frame.f_code.co_filename):
            passed.add(file)
            if frame.f_code.co_name in ONCE and frame.f_code.co_qualname == frame.f_code.co_name:
                calls[frame.f_code.co_name] += 1

    with tempfile.TemporaryDirectory() as folder:
        recordings.make(Path(folder) / "run")
        sys.setprofile(seen)
        try:
            verb(["report", f"{folder}/run", "--html", f"{folder}/page.html"])
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.setprofile(None)
    return len(passed), calls


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="which they are")
    parser.add_argument("--page", action="store_true", help="what one HTML page passes through")
    options = parser.parse_args()

    known = modules()
    graph = {name: imports(path, name, known) for name, path in known.items()}
    lines = {name: path.read_text().count("\n") for name, path in known.items()}
    alone, circles, twice = one_reader(graph), cycles(graph), classes_twice(known)
    figures = {
        "files": f"{len(known)}",
        "lines in all": f"{sum(lines.values()):,}",
        "lines, median": f"{statistics.median(lines.values()):.0f}",
        "lines of the largest": f"{max(lines.values())}",
        "files with one reader, in their own folder": f"{len(alone)}",
        "files that a file imports, mean": f"{statistics.mean(map(len, graph.values())):.1f}",
        "import cycles": f"{len(circles)}",
        "public classes of one name": f"{len(twice)}",
    }
    if options.page:
        passed, calls = through_a_page()
        figures["modules a page passes through"] = f"{passed}"
        figures |= {f"calls of {name} for it": f"{calls[name]}" for name in ONCE}
    beyond = [name for name, most in BOUNDS.items() if int(figures[name].replace(",", "")) > most]
    for name, figure in figures.items():
        most = f"at most {BOUNDS[name]}" if name in BOUNDS else ""
        print(f"{name:44} {figure:>8}  {most}{'  BEYOND' if name in beyond else ''}".rstrip())
    if options.list or beyond:
        largest = sorted(lines, key=lambda name: -lines[name])[:5]
        which = {
            "largest": [f"{name} {lines[name]}" for name in largest],
            "one reader": alone,
            "cycles": [" ⇄ ".join(circle) for circle in circles],
            "names": [f"{name}: {', '.join(places)}" for name, places in twice.items()],
        }
        for title, rows in which.items():
            print(f"\n{title}:", *(f"  {row}" for row in rows), sep="\n")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
