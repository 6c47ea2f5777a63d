"""How far rows are off and how wide their intervals are, for programs on the simulated card.

equal shares        what a recording says by itself
naive replays       back to back, inputs hot, no look at the clock
calibrated          what `smaragdine calibrate` makes of it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from simulated_card import SimulatedCard, SimulatedCards
from simulated_program import Recorded, make_program, record
from smaragdine.accounting.calibrated import Calibration, CallPower
from smaragdine.accounting.calibrated import write as write_calibration
from smaragdine.accounting.run import Run
from smaragdine.calibrate.replay import calls_of
from smaragdine.calibrate.session import calibrate
from smaragdine.calibrate.store import Store

EQUAL, NAIVE, CALIBRATED = "equal shares", "naive replays", "calibrated"
ONE, TWO, LIMITED = "one stream", "two streams", "at the power limit"


@dataclass(frozen=True)
class Row:
    error: float  # of the true energy
    width: float
    energy_j: float  # the true one


@dataclass(frozen=True)
class Figures:
    """Of many rows: error and width weighted by energy, and for how many the interval covers the truth."""

    error: float
    width: float
    covered: float
    by_energy: float

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Figures:
        error, width, energy_j = (np.array([getattr(row, n) for row in rows]) for n in Row.__annotations__)
        covered = np.abs(error) <= width
        means = (float(np.average(each, weights=energy_j)) for each in (np.abs(error), width, covered))
        mean_error, mean_width, by_energy = means
        return cls(mean_error, mean_width, float(covered.mean()), by_energy)

    def __str__(self) -> str:
        return f"{self.error:>8.1%} {self.width:>8.1%} {self.covered:>8.1%} {self.by_energy:>10.1%}"


@dataclass(frozen=True)
class Outcome:
    kind: str  # of program
    rows: dict[str, list[Row]]
    closure: str


def judge(folder: Path, seed: int, window_ms: float) -> Outcome:
    """One program, on a card of its own."""
    program, card = make_program(seed), SimulatedCard(seed, window_ms)
    run = record(folder / "run", program, card, window_ms)
    rows = {EQUAL: _rows(run)}
    cards = SimulatedCards(card, program.calls)
    _naive(run.folder, cards)
    rows[NAIVE] = _rows(run)
    calibrate(Run.open(run.folder), Store(folder / "store"), budget_s=1e9, say=lambda _: None, cards=cards)
    rows[CALIBRATED] = _rows(run)
    said = Run.open(run.folder).accounted.remarks
    kind = LIMITED if run.slowed > 0.05 else TWO if program.lanes > 1 else ONE
    return Outcome(kind, rows, next((each for each in said if "calibration" in each), ""))


def _rows(run: Recorded) -> list[Row]:
    found = Run.open(run.folder).accounted.device_rows("gpu:0").to_pylist()
    true_j = [run.true_j[row["name"], row["phase"]] for row in found]
    return [
        Row(row["energy_j"] / joules - 1, row["uncertainty_j"] / joules, joules)
        for row, joules in zip(found, true_j, strict=True)
    ]


def _naive(folder: Path, cards: SimulatedCards) -> None:
    """What published replays do: half a second of the same inputs, as fast as the card goes."""
    calls = calls_of(Run.open(folder).recording.calls.to_pylist(), "gpu:0")
    card, meter = cards.process("", {}), cards.meter({})
    asked = [{"id": call.id} for call in calls]
    there = {
        each["id"] for each in card.ask(do="check", calls=asked, lists=[])["checked"] if "why" not in each
    }
    card.ask(do="pause")
    idle_w = meter.over(meter.now_s() + 0.2, 1.0).power_w
    card.ask(do="stop")
    found: dict[int, CallPower] = {}
    for call in calls:
        if call.id in there:
            card.ask(do="prepare", call=call.id, cold=False)
            card.ask(do="load", rest=0.0)
            found[call.id] = CallPower(meter.over(meter.now_s() + 0.2, 0.5).power_w, 0.0)
            card.ask(do="stop")
    write_calibration(folder, {"gpu:0": Calibration(found, idle_w)})
