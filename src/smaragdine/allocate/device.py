"""Profiles one device: its idle power, its power while waiting, and every point."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from smaragdine.accounting.run import Run
from smaragdine.allocate.profile import profile_table
from smaragdine.allocate.profiler import (
    UPDATES,
    Need,
    ProfiledSteps,
    ProfilerResult,
    StepBlock,
    mean_power_w,
    needed_s,
    recorded_program,
    run_point,
    steps_of,
    update_period_s,
)
from smaragdine.errors import UserError
from smaragdine.files import read_json, tail, users_file
from smaragdine.jobs.lender import Say, devices_here, gpus_here, lender, ranges_here, wanted_limits
from smaragdine.jobs.setting import Setting
from smaragdine.recording.asked import BASELINE, asked
from smaragdine.recording.command import build_command, without_secrets
from smaragdine.recording.format import INFO_FILE
from smaragdine.recording.session import RecordOptions, record_here
from smaragdine.sensors.discover import settings_from_environment, socket_limit_w
from smaragdine.sensors.nvml.gpus import ask, nvml, text
from smaragdine.units import seconds

# The points of a profile in the making. Each is written once it is measured, so an interrupted profile goes
# on.
#
#     a10.profile/request.json        what is profiled
#     a10.profile/batch32-150W.json   a point, beside its recording and what the program printed

REQUEST = "request.json"
# Columns besides those that allocate reads.
_MORE = ("energy_error_j", "updates", "provenance")


_LONGER, _ERRORS = 1.1, 2.0  # a step is clearly longer than another beyond both


@dataclass(frozen=True)
class ProfiledPoint:
    """A batch size at a limit; without `steps`, it did not fit into memory."""

    batch: int
    power_limit_w: float
    steps: ProfiledSteps | None

    @property
    def name(self) -> str:
        return point_name(self.batch, self.power_limit_w)


def point_name(batch: int, power_limit_w: float) -> str:
    return f"batch{batch}-{power_limit_w:g}W"


def disturbed(points: Sequence[ProfiledPoint]) -> list[str]:
    """A remark if a step of a smaller batch is clearly longer than one of a larger batch: such a profile
    makes small batches look expensive, and `allocate` avoids them."""
    remarks: list[str] = []
    for limit_w in dict.fromkeys(point.power_limit_w for point in points):
        here = [(point, point.steps) for point in points if point.power_limit_w == limit_w and point.steps]
        for (small, slow), (large, fast) in itertools.pairwise(here):
            error_s = math.hypot(slow.time_error_s or 0.0, fast.time_error_s or 0.0)
            if slow.time_s > _LONGER * fast.time_s + _ERRORS * error_s:
                what = f"a step of batch {small.batch} took longer than one of {large.batch} at {limit_w:g} W"
                remarks.append(
                    f"{what}: if something else ran then, remove {small.name}.json and run it again"
                )
    return remarks


def file_stem(name: str) -> str:
    """The name of this GPU's file."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def claim(folder: Path, request: Mapping[str, Any]) -> None:
    """Takes the folder for this request, or goes on in it. Raises `UserError` if it belongs to another."""
    if refuse_other(folder, request):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written", error.strerror or str(error)) from None
    write_json(folder / REQUEST, request)


def refuse_other(folder: Path, request: Mapping[str, Any]) -> bool:
    """Whether the folder belongs to this request. Raises `UserError` if it belongs to another."""
    file = folder / REQUEST
    try:
        known: Any = read_json(file)
        differ = [(key, known.get(key), value) for key, value in request.items() if known.get(key) != value]
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UserError(f"{file} cannot be read", error.strerror or str(error)) from None
    except (ValueError, AttributeError) as error:
        raise UserError(f"{file} cannot be read", str(error), f"Remove {folder} to begin anew") from None
    for key, was, value in differ:
        why = f"its {key.replace('_', ' ')} was {_words(was)}, not {_words(value)}"
        raise UserError(f"{folder} is of another profile", why, "Remove it, or name another file with -o")
    return True


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def save_point(folder: Path, point: ProfiledPoint) -> None:
    write_json(folder / f"{point.name}.json", asdict(point))


def load_point(folder: Path, batch: int, power_limit_w: float) -> ProfiledPoint | None:
    """None if it was not measured yet."""
    try:
        values: Any = read_json(folder / f"{point_name(batch, power_limit_w)}.json")
        steps = values["steps"]
        if steps is None:
            return ProfiledPoint(batch, power_limit_w, None)
        blocks = tuple(StepBlock(**block) for block in steps["blocks"])
        return ProfiledPoint(
            batch, power_limit_w, ProfiledSteps(blocks, steps["updates"], steps["provenance"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_profile(
    path: Path, gpu: str, points: Sequence[ProfiledPoint], idle_w: float | None, wait_w: float | None
) -> None:
    """Writes Parquet with one row per block, or the original's shape if the name ends in .json."""
    if path.suffix == ".json":
        write_json(path, original_shape(points))
        return
    import pyarrow.parquet as pq

    with users_file(path) as part:
        pq.write_table(parquet_table(gpu, points, idle_w, wait_w), part)


def original_shape(points: Sequence[ProfiledPoint]) -> dict[str, list[dict[str, float]]]:
    """{batch: [{power_limit, energy, time}, …]} for one step; what did not fit is left out."""
    found: dict[str, list[dict[str, float]]] = {}
    for point in points:
        if point.steps is not None:
            row = {"power_limit": point.power_limit_w, "energy": point.steps.energy_j}
            found.setdefault(str(point.batch), []).append({**row, "time": point.steps.time_s})
    return found


def parquet_table(
    gpu: str, points: Sequence[ProfiledPoint], idle_w: float | None, wait_w: float | None
) -> Any:
    import pyarrow as pa

    rows: list[dict[str, Any]] = []
    for point in points:
        every = {"gpu": gpu, "batch": point.batch, "power_limit_w": point.power_limit_w}
        every |= {"idle_w": idle_w, "wait_w": wait_w, "out_of_memory": point.steps is None}
        if point.steps is None:
            rows.append({**every, "repeat": 0, "steps": 0})
            continue
        steps = point.steps
        for repeat, block in enumerate(steps.blocks):
            updates = steps.updates * block.time_s / sum(each.time_s for each in steps.blocks)
            more = {"repeat": repeat, "updates": updates, "provenance": steps.provenance}
            rows.append({**every, **asdict(block), **more})
    table = profile_table(rows)
    types = {"provenance": pa.string()}
    for name in _MORE:
        values = pa.array([row.get(name) for row in rows], types.get(name, pa.float64()))
        table = table.append_column(name, values)
    return table


def write_json(path: Path, values: Any) -> None:
    with users_file(path) as part, open(part, "w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        file.write("\n")


# Measures every point of a profile, one after the other.

_MOST_VOID = 3


@dataclass(frozen=True)
class DeviceLimit:
    """Sets the device's power limit."""

    apply: Callable[[float], None]
    held: Callable[[], bool]  # whether the limit has stayed since it was applied


def measure(
    program: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    batches: Sequence[int],
    limits_w: Sequence[float],
    need: Need,
    blocks: int,
    limits: DeviceLimit | None,
    say: Callable[[str], None],
    kept: Callable[[str], None],
) -> list[ProfiledPoint]:
    """Measures points by rising batch, up to the first that does not fit. Points that `folder` has are not
    measured again. Without `limits`, the only limit in `limits_w` is the current one. `kept` is told the name
    of each point in the folder, also of one that failed."""
    points: list[ProfiledPoint] = []
    count = len(set(batches)) * len(limits_w)
    for batch in sorted(set(batches)):
        for limit_w in limits_w:
            point = load_point(folder, batch, limit_w)
            if point is None:
                say(f"{need.device}: batch {batch} at {limit_w:g} W ({len(points) + 1} of {count})")
                words = [word.replace("{batch}", str(batch)) for word in program]
                try:
                    point = _measured(words, environment, folder, batch, limit_w, need, blocks, limits, say)
                    save_point(folder, point)
                finally:
                    kept(point_name(batch, limit_w))
            points.append(point)
            if point.steps is None:
                # Memory does not depend on the limit, and a larger batch needs more of it.
                say(f"{need.device}: batch {batch} does not fit into memory, so nothing larger is tried")
                return points
    return points


def _measured(
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    batch: int,
    limit_w: float,
    need: Need,
    blocks: int,
    limits: DeviceLimit | None,
    say: Callable[[str], None],
) -> ProfiledPoint:
    name, at = point_name(batch, limit_w), f"batch {batch} at {limit_w:g} W"
    for _ in range(_MOST_VOID):
        if limits is not None:
            limits.apply(limit_w)
        ran = run_point(words, folder / name, folder / f"{name}.log", environment, need)
        if ran.how == "out_of_memory":
            return ProfiledPoint(batch, limit_w, None)
        if limits is None or limits.held():
            break
        say(f"{need.device}: {limit_w:g} W did not stand, so it runs again")
    else:
        raise UserError(f"{limit_w:g} W does not stand", "something takes the limit back")
    _refuse(ran, at, folder / f"{name}.log", need)
    run = Run.open(folder / name)
    for line in run.recording.damage:
        say(f"{at}: {line}")
    steps = steps_of(run, need.device, need.warm_up, blocks)
    if steps.updates < UPDATES or steps.count < need.steps:
        why = f"the program ended after {steps.count} steps, {steps.updates:.0f} updates of the counter"
        least_s = UPDATES * (update_period_s(run.recording.channels, need.device) or 0.0)
        least = f"{need.steps} steps and {UPDATES} updates, {seconds(least_s)}"
        remedy = f"Let it run longer: {least} after the first {need.warm_up} steps"
        raise UserError(f"{at} is too short", why, remedy)
    return ProfiledPoint(batch, limit_w, steps)


def _refuse(ran: ProfilerResult, at: str, log: Path, need: Need) -> None:
    if ran.how == "failed":
        how = f"signal {-ran.returncode}" if ran.returncode < 0 else f"exit code {ran.returncode}"
        raise UserError(f"{at}: the program failed with {how}", ran.said, f"See {log}")
    if not ran.steps:
        why = f"none came in {need.patience_s:g} s" if ran.how == "stuck" else "the program announced none"
        remedy = 'Put smaragdine.mark("step_end", n) after each step'
        raise UserError(f"{at}: no steps were seen", why, remedy)
    if ran.how == "stuck":
        raise UserError(
            f"{at}: no step for {need.patience_s:g} s", ran.said, f"See {log}, or raise --patience"
        )


# What a device draws when it does not work: idle, or waiting for others in an all-reduce.
#
# A GPU waits in a kernel that spins at full clocks until the others are there: far above idle. PyTorch has
# such a kernel, which spins for a number of cycles. A processor's threads sleep while they wait, so it draws
# what it draws idle.

_AT_LEAST_S = 2.0
_SETTLE_S = 1.5  # some sensors average over a second
_WORD = "smaragdine spun"
_SPIN = f"""
import sys, time
import torch

torch.cuda.init()
millisecond = getattr(torch.cuda.get_device_properties(0), "clock_rate", 1_500_000)  # in cycles
begin, end = time.time(), time.time() + float(sys.argv[1])
while time.time() < end:
    torch.cuda._sleep(50 * millisecond)
    torch.cuda._sleep(50 * millisecond)
    torch.cuda.synchronize()
print("{_WORD}", int(begin * 1e9), int(time.time() * 1e9), flush=True)
"""


def idle_power(folder: Path, device: str) -> tuple[float | None, float | None]:
    """Mean idle power in W, and how often the device has a new value, in s. Measured once."""
    if (known := _known(folder)) is None:
        shutil.rmtree(folder, ignore_errors=True)
        with record_here(folder, RecordOptions(asked=asked(BASELINE)), label="idle"):
            channels = json.loads((folder / INFO_FILE).read_bytes())["channels"]
            begin_ns = time.time_ns()
            time.sleep(max(needed_s(channels, device) or 0.0, _AT_LEAST_S))
            end_ns = time.time_ns()
        run = Run.open(folder)
        power_w = mean_power_w(run, device, begin_ns, end_ns)
        known = {"power_w": power_w, "period_s": update_period_s(run.recording.channels, device)}
        write_json(_file(folder), known)
    return known["power_w"], known["period_s"]


def wait_power(
    folder: Path, device: str, python: str, environment: Mapping[str, str], length_s: float
) -> tuple[float | None, str]:
    """Mean power in W while a kernel spins, or None and why it is not known. Measured once."""
    if (known := _known(folder)) is not None:
        return known["power_w"], ""
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.with_suffix(".log")
    seconds = max(length_s, _AT_LEAST_S) + _SETTLE_S
    words = ["--", python, "-c", _SPIN, str(seconds)]
    with recorded_program(words, folder, log, environment):
        pass
    lines = tail(log).splitlines()
    spun = next((line.split() for line in lines if line.startswith(_WORD)), None)
    if spun is not None:
        with contextlib.suppress(UserError, ValueError):
            begin_ns = int(spun[2]) + int(_SETTLE_S * 1e9)
            power_w = mean_power_w(Run.open(folder), device, begin_ns, int(spun[3]))
            write_json(_file(folder), {"power_w": power_w})
            return power_w, ""
    errors = [line.strip() for line in lines if "Error" in line]
    return None, (errors or ["nothing was measured"])[-1][:200]


def python_of(executable: str, fallback: str) -> str:
    """The interpreter that runs a program: itself, or the one beside a launcher."""
    if os.path.basename(executable).startswith("python"):
        return executable
    beside = Path(executable).parent / "python"
    return str(beside) if os.access(beside, os.X_OK) else fallback


def _known(folder: Path) -> dict[str, Any] | None:
    try:
        known: Any = read_json(_file(folder))
        return {"power_w": known["power_w"], "period_s": known.get("period_s")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _file(folder: Path) -> Path:
    return folder.with_suffix(".json")


@dataclass(frozen=True)
class ProfiledDevice:
    name: str  # gpu:0, cpu:0
    uuid: str | None
    model: str


@dataclass(frozen=True)
class Request:
    """What to profile."""

    program: tuple[str, ...]  # its words contain {batch}
    batches: tuple[int, ...]
    limits_w: tuple[float, ...]  # none: the current one
    warm_up: int
    steps: int
    blocks: int
    patience_s: float

    def claimed(self) -> dict[str, Any]:
        """What all points have in common: points of another request are of no use for this one."""
        known = {"warm_up": self.warm_up, "steps": self.steps, "blocks": self.blocks}
        return {"command": without_secrets(self.program), **known}


@dataclass(frozen=True)
class Profiled:
    points: tuple[ProfiledPoint, ...]
    idle_w: float | None
    wait_w: float | None
    remarks: tuple[str, ...]


def devices_to_profile(
    named: str | None, limited: bool, environment: Mapping[str, str]
) -> list[ProfiledDevice]:
    """The device that was named; else one GPU of each model that a program sees; else the processor."""
    if named is not None and not re.fullmatch(r"(gpu|cpu):\d{1,3}", named):
        raise UserError(f"--device {named}", "that is no device", "It is gpu:0, cpu:0 …")
    if named is None or named.startswith("gpu:"):
        found = devices_here([named] if named else [], environment)
        models = _models()
        gpus = [ProfiledDevice(device, uuid, models.get(device, "gpu")) for device, uuid in found.items()]
        if gpus:
            return list({gpu.model: gpu for gpu in reversed(gpus)}.values())[::-1]
    if limited:
        raise UserError("--power", "there is no GPU whose limit could be set", "Leave it out, or see doctor")
    return [ProfiledDevice(named or "cpu:0", None, named or "cpu:0")]


def check_request(device: ProfiledDevice, request: Request) -> tuple[float, ...]:
    """The limits in W at which to profile. Refuses what this device or this machine cannot do."""
    build_command(request.program, os.environ)
    for limit_w in request.limits_w:
        wanted_limits(Setting("power", limit_w), [device.name], ranges_here())
    return request.limits_w or (_current_limit_w(device),)


def profile_device(
    device: ProfiledDevice,
    request: Request,
    folder: Path,
    say: Say,
    kept: Callable[[str], None] = lambda name: None,
    journal: Path | None = None,
) -> Profiled:
    """Measures what `folder` does not have yet; `kept` is told the name of each point that is there."""
    limits_w = check_request(device, request)
    # The program sees only this GPU, whichever it would take otherwise.
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
def _limits(device: str, wanted: bool, say: Say, journal: Path | None) -> Iterator[DeviceLimit | None]:
    if not wanted:
        yield None
        return
    with lender(say, journal) as lent:

        def apply(limit_w: float) -> None:
            lent.apply(wanted_limits(Setting("power", limit_w), [device], ranges_here()))

        yield DeviceLimit(apply, lent.held)


def _current_limit_w(device: ProfiledDevice) -> float:
    limit_w: Any = None
    if device.uuid is None:
        limit_w = socket_limit_w(int(device.name.partition(":")[2]), settings_from_environment(os.environ))
    else:
        of = [r for r in ranges_here() if (r.device, r.kind) == (device.name, "power")]
        limit_w = of[0].current.value if of and of[0].current is not None else None
    if limit_w is None:
        raise UserError(f"{device.name} has no power limit that can be read", remedy="See smaragdine doctor")
    return float(limit_w)
