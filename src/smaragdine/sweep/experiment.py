"""Reads an experiment file: what to run, at which limits, how often. YAML, TOML or JSON.

    seed: 7
    experiments:
      - name: bert
        repeat: 5
        power_limits: [150, 200, 250, 300]
        benchmarks:
          - {name: small, command: train.py --epochs {epochs}, epochs: 10}

Every mistake becomes one message: which file, which key, what is allowed.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from smaragdine.errors import UserError
from smaragdine.files import parse_json
from smaragdine.jobs.setting import CoolDown, Seconds, Value

# YAML, TOML or JSON as plain values; a mistake becomes one line with its place.

_MOST_VALUES = 100_000
_TWICE = ("the key is there twice", "Leave one out")


def parsed(text: str, where: Path) -> Any:
    try:
        if where.suffix == ".toml":
            import tomllib

            return tomllib.loads(text)
        if where.suffix == ".json":
            found = parse_json(text, lambda pairs: _once(pairs, where))
            # Half a character, which JSON can escape, is text that nobody can pass on.
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
    """Refuses keys that an object has twice: JSON's reader would quietly take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise UserError(f"{where}: {twice}", *_TWICE)
    return found


def _refuse_twice(root: Any, where: Path) -> None:
    """Refuses keys that a mapping has twice: YAML's reader would quietly take the last."""
    nodes, known = [root], set[int]()
    while nodes:
        node = nodes.pop()
        # An alias may stand for something that contains it.
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
    """Refuses aliases of aliases: a few lines of them can mean any number of values."""
    counted: dict[int, int] = {}

    def count(node: Any) -> int:
        if id(node) not in counted:
            counted[id(node)] = _MOST_VALUES + 1  # an alias that contains itself never ends
            inside = node.value if isinstance(getattr(node, "value", None), list) else ()
            parts = [part for each in inside for part in (each if isinstance(each, tuple) else (each,))]
            counted[id(node)] = 1 + sum(map(count, parts))
        return counted[id(node)]

    if count(root) > _MOST_VALUES:
        raise UserError(f"{where} has more than {_MOST_VALUES:,} values", remedy="Write fewer, or no aliases")


Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Watts = Annotated[float, Meta(gt=0, le=1e5)]
Mhz = Annotated[int, Meta(ge=1, le=100_000)]
Word = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}$")]

_WORD = "letters, digits and _.+- , at most 64"
_EXAMPLES = {
    "experiments": "[{name: a, …}]",
    "benchmarks": "[{command: train.py}]",
    "power_limits": "[150, 200]",
    "clock_limits": "[[877, 1005]]",
    "parameters": "{batch: [16, 32]}",
    "devices": "[gpu:0, gpu:1]",
    "gpu_types": "[V100]",
    "cool_down": "{temperature_c: 45}",
    "until": "2%",
    "environment": "{KERAS_BACKEND: torch}",
}
_KINDS = {
    "float": "a number",
    "int": "a whole number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "nothing",
}
_PARAMETER = re.compile(r"[A-Za-z_]\w*")
_PERCENT = re.compile(r"\d+(\.\d+)?\s*%")


class Benchmark(Struct, frozen=True, forbid_unknown_fields=True):
    command: str | list[Value]  # a script, -m MODULE or an executable, as one would start it
    name: Word | None = None  # the script's name by default
    folder: str = "."  # where it starts, relative to the experiment file
    epochs: Count | None = None  # the value of {epochs} in the command
    environment: dict[str, str | int | float] = {}
    timeout_s: Seconds | None = None  # a repetition that takes longer is ended, and counts as failed
    expected_s: Seconds | None = None  # used by a dry run before anything was measured


class Experiment(Struct, frozen=True, forbid_unknown_fields=True):
    name: Word
    benchmarks: Annotated[list[Benchmark], Meta(min_length=1)]
    repeat: Count = 5
    power_limits: list[Watts] = []  # W
    clock_limits: list[tuple[Mhz, Mhz]] = []  # [memory, graphics] MHz
    parameters: dict[str, list[Value]] = {}  # values of {name} in the command
    devices: list[Annotated[str, Meta(pattern=r"^gpu:\d{1,3}$")]] = []  # by default all that the program sees
    gpu_types: list[Word] = []  # types of a cluster's GPUs: each runs all of it
    order: Literal["shuffled", "listed"] = "shuffled"
    warm_up: Annotated[int, Meta(ge=0, le=100)] = (
        0  # extra runs of each benchmark before its first repetition
    )
    cool_down: CoolDown | None = None
    baseline_s: Seconds | None = None  # measure idle power first
    until: str | None = None  # 2%: stop repeating a setting once its energy is known so well


class ExperimentFile(Struct, frozen=True, forbid_unknown_fields=True):
    experiments: Annotated[list[Experiment], Meta(min_length=1)]
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None


def read_experiments(path: str | os.PathLike[str]) -> ExperimentFile:
    where = Path(path)
    try:
        text = where.read_bytes().decode()
    except OSError as error:
        raise UserError(f"{where} cannot be read", error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise UserError(f"{where} is no text", remedy="An experiment file is YAML, TOML or JSON") from None
    return checked(parsed(text, where), str(where), where.parent)


def checked(values: Any, where: str, base: Path) -> ExperimentFile:
    """Checks a parsed file and returns its experiments; folders are relative to `base`."""
    try:
        found = msgspec.convert(values, ExperimentFile)
    except msgspec.ValidationError as error:
        raise _mistake(where, str(error), values) from None
    _unique([each.name for each in found.experiments], where, "experiments", "name")
    experiments = [
        _checked(each, where, f"experiments[{n}]", base) for n, each in enumerate(found.experiments)
    ]
    return msgspec.structs.replace(found, experiments=experiments)


def until_part(experiment: Experiment) -> float | None:
    return None if experiment.until is None else float(experiment.until.rstrip("% ")) / 100


def words_of(command: str | Sequence[Value]) -> list[str]:
    return shlex.split(command) if isinstance(command, str) else [str(word) for word in command]


def filled(text: str, values: dict[str, Value]) -> str:
    """Replaces {name} in `text`; braces around other words are the program's own."""
    return re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), text)


def _checked(experiment: Experiment, where: str, key: str, base: Path) -> Experiment:
    def refuse(sub: str, why: str, remedy: str = "") -> UserError:
        return UserError(f"{where}: {key}{sub}", why, remedy)

    if experiment.power_limits and experiment.clock_limits:
        raise refuse("", "it has both power_limits and clock_limits", "Make two experiments of it")
    if not (experiment.power_limits or experiment.clock_limits or experiment.parameters):
        raise refuse("", "nothing varies", "Give power_limits, clock_limits or parameters")
    varied: dict[str, Sequence[Any]] = {
        "power_limits": experiment.power_limits,
        "clock_limits": experiment.clock_limits,
        "devices": experiment.devices,
        "gpu_types": experiment.gpu_types,
        **{f"parameters.{name}": values for name, values in experiment.parameters.items()},
    }
    for name, values in varied.items():
        twice = [value for n, value in enumerate(values) if value in values[:n]]
        if twice:
            what = f"{twice[0]:g}" if isinstance(twice[0], float) else str(twice[0])
            raise refuse(f".{name}", f"{what} is there twice", "Use repeat for repetitions")
    for name, values in experiment.parameters.items():
        if not _PARAMETER.fullmatch(name) or name == "epochs":
            raise refuse(f".parameters.{name}", "no name for a parameter", "Allowed: letters, digits and _")
        if not values:
            raise refuse(f".parameters.{name}", "it has no values")
    if experiment.until is not None:
        part = until_part(experiment) if _PERCENT.fullmatch(experiment.until) else 0
        if not part or part > 1:
            raise refuse(".until", f"{experiment.until!r} is no percentage", "Example: until: 2%")
    benchmarks = [
        _benchmark(each, experiment, base, f"{where}: {key}.benchmarks[{n}]")
        for n, each in enumerate(experiment.benchmarks)
    ]
    _unique([each.name or "" for each in benchmarks], where, f"{key}.benchmarks", "name")
    return msgspec.structs.replace(experiment, benchmarks=benchmarks)


def _benchmark(benchmark: Benchmark, experiment: Experiment, base: Path, key: str) -> Benchmark:
    try:
        words = words_of(benchmark.command)
    except ValueError as error:
        raise UserError(f"{key}.command", str(error), "Write it as a list of words") from None
    if not words:
        raise UserError(f"{key}.command", "it is empty", "Example: command: train.py --epochs 3")
    text = " ".join([*words, *map(str, benchmark.environment.values())])
    for name in [*experiment.parameters, *(["epochs"] if benchmark.epochs is not None else [])]:
        if f"{{{name}}}" not in text:
            why = f"nothing in it says {{{name}}}, so {name} would change nothing"
            raise UserError(f"{key}.command", why, f"Example: command: train.py --{name} {{{name}}}")
    if "{epochs}" in text and benchmark.epochs is None:
        raise UserError(f"{key}.command", "it says {epochs}, which is not given", "Add epochs: 10")
    folder = Path(os.path.abspath(base / Path(benchmark.folder).expanduser()))
    return msgspec.structs.replace(
        benchmark, command=words, name=benchmark.name or name_of(words), folder=str(folder)
    )


def name_of(words: Sequence[str]) -> str:
    """Names a benchmark after its script, module or program."""
    script = next((word for word in words if word.endswith(".py")), None)
    if script is None and words[0] == "-m" and len(words) > 1:
        script = words[1].rpartition(".")[2]
    stem = re.sub(r"[^A-Za-z0-9_.+-]+", "-", Path(script or words[0]).stem).strip("-._+")
    return stem[:64] or "program"


def _unique(names: Sequence[str], where: str, key: str, what: str) -> None:
    for n, name in enumerate(names):
        if name in names[:n]:
            raise UserError(f"{where}: {key}[{n}].{what}", f"{name} is there twice")


def _mistake(where: str, said: str, values: Any) -> UserError:
    """Turns a message of msgspec's into one of ours."""
    message, _, at = said.partition(" - at `")
    key = at.rstrip("`").removeprefix("key in ").removeprefix("$").removeprefix(".") or "the file"
    key = _with_name(key, values)
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", message)
    if unknown:
        allowed = _fields_at(key)
        near = difflib.get_close_matches(unknown[1], allowed, 1)
        why = f"there is no such key{f', but {near[0]}' if near else ''}"
        place = unknown[1] if key == "the file" else f"{key}.{unknown[1]}"
        return UserError(f"{where}: {place}", why, f"Allowed: {', '.join(allowed)}")
    missing = re.fullmatch(r"Object missing required field `(.*)`", message)
    if missing:
        return UserError(f"{where}: {key}", f"{missing[1]} is missing")
    message = re.sub(r"(\d)\.0\b", r"\1", re.sub(r"`([^`]*)`", _kind_words, message))
    if "enum value" in message:
        message = "allowed are shuffled and listed"
    elif "matching regex" in message:
        message = f"allowed are {'gpu:0, gpu:1 …' if 'gpu:' in message else _WORD}"
    last = re.sub(r"(\[\d+\])+$", "", key).rpartition(".")[2]
    told = last not in _EXAMPLES or message.startswith("allowed")
    example = "" if told else f"Example: {last}: {_EXAMPLES[last]}"
    if key == "the file":
        example = f"Allowed: {', '.join(_fields_at(key))}"
    return UserError(f"{where}: {key}", message[0].lower() + message[1:], example)


def _kind_words(found: re.Match[str]) -> str:
    """`int | null` becomes a whole number: what may be null may also be left out."""
    kinds = [kind for kind in found[1].split(" | ") if kind != "null"] or ["null"]
    return " or ".join(_KINDS.get(kind, kind) for kind in kinds)


def _with_name(key: str, values: Any) -> str:
    """Puts a name into `a[...]`: msgspec does not say which entry of a mapping is wrong."""
    before, dots, after = key.partition("[...]")
    if not dots:
        return key
    for name, number in re.findall(r"(\w+)|\[(\d+)\]", before):
        values = values[name] if name else values[int(number)]
    kind = list[Value] if before.endswith("parameters") else str | int | float
    for name, value in values.items():
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            return f"{before}.{name}{after}"
    return key


def _fields_at(key: str) -> list[str]:
    kind = (
        CoolDown
        if key.endswith("cool_down")
        else Benchmark
        if re.search(r"benchmarks\[[^]]*\]$", key)
        else Experiment
        if re.fullmatch(r"experiments\[[^]]*\]", key)
        else ExperimentFile
    )
    return list(kind.__struct_fields__)
