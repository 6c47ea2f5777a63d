from __future__ import annotations

import math
import re
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smaragdine.clock import STEP_NS, Clock, ClockPair, pair, step_ns
from smaragdine.errors import UserError
from smaragdine.monitor.sampler import ClockWatch, Moved
from smaragdine.units import joule_seconds, joules, plain, plus_minus, seconds, si, watts

PREFIX = {"G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9, "p": 1e-12}
QUANTITY = re.compile(r"^(-?\d+(?:\.\d+)?) ([GMkmµnp]?)J$")


def parse(text: str) -> float:
    match = QUANTITY.match(text)
    assert match, text
    return float(match[1]) * PREFIX[match[2]]


@dataclass
class TwoClocks:
    """Both clocks move by `costs_ns`, one cost per look at either."""

    costs_ns: list[int]
    mono: int = 1_000
    offset: int = 1_700_000_000_000_000_000

    def _pass(self) -> None:
        self.mono += self.costs_ns.pop(0) if self.costs_ns else 0

    def clock(self) -> Clock:
        return Clock(wall_ns=self.wall_ns, mono_ns=self.mono_ns)

    def mono_ns(self) -> int:
        self._pass()
        return self.mono

    def wall_ns(self) -> int:
        self._pass()
        return self.mono + self.offset


def test_a_pair_is_the_same_instant_on_both_clocks():
    clocks = TwoClocks([0] * 9)
    assert pair(clocks.clock()).offset_ns == clocks.offset


@pytest.mark.parametrize("disturbed", range(3))
def test_a_pair_takes_the_try_that_was_not_interrupted(disturbed: int):
    costs = [0, 0, 0] * 3
    costs[3 * disturbed + 1] = 50_000_000
    clocks = TwoClocks(costs)
    assert pair(clocks.clock()).offset_ns == clocks.offset


@given(st.lists(st.integers(0, 20_000_000), min_size=9, max_size=9))
def test_a_pair_is_wrong_by_half_its_tightest_width_at_most(costs: list[int]):
    clocks = TwoClocks(list(costs))
    widths = [costs[i + 1] + costs[i + 2] for i in (0, 3, 6)]
    assert abs(pair(clocks.clock()).offset_ns - clocks.offset) <= min(widths) / 2 + 1


@given(st.integers(-(10**15), 10**15), st.integers(0, 10**15))
def test_a_step_is_told_from_drift(moved_ns: int, later_ns: int):
    before = ClockPair(10**18, 5)
    after = ClockPair(10**18 + later_ns + moved_ns, 5 + later_ns)
    assert step_ns(before, after) == (moved_ns if abs(moved_ns) > STEP_NS else 0)


def test_the_system_clock_does_not_step_between_two_looks():
    assert step_ns(pair(), pair()) == 0


@pytest.mark.parametrize(
    ("set_ns", "slept_ns", "moved"),
    [
        (0, 0, Moved()),
        (400_000, 0, Moved()),  # slewed
        (-90 * 10**9, 0, Moved(step_ns=-90 * 10**9)),
        (0, 7200 * 10**9, Moved(slept_ns=7200 * 10**9)),
        (-(10**9), 10**9, Moved(step_ns=-(10**9), slept_ns=10**9)),  # the wall clock alone shows nothing
    ],
)
def test_a_machine_that_slept_is_no_clock_that_was_set(set_ns: int, slept_ns: int, moved: Moved):
    clocks, boot = TwoClocks([]), TwoClocks([], offset=0)
    watch = ClockWatch(clocks.clock(), boot.wall_ns)
    clocks.mono = boot.mono = clocks.mono + 10**9
    clocks.offset += set_ns + slept_ns
    boot.offset += slept_ns
    assert watch.look() == moved
    assert watch.look() == Moved()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 J"),
        (-0.0, "0 J"),
        (None, "–"),
        (math.nan, "–"),
        (999.4, "999 J"),
        (999.96, "1.00 kJ"),
        (999_499, "999 kJ"),
        (999_960, "1.00 MJ"),
        (1234.5, "1.23 kJ"),
        (1.0, "1.00 J"),
        (9.996, "10.0 J"),
        (99.96, "100 J"),
        (0.9996, "1.00 J"),
        (0.99949, "999 mJ"),
        (1e-3, "1.00 mJ"),
        (1e-5, "10.0 µJ"),
        (2.5e-9, "2.50 nJ"),
        (-999.96, "-1.00 kJ"),
        (-0.0123, "-12.3 mJ"),
        (3.6e9, "3.60 GJ"),
        (1.5e12, "1500 GJ"),
    ],
)
def test_joules(value: float | None, text: str):
    assert joules(value) == text


@given(st.floats(1e-9, 1e12) | st.floats(-1e12, -1e-9))
def test_three_digits_carry_the_value(value: float):
    text = joules(value)
    assert parse(text) == pytest.approx(value, rel=0.0051)
    assert len(re.sub(r"\D", "", text)) == 3 or abs(value) >= 999.4e9


@given(st.floats(1e-12, 1e-9))
def test_tiny_is_not_zero(value: float):
    assert parse(joules(value)) > 0


def test_infinite_is_printed():
    assert "inf" in watts(math.inf)


@given(st.floats(1e-9, 1e12), st.integers(1, 6))
def test_digits_are_those_asked_for(value: float, digits: int):
    number = si(value, "J", digits).split(" ")[0]
    assert len(re.sub(r"\D", "", number).lstrip("0")) >= digits - 1


def test_every_unit_has_its_name():
    assert [watts(1), joules(1), joule_seconds(1)] == ["1.00 W", "1.00 J", "1.00 J·s"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (0, "0 s"),
        (0.0123, "12.3 ms"),
        (59.96, "60.0 s"),
        (119.4, "119 s"),
        (119.99, "120 s"),
        (120, "2:00 min"),
        (3599.4, "59:59 min"),
        (3599.6, "1:00:00"),
        (90_061, "25:01:01"),
    ],
)
def test_seconds(value: float | None, text: str):
    assert seconds(value) == text


def test_negative_seconds_keep_their_size():
    assert seconds(-130) == "-2:10 min"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.05, "0.05"),
        (1.0, "1"),
        (3.46, "3.5"),
        (99.6, "100"),
        (151.0, "150"),
        (2.34e7, "23000000"),
        (0.0, "0"),
    ],
)
def test_a_plain_number_has_no_exponent(value: float, text: str):
    assert plain(value) == text


@pytest.mark.parametrize(
    ("mean", "std", "text"),
    [
        (1234.5, 67.8, "1.23 ± 0.07 kJ"),
        (1234.5, 0, "1.23 kJ ± 0"),
        (0.1, 1.5e-17, "100 mJ ± 0"),
        (1234.5, 12.3, "1.234 ± 0.012 kJ"),
        (999.96, 0.5, "1.0000 ± 0.0005 kJ"),
        (5.0, 7.0, "5.00 J ± 7.0 J"),
        (0, 0.5, "0 J ± 500 mJ"),
    ],
)
def test_plus_minus(mean: float, std: float, text: str):
    assert plus_minus(mean, std, "J") == text


@given(st.floats(1e-6, 1e9), st.floats(1e-6, 0.999))
def test_plus_minus_keeps_mean_and_spread(mean: float, relative: float):
    std = mean * relative
    match = re.match(r"^(\d[\d.]*) ± (\d[\d.]*) ([GMkmµnp]?)J$", plus_minus(mean, std, "J"))
    assert match
    scale = PREFIX[match[3]]
    assert float(match[2]) * scale == pytest.approx(std, rel=0.17)
    assert float(match[1]) * scale == pytest.approx(mean, abs=0.17 * std)


def test_a_user_error_is_one_line():
    error = UserError("what\nfailed", "be\n\ncause", "Do\tthis")
    assert str(error) == "what failed: be cause. Do this"
    assert str(UserError("what")) == "what"
