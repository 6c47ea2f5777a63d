"""A study on disk: how it was made, what is done, and what of a recording stays.

OUT/study.json      commands, seed, version, machine, and how long each run took
    runs/NAME       recordings; a folder is here only when it is whole. A raw trace stays until the result
    results/        what is kept of them: smaragdine.study.results
    sketches/       what figures take beside that: smaragdine.study.results
    logs/NAME.log   what the program printed
    unfinished/     recordings that were cut off or failed, the last of each run
    study.log       what was said, with its time
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from smaragdine.errors import UserError
from smaragdine.files import locked, read_json, users_file
from smaragdine.recording.command import build_command, without_secrets
from smaragdine.recording.format import TRACES_FOLDER
from smaragdine.study.plan import PROGRAM, SCRIPT, StudyRun, StudySetting
from smaragdine.study.results import RESULTS, SKETCHES, has_sketch, load_result, load_results
from smaragdine.version import __version__

STUDY, RUNS, LOGS, UNFINISHED, LOG = "study.json", "runs", "logs", "unfinished", "study.log"
Keep = Literal["first", "all", "none"]
KEEPS: tuple[Keep, ...] = ("first", "all", "none")
_FORMAT = 1
_TRACED = ("events*.arrows", "edges*.arrows", "windows*.arrows")


@dataclass(frozen=True)
class Made:
    """How a study was made."""

    seed: int
    commands: tuple[Mapping[str, Any], ...] = ()
    took_s: Mapping[str, float] = field(default_factory=dict[str, float])  # run → with all that is around it


def read_made(folder: Path) -> Made | None:
    """None where there is no study yet; whatever else is there is refused."""
    path = folder / STUDY
    try:
        values: dict[str, Any] = read_json(path)
        if int(values["format_version"]) > _FORMAT:
            raise UserError(f"{path} is of a newer version of Smaragdine", remedy="Upgrade it")
        return Made(int(values["seed"]), tuple(values["commands"]), dict(values["took_s"]))
    except FileNotFoundError:
        if not folder.exists() or _ours(folder):
            return None
        raise UserError(
            f"{folder} holds something else", f"it has no {STUDY}", "Name another folder"
        ) from None
    except NotADirectoryError:
        raise UserError(f"{folder} is a file", remedy="Name a folder") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read", str(error), "Was it edited?") from None


def _ours(folder: Path) -> bool:
    """Whether a folder without study.json is new, was cut off when it was made, or holds copied results."""
    made = {".lock", RUNS, RESULTS, SKETCHES, LOGS, UNFINISHED}
    return any((folder / RESULTS).glob("*.json")) or all(each.name in made for each in folder.iterdir())


def experiment_runs(folder: Path) -> int | None:
    """Of how many runs an experiment is, as the last command had it that made any."""
    made = read_made(folder) if (folder / STUDY).exists() else None
    said = [entry.get("experiment_runs") for entry in made.commands] if made is not None else []
    return next((runs for runs in reversed(said) if runs), None)


def run_folder(folder: Path, run: StudyRun) -> Path:
    return folder / RUNS / run.name


def log_of(folder: Path, run: StudyRun) -> Path:
    return folder / LOGS / f"{run.name}.log"


def remove_traced(recording: Path) -> None:
    for pattern in _TRACED:
        for path in recording.glob(pattern):
            path.unlink(missing_ok=True)


def has_result(folder: Path, run: StudyRun) -> bool:
    return (folder / RESULTS / f"{run.name}.json").is_file()


def left_of(folder: Path, runs: Iterable[StudyRun]) -> list[StudyRun]:
    return [run for run in runs if not has_result(folder, run)]


def in_order(runs: Iterable[StudyRun], seed: int) -> list[StudyRun]:
    """Every repetition goes through all settings, each time in another order: what drifts hits all alike."""
    rounds: dict[int, list[StudyRun]] = {}
    for run in runs:
        rounds.setdefault(run.number, []).append(run)
    for number, each in rounds.items():
        random.Random(f"{seed}/{number}").shuffle(each)
    return [run for _, each in sorted(rounds.items()) for run in each]


def expected_s(runs: Iterable[StudyRun], took_s: Mapping[str, float]) -> float | None:
    """As others of their setting took, else as all did; None where nothing has run yet."""
    of_setting: dict[str, list[float]] = {}
    for name, each_s in took_s.items():
        of_setting.setdefault(name.rpartition("-")[0], []).append(each_s)
    total_s = 0.0
    for run in runs:
        known = of_setting.get(run.setting.name) or list(took_s.values())
        if not known:
            return None
        total_s += sum(known) / len(known)
    return total_s


def check_words(folder: Path, runs: Iterable[StudyRun]) -> None:
    """Refuse results of the same name that were run with other words."""
    for run in runs:
        if not has_result(folder, run):
            continue
        then = _told(load_result(folder / RESULTS / f"{run.name}.json").command)
        now = _told(without_secrets(build_command(run.setting.words, os.environ).argv))
        if then and then != now:
            pairs = itertools.zip_longest(then, now)
            n = next(n for n, (a, b) in enumerate(pairs) if a != b)
            what = " ".join(then[max(0, n - 1) : n + 1]), " ".join(now[max(0, n - 1) : n + 1])
            why = f"it ran with {what[0]}, and you ask for {what[1]}"
            raise UserError(f"{folder} has another {run.name}", why, "Name another folder with -o DIR")


def check_script(folder: Path, setting: StudySetting) -> None:
    """Refuse results of a program of the same name that was another one."""
    program, script = (setting.facts.get(name) for name in (PROGRAM, SCRIPT))
    for result in load_results(folder):
        if result.facts.get(PROGRAM) == program and result.facts.get(SCRIPT, script) != script:
            why = f"{setting.words[0]} is not what it was when {result.name} ran"
            raise UserError(f"{folder} has runs of another program", why, "Name another folder with -o DIR")


class Study:
    """One process at a time works on a study."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        machine: Mapping[str, Any],
        seed: int | None = None,
        experiment_runs: int | None = None,
    ) -> None:
        read_made(folder)
        try:
            for name in (RUNS, RESULTS, LOGS, UNFINISHED):
                (folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be made", error.strerror or str(error)) from None
        self.folder = folder
        try:
            self._lock = locked(folder)
        except OSError as error:
            why = error.strerror or str(error)
            raise UserError(f"{folder} cannot be written", why, "Name another folder") from None
        # Another process may have made it meanwhile.
        made = read_made(folder) if (folder / STUDY).exists() else None
        if made is None:
            made = Made(random.SystemRandom().randrange(2**31) if seed is None else seed)
        chosen = made.seed if seed is None else seed
        entry = {
            "command": without_secrets(command),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "smaragdine_version": __version__,
            "seed": chosen,
            "experiment_runs": experiment_runs,
            "machine": dict(machine),
        }
        self.made = replace(made, seed=chosen, commands=(*made.commands, entry))
        self._save()

    def close(self) -> None:
        self._lock.close()

    def run_folder(self, run: StudyRun) -> Path:
        return run_folder(self.folder, run)

    def log(self, run: StudyRun) -> Path:
        return log_of(self.folder, run)

    def place(self, run: StudyRun) -> Path:
        """Where it is recorded; what failed there before goes."""
        path = self.folder / UNFINISHED / run.name
        shutil.rmtree(path, ignore_errors=True)
        return path

    def take(self, run: StudyRun, recording: Path) -> None:
        """A whole recording. One that is there without a result could not be used."""
        shutil.rmtree(self.run_folder(run), ignore_errors=True)
        os.rename(recording, self.run_folder(run))

    def give_up(self, run: StudyRun) -> Path:
        """The recording says nothing about a step: the run is to be tried again. Returns where it is now."""
        place = self.place(run)
        os.rename(self.run_folder(run), place)
        return place

    def took(self, run: StudyRun, took_s: float) -> None:
        self.made = replace(self.made, took_s={**self.made.took_s, run.name: took_s})
        self._save()

    def slim(self, keep: Keep) -> None:
        """Take raw traces and events of those away that have a result; the rest of a recording is small."""
        for recording in (self.folder / RUNS).iterdir():
            if not (self.folder / RESULTS / f"{recording.name}.json").is_file():
                continue
            shutil.rmtree(recording / TRACES_FOLDER, ignore_errors=True)
            setting, _, number = recording.name.rpartition("-")
            # Of a study by an older version, events are all that some figures can be drawn of.
            needed = keep == "first" or not has_sketch(self.folder, setting)
            if not (keep == "all" or (number == "1" and needed)):
                remove_traced(recording)

    def note(self, line: str) -> None:
        with contextlib.suppress(OSError), open(self.folder / LOG, "a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {line}\n")

    def _save(self) -> None:
        with users_file(self.folder / STUDY) as part:
            values = {"format_version": _FORMAT, **asdict(self.made)}
            part.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _told(argv: Sequence[str]) -> list[str]:
    """A command without what differs between machines: its interpreter, and where the script is."""
    words = list(argv)
    if len(words) > 1 and (words[1] == "-m" or words[1].endswith(".py")):
        words = words[1:]
    return [Path(words[0]).name, *words[1:]] if words else []
