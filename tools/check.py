"""Runs the tests of what changed since `main`: the part of `make check` that depends on the change.

    python tools/check.py              # run them
    python tools/check.py --list       # say which they are

A test belongs to a source where it lies in the folder of the same name and imports it; where none does, all
tests of that folder belong to it. A test that changed, or that uses a helper that changed, runs too.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES, TESTS = ROOT / "src" / "smaragdine", ROOT / "tests"


def changed(since: str) -> list[Path]:
    """Files that differ from where this branch left `since`, those that git does not know yet included."""
    base = _git("merge-base", since, "HEAD") or ["HEAD"]
    names = {*_git("diff", "--name-only", base[0]), *_git("ls-files", "--others", "--exclude-standard")}
    return sorted(path for name in names if (path := ROOT / name).suffix == ".py")


def tests_of(paths: list[Path]) -> list[Path]:
    found: set[Path] = set()
    for path in paths:
        if path.is_relative_to(SOURCES):
            found.update(_of_source(path))
        elif path.is_relative_to(TESTS):
            found.update([path] if path.name.startswith("test_") else _importers(path.stem, TESTS))
    return sorted(path for path in found if path.exists())


def _of_source(path: Path) -> list[Path]:
    inside = path.relative_to(SOURCES).with_suffix("")
    module = ".".join(("smaragdine", *inside.parts)).removesuffix(".__init__")
    folder = TESTS / inside.parts[0] if len(inside.parts) > 1 else TESTS
    if folder == TESTS:
        return _importers(module, TESTS)
    return _importers(module, folder) or sorted(folder.glob("test_*.py"))


def _importers(module: str, folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("test_*.py")) if module in _imported(path)]


def _imported(path: Path) -> set[str]:
    return set(_imports(ast.parse(path.read_text())))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.split()


def main() -> int:
    parser = argparse.ArgumentParser(description="The tests of what changed.")
    parser.add_argument("--since", default="main", help="a branch or commit (%(default)s)")
    parser.add_argument("--list", action="store_true", help="say which, and run none")
    options = parser.parse_args()
    tests = [str(path.relative_to(ROOT)) for path in tests_of(changed(options.since))]
    if options.list or not tests:
        print("\n".join(tests) or "no test belongs to what changed")
        return 0
    print(f"{len(tests)} files of tests: {', '.join(tests)}")
    words = [sys.executable, "-m", "pytest", "--quiet", "--numprocesses", "2", "--dist", "loadfile", *tests]
    return subprocess.run(words, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
