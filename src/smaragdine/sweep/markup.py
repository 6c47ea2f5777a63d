"""YAML, TOML or JSON as plain values; a mistake is one line with its place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from smaragdine.errors import UserError

_TWICE = ("the key is there twice", "Leave one out")


def parsed(text: str, where: Path) -> Any:
    try:
        if where.suffix == ".toml":
            import tomllib

            return tomllib.loads(text)
        if where.suffix == ".json":
            return json.loads(
                text, object_pairs_hook=lambda pairs: _once(pairs, where), parse_constant=_no_number
            )
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is no valid {where.suffix[1:].upper()}", str(error)) from None
    try:
        import yaml
    except ImportError:
        remedy = "Install smaragdine[sweep], or write it as TOML or JSON"
        raise UserError(f"{where} cannot be read", "PyYAML is not installed", remedy) from None
    try:
        _refuse_twice(yaml.compose(text, yaml.SafeLoader), where)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        tab = "\\t" in str(problem)
        remedy = "Indent with blanks, not tabs" if tab else "Quote a text that has a {, a : or a %"
        raise UserError(f"{where}{line} is no valid YAML", problem or str(error), remedy) from None


def _once(pairs: Sequence[tuple[str, Any]], where: Path) -> dict[str, Any]:
    """Of a key that an object has twice, JSON's reader would quietly take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise UserError(f"{where}: {twice}", *_TWICE)
    return found


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number in JSON")


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
