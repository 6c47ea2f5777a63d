"""The profile of one device: its idle and its wait power, and every point."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smaragdine.allocate.measuring import Limits, measure
from smaragdine.allocate.points import Point, disturbed
from smaragdine.allocate.profiler import Need
from smaragdine.allocate.profiling import UPDATES
from smaragdine.allocate.rest_power import idle_power, python_of, wait_power
from smaragdine.errors import UserError
from smaragdine.recording.command import build_command, without_secrets
from smaragdine.sensors.cpu_limit import socket_limit_w
from smaragdine.sensors.discover import settings_from_environment
from smaragdine.sensors.nvml_gpu import ask, nvml, text
from smaragdine.sweep.limits import Say, devices_here, gpus_here, lender, ranges_here, wanted_limits
from smaragdine.sweep.plan import Setting


@dataclass(frozen=True)
class Device:
    name: str  # gpu:0, cpu:0
    uuid: str | None
    model: str


@dataclass(frozen=True)
class Request:
    """What is profiled."""

    program: tuple[str, ...]  # with {batch} in it
    batches: tuple[int, ...]
    limits_w: tuple[float, ...]  # none: the one that is set
    warm_up: int
    steps: int
    blocks: int
    patience_s: float

    def claimed(self) -> dict[str, Any]:
        """What points have in common: those of another request are of no use for this one."""
        known = {"warm_up": self.warm_up, "steps": self.steps, "blocks": self.blocks}
        return {"command": without_secrets(self.program), **known}


@dataclass(frozen=True)
class Profiled:
    points: tuple[Point, ...]
    idle_w: float | None
    wait_w: float | None
    remarks: tuple[str, ...]


def devices_to_profile(named: str | None, limited: bool, environment: Mapping[str, str]) -> list[Device]:
    """The one that was named, else one GPU of each model that a program sees, else the processor."""
    if named is not None and not re.fullmatch(r"(gpu|cpu):\d{1,3}", named):
        raise UserError(f"--device {named}", "that is no device", "It is gpu:0, cpu:0 …")
    if named is None or named.startswith("gpu:"):
        found = devices_here([named] if named else [], environment)
        models = _models()
        gpus = [Device(device, uuid, models.get(device, "gpu")) for device, uuid in found.items()]
        if gpus:
            return list({gpu.model: gpu for gpu in reversed(gpus)}.values())[::-1]
    if limited:
        raise UserError("--power", "there is no GPU whose limit could be set", "Leave it out, or see doctor")
    return [Device(named or "cpu:0", None, named or "cpu:0")]


def check_request(device: Device, request: Request) -> tuple[float, ...]:
    """The limits in W at which it is profiled. Refuses what this device or this machine cannot do."""
    build_command(request.program, os.environ)
    for limit_w in request.limits_w:
        wanted_limits(Setting("power", limit_w), [device.name], ranges_here())
    return request.limits_w or (_current_limit_w(device),)


def profile_device(
    device: Device,
    request: Request,
    folder: Path,
    say: Say,
    kept: Callable[[str], None] = lambda name: None,
    journal: Path | None = None,
) -> Profiled:
    """Measure what `folder` does not have yet, into it; `kept` is told the name of each that is there now."""
    limits_w = check_request(device, request)
    # The program sees this GPU alone, whichever it would take otherwise.
    visible = {} if device.uuid is None else {"CUDA_VISIBLE_DEVICES": device.uuid}
    environment = {**os.environ, **visible}
    command = build_command(request.program, environment)
    model = f" ({device.model})" if device.uuid else ""
    if not (folder / "idle.json").exists():
        say(f"{device.name}{model}: idle power")
    idle_w, period_s = idle_power(folder / "idle", device.name)
    kept("idle")
    if period_s is None:
        raise UserError(f"nothing measures {device.name}", remedy="See smaragdine doctor")
    wait_w, remarks = idle_w, tuple[str, ...]()
    if device.uuid is not None:
        if not (folder / "wait.json").exists():
            say(f"{device.name}: power while waiting")
        python = python_of(command.executable, sys.executable)
        wait_w, why = wait_power(folder / "wait", device.name, python, environment, UPDATES * period_s)
        kept("wait")
        remarks = (f"power while waiting is not known: {why}",) if why else ()
    need = Need(device.name, request.warm_up, request.steps, request.patience_s)
    with _limits(device.name, bool(request.limits_w), say, journal) as limits:
        points = measure(
            request.program,
            environment,
            folder,
            request.batches,
            limits_w,
            need,
            request.blocks,
            limits,
            say,
            kept,
        )
    return Profiled(tuple(points), idle_w, wait_w, (*remarks, *disturbed(points)))


def _models() -> dict[str, str]:
    with gpus_here() as gpus:
        return {gpu.device: text(ask(nvml().nvmlDeviceGetName, gpu.handle) or "gpu") for gpu in gpus}


@contextlib.contextmanager
def _limits(device: str, wanted: bool, say: Say, journal: Path | None) -> Iterator[Limits | None]:
    if not wanted:
        yield None
        return
    with lender(say, journal) as lent:

        def apply(limit_w: float) -> None:
            lent.apply(wanted_limits(Setting("power", limit_w), [device], ranges_here()))

        yield Limits(apply, lent.held)


def _current_limit_w(device: Device) -> float:
    limit_w: Any = None
    if device.uuid is None:
        limit_w = socket_limit_w(int(device.name.partition(":")[2]), settings_from_environment(os.environ))
    else:
        of = [r for r in ranges_here() if (r.device, r.kind) == (device.name, "power")]
        limit_w = of[0].current.value if of and of[0].current is not None else None
    if limit_w is None:
        raise UserError(f"{device.name} has no power limit that can be read", remedy="See smaragdine doctor")
    return float(limit_w)
