"""What is tuned: which devices, which limits, towards what."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smaragdine.errors import UserError
from smaragdine.sensors.nvml_limits import LimitError, LimitRange
from smaragdine.sweep.limits import Lender, devices_here, ranges_here, try_all, wanted_limits
from smaragdine.sweep.plan import Setting
from smaragdine.sweep.tune.policy import Policy
from smaragdine.sweep.tune.slices import Kind, Objective

_MOST_LIMITS = 8
_ROUND_W = 5.0


@dataclass(frozen=True)
class TuneOptions:
    """What a user may choose."""

    power_w: tuple[float, ...] = ()  # none: even steps of the devices' range
    objective: Kind = "energy"
    eta: float = 0.5
    slowdown: float | None = None
    devices: tuple[str, ...] = ()  # none: those the program sees
    steps: int = 20
    settle_s: float = 0.5
    skip: int = 10
    trying: float = 0.1


@dataclass(frozen=True)
class Setup:
    devices: Mapping[str, str]  # name → UUID
    limits_w: tuple[float, ...]
    reference_w: float  # what is set now
    highest_w: float  # of all devices together, for the objective `cost`

    def policy(self, options: TuneOptions) -> Policy:
        objective = Objective(options.objective, options.eta, self.highest_w, options.slowdown)
        return Policy(self.limits_w, self.reference_w, objective, options.trying)


def find_setup(options: TuneOptions, environment: Mapping[str, str]) -> Setup:
    """Asks the driver and changes nothing. Refuses what a device does not allow."""
    devices = devices_here(options.devices, environment)
    if not devices:
        raise UserError("no GPU whose power limit could be tuned", "none was found", "See smaragdine doctor")
    ranges = [each for each in ranges_here() if each.kind == "power" and each.device in devices]
    if len(ranges) < len(devices):
        without = next(device for device in devices if device not in {each.device for each in ranges})
        raise UserError(
            f"{without} has no power limit to set", remedy="Name other devices: --devices gpu:0,…"
        )
    reference_w = min(each.current.value if each.current is not None else each.highest for each in ranges)
    limits_w = options.power_w or even_limits(ranges, reference_w)
    for limit_w in limits_w:
        wanted_limits(Setting("power", power_limit_w=limit_w), list(devices), ranges)
    if not set(limits_w) - {reference_w}:
        why = f"{reference_w:g} W is set, and no other limit is asked for or allowed"
        raise UserError("nothing to tune", why, "Name limits: --power 150,200,250")
    return Setup(devices, tuple(limits_w), reference_w, sum(each.highest for each in ranges))


def even_limits(ranges: Sequence[LimitRange], reference_w: float) -> tuple[float, ...]:
    """From what is set now, which an administrator may have lowered, down to the lowest that all allow."""
    lowest_w = max(each.lowest for each in ranges)
    step_w = max(_ROUND_W, _ROUND_W * -(-(reference_w - lowest_w) // (_ROUND_W * (_MOST_LIMITS - 1))))
    limits_w = [reference_w]
    while limits_w[-1] - step_w >= lowest_w:
        limits_w.append(limits_w[-1] - step_w)
    if limits_w[-1] - lowest_w >= step_w / 2:
        limits_w.append(lowest_w)
    return tuple(limits_w)


def check_permission(lender: Lender, setup: Setup) -> None:
    """Before anything runs: whether limits may be set at all. The one that is set already is set again."""
    setting = Setting("power", power_limit_w=setup.reference_w)
    try_all(lender, [wanted_limits(setting, list(setup.devices), ranges_here())])


def refusal(error: UserError) -> str:
    """One line, with the way out where it is a matter of permission."""
    denied = isinstance(error, LimitError) and (
        error.code == "denied" or (error.code == "unavailable" and os.geteuid() != 0)
    )
    if not denied:
        return str(error)
    why = "the NVIDIA driver lets only root with CAP_SYS_ADMIN do that"
    remedy = "Run it as root, or have root run smaragdine daemon --control-group with a group of yours"
    return str(UserError("limits cannot be set", why, remedy))
