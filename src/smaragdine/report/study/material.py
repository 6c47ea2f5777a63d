"""What a study has to draw: its results by what may be compared, and a sketch of a run.

Results of one framework, precision, batch and length are one kind, as findings have it: each has its figures.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from smaragdine.accounting.arithmetic import working_device
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.overview import overview
from smaragdine.accounting.rows import column
from smaragdine.errors import UserError
from smaragdine.recording.reader import open_recording
from smaragdine.report.figures.runs import NotDrawn
from smaragdine.study.custom import values_of, varied
from smaragdine.study.folder import RUNS
from smaragdine.study.results import Result, by_setting
from smaragdine.study.settings import PROGRAM, STAGES
from smaragdine.study.sketches import Sketch, load_sketch, sketch_of
from smaragdine.study.work import Shape, groups, shape_of


@dataclass(frozen=True)
class Material:
    """Of one kind. Energies are those of `device`, which does the work, unless said otherwise."""

    out: Path
    kind: str  # as keys of findings have it: torch-bf16; of a user's own program, its name
    suffix: str  # of files: the kind; nothing where OUT has one
    device: str
    results: tuple[Result, ...]
    shape: Shape | None = None  # layers and hidden size of what is no variant; None: a user's own program

    @cached_property
    def base(self) -> list[Result]:
        """What all is compared with: pre-training of BERT where there is any."""
        found = [self.like_base(model, stage) for stage in STAGES for model in ("bert", "albert")]
        return next((each for each in found if each), None) or max(by_setting(self.results).values(), key=len)

    def of(self, model: str, stage: str) -> list[Result]:
        return [r for r in self.results if r.facts.get("model") == model and r.facts.get("stage") == stage]

    def like_base(self, model: str, stage: str) -> list[Result]:
        """Of the shape that is no variant."""
        return [result for result in self.of(model, stage) if shape_of(result) == self.shape]

    def variants(self) -> dict[str, list[Result]]:
        """By hidden size and layers; of a user's own program, by what varies."""
        if self.shape is None:
            return {_varied(each[0]): each for each in by_setting(sorted(self.results, key=varied)).values()}
        found = sorted(self.of("bert", "pretrain"), key=lambda result: shape_of(result)[::-1])
        return {variant_label(each[0]): each for each in by_setting(found).values()}

    @cached_property
    def sketch(self) -> Sketch:
        """Of a run of the base, made of its recording where no sketch of it can be used."""
        why: list[str] = []
        for result in sorted(self.base, key=lambda one: one.number):
            for sketched in (self._kept, self._made):
                try:
                    found = sketched(result.name)
                except UserError as error:
                    why.append(str(error))
                    continue
                if found is not None and found.device == self.device:
                    return found
                if found is not None:
                    why.append(f"the sketch of {found.name} is of {found.device}, not of {self.device}")
        nothing = f"{self.base[0].setting} has neither a sketch nor a recording with events"
        raise NotDrawn(why[0] if why else nothing)

    def _kept(self, name: str) -> Sketch | None:
        return load_sketch(self.out, name)

    def _made(self, name: str) -> Sketch | None:
        path = self.out / RUNS / name
        if not path.is_dir():
            return None
        recording = open_recording(path)
        return sketch_of(name, recording, overview(recording))


def materials(out: Path, results: Sequence[Result]) -> list[Material]:
    """The kinds that OUT has, that with the most runs first; then a user's own programs."""
    kinds = [
        Material(
            out,
            one.suffix,
            f"-{one.suffix}",
            one.device,
            tuple(work.result for work in one.works),
            one.main_shape("bert") or one.main_shape("albert"),
        )
        for one in sorted(groups(results), key=lambda one: -len(one.works))
    ]
    own: dict[str, list[Result]] = {}
    for result in results:
        if PROGRAM in result.facts:
            own.setdefault(str(result.facts[PROGRAM]), []).append(result)
    for program, each in own.items():
        device = working_device([result.step for result in each])
        if device is not None:
            suffix = "-" + re.sub(r"[^A-Za-z0-9_.+-]+", "_", program)
            kinds.append(Material(out, program, suffix, device, tuple(each)))
    return kinds if len(kinds) > 1 else [dataclasses.replace(one, suffix="") for one in kinds]


def variant_label(result: Result) -> str:
    return f"L{result.facts.get('layers')} H{result.facts.get('hidden')}"


def of_phase(footprint: Footprint, phase: str) -> Footprint:
    """One phase of a footprint; a device's total is then what that phase took, for idle belongs to none."""
    kept = pa.array([known == phase for known in footprint.rows["phase"].to_pylist()], pa.bool_())
    rows = footprint.rows.filter(kept)
    devices = rows["device"].to_pylist()
    energy_j = column(rows, "energy_j")
    totals = {
        device: dataclasses.replace(
            total,
            total_j=math.fsum(energy_j[[known == device for known in devices]].tolist()),
            idle_j=0.0,
            other_j=None,
            static_j=None,
        )
        for device, total in footprint.devices.items()
        if device in devices
    }
    return dataclasses.replace(footprint, rows=rows, devices=totals)


def _varied(result: Result) -> str:
    return ", ".join(f"{name} {value}" for name, value in values_of(result).items())
