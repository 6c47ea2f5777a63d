"""Plans a study: its settings, the programs and the machine, and how many runs of each.

Commands share runs: a setting is named after what it is, never after who asked for it.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from smaragdine.errors import UserError
from smaragdine.jobs.lender import gpus_here
from smaragdine.recording.command import build_command
from smaragdine.sensors.discover import host_facts, settings_from_environment
from smaragdine.sensors.nvml.gpus import ask, nvml, text

# The machine, as far as readers of results need it.


def machine_here() -> dict[str, Any]:
    facts = host_facts(settings_from_environment(os.environ))
    with gpus_here() as gpus:
        names = [text(ask(nvml().nvmlDeviceGetName, gpu.handle) or "") for gpu in gpus]
        cards = [gpu.uuid for gpu in gpus]
    return {
        "gpus": names,
        "cards": cards,
        **{name: facts[name] for name in ("cpu", "kernel", "memory_bytes")},
    }


def size_here(machine: dict[str, Any]) -> str:
    """The paper's size if programs see a GPU, else what two cores can do."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return "base" if machine["gpus"] and not hidden else "small"


# The programs that a study runs: where they are, and what they need.

_PROGRAMS = {
    "torch": ("torch_bert.py", ("torch", "transformers")),
    "keras-tensorflow": ("keras_bert.py", ("keras", "tensorflow")),
    "keras-jax": ("keras_bert.py", ("keras", "jax")),
    "keras-torch": ("keras_bert.py", ("keras", "torch")),
    "tf1": ("tf1_bert.py", ("tensorflow",)),
}
FRAMEWORKS = tuple(_PROGRAMS)
ENVIRONMENTS = {
    name: {"KERAS_BACKEND": name.removeprefix("keras-")} for name in FRAMEWORKS if name.startswith("keras-")
}
_MISSING = (
    "import importlib.util, sys; print(*(n for n in sys.argv[1:] if importlib.util.find_spec(n) is None))"
)


def program(framework: str) -> Path:
    """Inside the package if it was installed; beside its sources in a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package, package.parents[1]):
        path = folder / "experiments" / "study" / _PROGRAMS[framework][0]
        if path.is_file():
            return path
    raise UserError(f"{_PROGRAMS[framework][0]} is missing", "it is part of Smaragdine", "Install it again")


def check_packages(frameworks: Iterable[str]) -> None:
    """Refuses what the programs' own interpreter cannot import, before anything is run."""
    for framework in frameworks:
        needed = _PROGRAMS[framework][1]
        python = build_command([str(program(framework))], os.environ).executable
        found = subprocess.run([python, "-c", _MISSING, *needed], capture_output=True, text=True, check=False)
        missing = found.stdout.split()
        if missing:
            are = "is" if len(missing) == 1 else "are"
            why = f"{' and '.join(missing)} {are} not installed for {python}"
            remedy = f"Try: {python} -m pip install {' '.join(missing)}"
            raise UserError(f"the study in {framework} cannot run", why, remedy)


# Settings: a program with its words, and the facts that tell its runs apart.

Fact = str | int | float
PROGRAM = "program"  # the fact that tells a user's own program
SCRIPT = "script"  # the fact that tells what is in its file
STAGES = {"pretrain": "pre-training", "finetune": "fine-tuning", "predict": "prediction"}


@dataclass(frozen=True)
class StudySetting:
    """What runs are repetitions of."""

    name: str  # name of its runs: bert-pretrain-torch-L12-H768-fp32
    words: tuple[str, ...]  # the program, as `smaragdine run` takes it
    # model, stage, framework, layers, hidden, batch, length, precision; for a user's own program, what varies
    facts: Mapping[str, Fact] = field(default_factory=dict[str, Fact])
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    trace_steps: int = 20
    trace_skip: int = 10


@dataclass(frozen=True)
class StudyRun:
    setting: StudySetting
    number: int  # from 1

    @property
    def name(self) -> str:
        return f"{self.setting.name}-{self.number}"


MODELS = ("bert", "albert")
_FIRST = tuple(STAGES)[:1]
PRECISIONS = ("fp32", "tf32", "bf16")
_UNTRACED_STEPS = 20  # at least so many, to tell how long a step is when nobody looks


@dataclass(frozen=True)
class Size:
    """What is run unless the user says otherwise."""

    layers: int
    hidden: int
    batch: int
    length: int
    vocabulary: int | None  # None: the model's own
    seconds: float  # least time for the steps of a run
    runs: int
    experiments: int
    variant_layers: tuple[int, ...]
    variant_hidden: tuple[int, ...]
    trace_steps: int
    trace_skip: int
    pairs: int  # pairs of blocks with and without sampling, to measure its overhead
    grown: int  # extra settings that show how the cost of measuring grows


SIZES = {
    # The paper's size, on a GPU.
    "base": Size(12, 768, 32, 128, None, 10, 5, 9, (6, 8, 10, 12), (512, 768), 20, 10, 20, 5),
    # A whole study on two cores, in less than 20 minutes.
    "small": Size(4, 128, 8, 64, 8000, 3, 3, 9, (2, 3, 4, 6), (64, 128), 12, 5, 12, 5),
    # Only to see that it works at all.
    "tiny": Size(2, 32, 2, 16, 200, 1, 1, 2, (1, 2), (32,), 4, 3, 2, 1),
}


@dataclass(frozen=True)
class StudyRequest:
    """What the user asked for. None and (): as the size or the command has it."""

    size: Size
    stages: tuple[str, ...] = ()
    frameworks: tuple[str, ...] = ("torch",)
    precisions: tuple[str, ...] = ("fp32",)
    layers: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()
    batch: int | None = None
    length: int | None = None
    runs: int | None = None
    experiments: int | None = None
    seconds: float | None = None
    trace_steps: int | None = None
    data: Path | None = None


@dataclass(frozen=True)
class Planned:
    setting: StudySetting
    runs: int


def bert(wanted: StudyRequest) -> list[Planned]:
    """All stages of BERT."""
    return _planned(wanted, ["bert"], wanted.stages or tuple(STAGES))


def variants(wanted: StudyRequest) -> list[Planned]:
    """BERT's pre-training with other depths and widths."""
    size = wanted.size
    varied = replace(
        wanted,
        layers=wanted.layers or size.variant_layers,
        hidden=wanted.hidden or size.variant_hidden,
    )
    return _planned(varied, ["bert"], wanted.stages or _FIRST)


def albert(wanted: StudyRequest) -> list[Planned]:
    """ALBERT, and the BERT that it is compared with."""
    return _planned(wanted, MODELS, wanted.stages or _FIRST)


def precision(wanted: StudyRequest) -> list[Planned]:
    """One experiment many times: every `runs` of its runs are one."""
    experiments = wanted.experiments or wanted.size.experiments
    repeated = replace(wanted, runs=experiments * (wanted.runs or wanted.size.runs))
    return _planned(repeated, ["bert"], wanted.stages or _FIRST)


STUDIES: dict[str, Callable[[StudyRequest], list[Planned]]] = {
    "bert": bert,
    "variants": variants,
    "albert": albert,
    "precision": precision,
}


def runs_of(planned: Iterable[Planned]) -> list[StudyRun]:
    """Every run once: if several ask for a setting, it runs as often as the one that asks for most."""
    most: dict[str, Planned] = {}
    for each in planned:
        name = each.setting.name
        if name not in most or each.runs > most[name].runs:
            most[name] = each
    return [StudyRun(each.setting, number) for each in most.values() for number in range(1, each.runs + 1)]


def checked(words: Sequence[str], known: Sequence[str], what: str) -> tuple[str, ...]:
    for word in words:
        if word not in known:
            raise UserError(f"unknown {what} {word or repr(word)}", remedy=f"There are: {', '.join(known)}")
    return tuple(dict.fromkeys(words))


def _planned(wanted: StudyRequest, models: Sequence[str], stages: Sequence[str]) -> list[Planned]:
    size = wanted.size
    runs = wanted.runs or size.runs
    return [
        Planned(_setting(wanted, framework, model, stage, layers, hidden, floats), runs)
        for framework, floats, model, stage, layers, hidden in itertools.product(
            checked(wanted.frameworks, FRAMEWORKS, "framework"),
            checked(wanted.precisions, PRECISIONS, "precision"),
            models,
            checked(stages, tuple(STAGES), "stage"),
            wanted.layers or [size.layers],
            wanted.hidden or [size.hidden],
        )
    ]


def _setting(
    wanted: StudyRequest, framework: str, model: str, stage: str, layers: int, hidden: int, floats: str
) -> StudySetting:
    if framework == "tf1" and model == "albert":
        raise UserError(
            "tf1 has no ALBERT", "its program is the paper's BERT", "Use --framework keras-tensorflow"
        )
    size = wanted.size
    batch, length = wanted.batch or size.batch, wanted.length or size.length
    name = f"{model}-{stage}-{framework}-L{layers}-H{hidden}-{floats}"
    name += f"-B{batch}" if batch != size.batch else ""
    name += f"-N{length}" if length != size.length else ""
    trace_steps = wanted.trace_steps or size.trace_steps
    facts: dict[str, Fact] = {
        "model": model,
        "stage": stage,
        "framework": framework,
        "layers": layers,
        "hidden": hidden,
        "batch": batch,
        "length": length,
        "precision": floats,
    }
    said = {name: value for name, value in facts.items() if name != "framework"}
    said["seconds"] = f"{wanted.seconds or size.seconds:g}"
    said["steps"] = size.trace_skip + trace_steps + _UNTRACED_STEPS
    # A folder of texts may have its own vocabulary.
    if size.vocabulary is not None and not (wanted.data and (wanted.data / "vocab.txt").is_file()):
        said["vocabulary"] = size.vocabulary
    if wanted.data is not None:
        said["data"] = str(wanted.data)
    words = [word for name, value in said.items() for word in (f"--{name}", str(value))]
    return StudySetting(
        name,
        (str(program(framework)), *words),
        facts,
        ENVIRONMENTS.get(framework, {}),
        trace_steps,
        size.trace_skip,
    )
