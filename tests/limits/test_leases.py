"""Leases: one holder per limit, an end for every lease, and the original value after it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from smaragdine.clock import Clock
from smaragdine.limits.keeper import Brought
from smaragdine.limits.leases import Applied, Lease, Leases
from smaragdine.limits.nvml import KINDS, Kind, LimitError, LimitValue

ORIGINAL = LimitValue(700.0)
DEVICES = ("gpu:0", "gpu:1")
S_NS = 1_000_000_000


class FakeTime:
    def __init__(self) -> None:
        self.now_ns = 0

    def clock(self) -> Clock:
        return Clock(lambda: 10**18 + self.now_ns, lambda: self.now_ns, lambda s: None)


class FakeLimits:
    """Keeps what a keeper keeps: the value now, and what it was before the first change."""

    def __init__(self) -> None:
        self.generation = 0
        self.now: dict[tuple[str, Kind], LimitValue] = {}
        self.owed: dict[tuple[str, Kind], LimitValue] = {}
        self.calls = 0
        self.fails: LimitError | None = None

    def value(self, device: str, kind: Kind) -> LimitValue:
        return self.now.get((device, kind), ORIGINAL)

    def set(self, device: str, kind: Kind, value: float, low: float = 0.0) -> Applied:
        self.calls += 1
        if self.fails is not None:
            raise self.fails
        if value > 700:
            raise LimitError("invalid", "too much")
        key = (device, kind)
        previous = self.owed.setdefault(key, self.value(*key))
        self.now[key] = LimitValue(value, low)
        return Applied(previous, self.now[key], self.generation)

    def restore(self, device: str, kind: Kind) -> Brought:
        key = (device, kind)
        if key in self.owed:
            self.now[key] = self.owed.pop(key)
        return Brought("restored", self.value(*key), "")

    def killed(self) -> None:
        for key in list(self.owed):
            self.restore(*key)
        self.generation += 1


def table() -> tuple[Leases, FakeLimits, FakeTime]:
    limits, time = FakeLimits(), FakeTime()
    return Leases(limits, time.clock()), limits, time


def code(call: object, *args: object, **options: object) -> str:
    with pytest.raises(LimitError) as raised:
        call(*args, **options)  # type: ignore[operator]
    assert "\n" not in str(raised.value)
    return raised.value.code


def test_a_lease_lasts_a_minute_and_the_value_comes_back() -> None:
    leases, limits, time = table()
    lease = leases.set_limit("ann", "gpu:0", "power", 300)
    assert lease.previous == ORIGINAL
    assert lease.expires_ns == 10**18 + 60 * S_NS
    time.now_ns = 60 * S_NS - 1
    assert leases.expire() == []
    assert limits.value("gpu:0", "power") == LimitValue(300)
    time.now_ns += 1
    assert leases.expire() == [lease]
    assert limits.value("gpu:0", "power") == ORIGINAL
    assert leases.held() == []


def test_renewing_moves_the_end_and_asks_the_driver_only_for_a_new_value() -> None:
    leases, limits, time = table()
    lease = leases.set_limit("ann", "gpu:0", "power", 300, lease_s=10)
    time.now_ns = 9 * S_NS
    renewed = leases.set_limit("ann", "gpu:0", "power", 300, lease_s=20, lease_id=lease.lease_id)
    assert (renewed.lease_id, renewed.deadline_ns) == (lease.lease_id, 29 * S_NS)
    assert limits.calls == 1
    changed = leases.set_limit("ann", "gpu:0", "power", 250, lease_id=lease.lease_id)
    assert (changed.previous, limits.value("gpu:0", "power")) == (ORIGINAL, LimitValue(250))
    assert limits.calls == 2
    assert leases.release("ann", lease.lease_id).now == ORIGINAL


def test_a_held_limit_is_refused_with_who_and_how_long_and_free_after_its_time() -> None:
    leases, limits, time = table()
    leases.set_limit("ann", "gpu:0", "power", 300)
    with pytest.raises(LimitError, match=r"ann holds its power limit for 60 s more") as raised:
        leases.set_limit("bob", "gpu:0", "power", 400)
    assert raised.value.code == "held"
    assert limits.value("gpu:0", "power") == LimitValue(300)
    leases.set_limit("bob", "gpu:1", "power", 400)
    time.now_ns = 60 * S_NS
    assert leases.set_limit("bob", "gpu:0", "power", 400).previous == ORIGINAL


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        ("application_clocks", "graphics_clock", False),
        ("application_clocks", "memory_clock", False),
        ("graphics_clock", "application_clocks", False),
        ("memory_clock", "application_clocks", False),
        ("graphics_clock", "memory_clock", True),
        ("power", "application_clocks", True),
    ],
)
def test_locked_clocks_and_application_clocks_exclude_each_other(
    first: Kind, second: Kind, together: bool
) -> None:
    leases, _, _ = table()
    leases.set_limit("ann", "gpu:0", first, 300)
    leases.set_limit("ann", "gpu:1", second, 300)
    if together:
        leases.set_limit("ann", "gpu:0", second, 300)
    else:
        assert code(leases.set_limit, "ann", "gpu:0", second, 300) == "held"


def test_foreign_ended_and_invented_leases() -> None:
    leases, limits, _ = table()
    lease = leases.set_limit("ann", "gpu:0", "power", 300)
    assert code(leases.release, "bob", lease.lease_id) == "denied"
    assert code(leases.set_limit, "bob", "gpu:0", "power", 200, lease_id=lease.lease_id) == "denied"
    assert code(leases.set_limit, "ann", "gpu:1", "power", 200, lease_id=lease.lease_id) == "invalid"
    leases.release("ann", lease.lease_id)
    for _ in range(600):  # more than are remembered
        again = leases.set_limit("ann", "gpu:0", "power", 300)
        leases.release("ann", again.lease_id)
        assert code(leases.release, "ann", again.lease_id) == "not_found"
    for replayed in (lease.lease_id, "", "x" * 22):
        assert code(leases.release, "ann", replayed) == "not_found"
    assert code(leases.set_limit, "ann", "gpu:0", "power", 300, lease_id=lease.lease_id) == "not_found"
    assert limits.value("gpu:0", "power") == ORIGINAL


def test_the_owners_end_ends_its_leases_only() -> None:
    leases, limits, _ = table()
    for owner, device in (("ann", "gpu:0"), ("bob", "gpu:1")):
        leases.set_limit(owner, device, "power", 300)
    assert [lease.device for lease in leases.owner_gone("ann")] == ["gpu:0"]
    assert (limits.value("gpu:0", "power"), limits.value("gpu:1", "power")) == (ORIGINAL, LimitValue(300))


@pytest.mark.parametrize("lease_s", [-1.0, 3600.1, float("nan"), float("inf")])
def test_no_lease_of_a_senseless_length(lease_s: float) -> None:
    leases, limits, _ = table()
    assert code(leases.set_limit, "ann", "gpu:0", "power", 300, lease_s=lease_s) == "invalid"
    assert limits.calls == 0


def test_a_refused_change_leaves_the_lease_and_a_failed_one_ends_it() -> None:
    leases, limits, _ = table()
    lease = leases.set_limit("ann", "gpu:0", "power", 300)
    assert code(leases.set_limit, "ann", "gpu:0", "power", 900, lease_id=lease.lease_id) == "invalid"
    assert leases.held() == [lease]
    limits.fails = LimitError("unavailable", "no answer")
    assert code(leases.set_limit, "ann", "gpu:0", "power", 200, lease_id=lease.lease_id) == "unavailable"
    assert leases.held() == []
    assert limits.value("gpu:0", "power") == ORIGINAL


def test_a_new_keeper_makes_every_lease_void_and_says_so() -> None:
    leases, limits, _ = table()
    lease = leases.set_limit("ann", "gpu:0", "power", 300)
    limits.killed()
    with pytest.raises(LimitError, match="keeper was restarted"):
        leases.release("ann", lease.lease_id)
    new = leases.set_limit("bob", "gpu:0", "power", 200)
    assert (new.previous, leases.held()) == (ORIGINAL, [new])


def test_ids_cannot_be_guessed() -> None:
    leases, _, _ = table()
    seen = {leases.set_limit("ann", d, k, 300).lease_id for d, k in itertools.product(DEVICES, KINDS[:3])}
    assert len(seen) == 6
    assert all(len(lease_id) == 22 for lease_id in seen)  # 128 bits


OWNERS = st.sampled_from(["ann", "bob"])


class LeaseMachine(RuleBasedStateMachine):
    """Any sequence of calls: what is held is what is set, and everything else is as it was."""

    @initialize()
    def begin(self) -> None:
        self.leases, self.limits, self.time = table()
        self.given: list[Lease] = []

    def attempt(self, **asked: object) -> None:
        try:
            lease = self.leases.set_limit(**asked)  # type: ignore[arg-type]
        except LimitError:
            return
        self.given.append(lease)

    @rule(
        owner=OWNERS,
        device=st.sampled_from(DEVICES),
        kind=st.sampled_from(KINDS),
        value=st.sampled_from([100.0, 300.0, 900.0]),
        lease_s=st.sampled_from([0.0, 1.0, 3600.0]),
    )
    def lend(self, **asked: object) -> None:
        self.attempt(**asked)

    @precondition(lambda self: self.given)
    @rule(data=st.data(), owner=OWNERS, value=st.sampled_from([100.0, 200.0, 900.0]))
    def change(self, data: st.DataObject, owner: str, value: float) -> None:
        lease = data.draw(st.sampled_from(self.given))
        self.attempt(owner=owner, device=lease.device, kind=lease.kind, value=value, lease_id=lease.lease_id)

    @precondition(lambda self: self.given)
    @rule(data=st.data(), owner=OWNERS)
    def release(self, data: st.DataObject, owner: str) -> None:
        lease = data.draw(st.sampled_from(self.given))
        if lease.lease_id not in {held.lease_id for held in self.leases.held()}:
            assert code(self.leases.release, owner, lease.lease_id) == "not_found"
        elif owner != lease.owner:
            assert code(self.leases.release, owner, lease.lease_id) == "denied"
        else:
            assert self.leases.release(owner, lease.lease_id).now == ORIGINAL

    @rule(owner=OWNERS)
    def owner_ends(self, owner: str) -> None:
        self.leases.owner_gone(owner)
        assert all(lease.owner != owner for lease in self.leases.held())

    @rule(seconds=st.sampled_from([0.5, 61.0, 3601.0]))
    def time_passes(self, seconds: float) -> None:
        self.time.now_ns += round(seconds * S_NS)
        self.leases.expire()

    @rule(down=st.booleans())
    def driver(self, down: bool) -> None:
        self.limits.fails = LimitError("unavailable", "no answer") if down else None

    @rule()
    def keeper_dies(self) -> None:
        self.limits.killed()
        self.leases.expire()
        assert self.leases.held() == []

    @invariant()
    def what_is_held_is_set_and_nothing_else(self) -> None:
        held = {(lease.device, lease.kind): lease.asked for lease in self.leases.held()}
        assert len(held) == len(self.leases.held())
        assert dict(self.limits.now) | held == self.limits.now
        assert {
            key: ORIGINAL for key in self.limits.now if key not in held
        }.items() <= self.limits.now.items()
        clocks = {(device, kind == "application_clocks") for device, kind in held if kind != "power"}
        assert all((device, not application) not in clocks for device, application in clocks)

    def teardown(self) -> None:
        if hasattr(self, "leases"):
            for owner in {lease.owner for lease in self.leases.held()}:
                self.leases.owner_gone(owner)
            assert set(self.limits.now.values()) <= {ORIGINAL}


TestAnySequence = LeaseMachine.TestCase
TestAnySequence.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
