"""YAML, TOML or JSON as plain values; a mistake is one line with its place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smaragdine.errors import UserError
from smaragdine.files import parse_json

_MOST_VALUES = 100_000
_TWICE = ("the key is there twice", "Leave one out")


def parsed(text: str, where: Path) -> Any:
    try:
        if where.suffix == ".toml":
            import tomllib

            return tomllib.loads(text)
        if where.suffix == ".json":
            found = parse_json(text, lambda pairs: _once(pairs, where))
            # Half a character, which JSON can escape, is no text that anybody can pass on.
            json.dumps(found, ensure_ascii=False).encode()
            return found
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is no valid {where.suffix[1:].upper()}", _why(error)) from None
    try:
        import yaml
    except ImportError:
        remedy = "Install smaragdine[sweep], or write it as TOML or JSON"
        raise UserError(f"{where} cannot be read", "PyYAML is not installed", remedy) from None
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        _refuse_twice(root, where)
        _refuse_many(root, where)
        return yaml.safe_load(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is no valid YAML", _why(error)) from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        tab = "\\t" in str(problem)
        remedy = "Indent with blanks, not tabs" if tab else "Quote a text that has a {, a : or a %"
        raise UserError(f"{where}{line} is no valid YAML", problem or str(error), remedy) from None


def _why(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _once(pairs: Sequence[tuple[str, Any]], where: Path) -> dict[str, Any]:
    """Of a key that an object has twice, JSON's reader would quietly take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise UserError(f"{where}: {twice}", *_TWICE)
    return found


def _refuse_twice(root: Any, where: Path) -> None:
    """Of a key that a mapping has twice, YAML's reader would quietly take the last."""
    nodes, known = [root], set[int]()
    while nodes:
        node = nodes.pop()
        # An alias may stand for what is around it.
        if id(node) in known or not isinstance(getattr(node, "value", None), list):
            continue
        known.add(id(node))
        seen: set[str] = set()
        for each in node.value:
            key, value = each if isinstance(each, tuple) else (None, each)
            nodes.append(value)
            if key is None or not isinstance(key.value, str):
                continue
            if key.value in seen:
                what = f"{where}, line {key.start_mark.line + 1}: {key.value}"
                raise UserError(what, *_TWICE)
            seen.add(key.value)


def _refuse_many(root: Any, where: Path) -> None:
    """A few lines of aliases of aliases are any number of values once somebody writes them out."""
    counted: dict[int, int] = {}

    def count(node: Any) -> int:
        if id(node) not in counted:
            counted[id(node)] = _MOST_VALUES + 1  # an alias within itself has no end
            inside = node.value if isinstance(getattr(node, "value", None), list) else ()
            parts = [part for each in inside for part in (each if isinstance(each, tuple) else (each,))]
            counted[id(node)] = 1 + sum(map(count, parts))
        return counted[id(node)]

    if count(root) > _MOST_VALUES:
        raise UserError(f"{where} has more than {_MOST_VALUES:,} values", remedy="Write fewer, or no aliases")
