"""The model of a card, on calls whose power follows a rule that it is not told."""

from __future__ import annotations

import numpy as np
import pytest

from smaragdine.calibrate.card_model import LEAST, CallSketch, CardModel, learned
from smaragdine.calibrate.store import CacheState, MeasuredCall

IDLE_W = 120.0
KINDS = {
    "aten::mm": ("nvjet_sm90_tst_192x128_64x5", 850.0),
    "aten::add": ("void at::native::vectorized_elementwise_kernel<4, add>(int)", 500.0),
    "aten::sum": ("void at::native::reduce_kernel<128, 4, sum>(int)", 200.0),
    "aten::copy_": ("void at::native::unrolled_elementwise_kernel<copy>(int)", 380.0),
}


def draws(op: str, blocks: int, time_s: float) -> float:
    """Above idle: short calls draw less, and calls of few blocks almost nothing."""
    return KINDS[op][1] * min(blocks / 100, 1.0) * (1 - 0.4 * 2e-6 / (2e-6 + time_s))


def measured(op: str, blocks: int, time_s: float, program: str, power_w: float = 0.0) -> MeasuredCall:
    state = CacheState(
        power_w=IDLE_W + (power_w or draws(op, blocks, time_s)),
        time_s=time_s,
        spread=0.01,
        clock_mhz=1980.0,
        slowed=0.0,
        temperature_c=50.0,
        rest=0.0,
    )
    return MeasuredCall(
        f"{op} {blocks} {time_s} {program}",
        op,
        "GPU-0",
        "fake",
        "1",
        "torch",
        IDLE_W,
        cold=state,
        kernel=KINDS[op][0],
        blocks=blocks,
        program=program,
    )


def store(seed: int = 0, programs: int = 3, spread: float = 0.05) -> list[MeasuredCall]:
    rng = np.random.default_rng(seed)
    found = []
    for program in range(programs):
        for op in KINDS:
            for _ in range(8):
                blocks, time_s = int(2 ** rng.uniform(0, 14)), float(2 ** rng.uniform(1, 9)) * 1e-6
                off = 1 + spread * float(rng.standard_normal())
                power_w = max(draws(op, blocks, time_s) * off, 0.1)
                found.append(measured(op, blocks, time_s, f"python {program}.py", power_w))
    return found


def sketch(op: str, blocks: int, time_s: float) -> CallSketch:
    return CallSketch(op, KINDS[op][0], blocks, time_s)


def model_of(replays: list[MeasuredCall]) -> CardModel:
    model = learned(replays)
    assert model is not None
    return model


def test_it_knows_classes_lengths_and_blocks() -> None:
    model = model_of(store())
    asked = [(op, 4000, 50e-6) for op in KINDS]
    guesses = model.guesses([sketch(*each) for each in asked])
    for each, guess in zip(asked, guesses, strict=True):
        assert guess.above_w == pytest.approx(draws(*each), rel=0.15)
    # One block leaves the card idle, whatever it computes.
    (small,) = model.guesses([sketch("aten::mm", 1, 50e-6)])
    assert small.above_w < 0.05 * KINDS["aten::mm"][1]
    # An operation that nobody replayed goes by its kernel's class.
    generated = CallSketch("triton_red_fused_sum_3", "triton_red_fused_sum_3", 4000, 50e-6)
    (unseen,) = model.guesses([generated])
    (seen,) = model.guesses([sketch("aten::mm", 4000, 50e-6)])
    assert unseen.deviation > seen.deviation


def test_bars_cover_what_a_program_left_out_draws() -> None:
    inside, rows = 0, 0
    for seed in range(8):
        replays = store(seed)
        model = model_of([each for each in replays if each.program != "python 0.py"])
        for each in replays:
            if each.program == "python 0.py" and each.cold is not None:
                above_w = each.cold.power_w - IDLE_W
                (guess,) = model.guesses([CallSketch(each.op, each.kernel, each.blocks, each.cold.time_s)])
                rows += 1
                inside += abs(guess.above_w - above_w) <= 1.96 * guess.deviation * max(guess.above_w, 1.0)
    assert 0.85 <= inside / rows <= 1.0


def test_its_error_is_that_of_programs_left_out() -> None:
    model = model_of(store(spread=0.05))
    assert 0.02 < model.error < 0.2
    assert model.programs == 3
    assert "with one program after the other left out" in model.remark
    # A program that draws another power shows in the error, and in the bars.
    odd = [measured(op, 4000, 50e-6, "python odd.py", 2 * KINDS[op][1]) for op in KINDS for _ in range(4)]
    shaken = model_of(store(spread=0.05) + odd)
    assert shaken.error > 1.5 * model.error
    assert shaken.wider > model.wider
    alone = model_of(store(programs=1))
    assert "with one operation after the other left out" in alone.remark


def test_too_little_teaches_nothing() -> None:
    few = store()[: LEAST - 1]
    assert learned(few) is None
    assert learned([]) is None
    assert (
        learned([measured("aten::mm", 100 + i, 1e-5, "one") for i in range(LEAST)]) is None
    )  # nothing to try on
    unnamed = [MeasuredCall(f"{i}", "aten::mm", "GPU-0", "fake", "1", "torch", IDLE_W) for i in range(50)]
    assert learned(unnamed) is None


def test_a_replay_twice_is_no_trouble() -> None:
    same = [measured("aten::mm", 128, 1e-5, f"python {i % 2}.py") for i in range(20)]
    (guess,) = model_of(same).guesses([sketch("aten::mm", 128, 1e-5)])
    assert guess.above_w == pytest.approx(draws("aten::mm", 128, 1e-5), rel=0.01)
