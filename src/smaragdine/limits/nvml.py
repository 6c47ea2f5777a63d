"""Limits of NVIDIA GPUs through NVML: what they may be, what they are, setting them and bringing them back.

No other file sets anything through NVML, and only the keeper calls what sets here: whoever sets a limit must
be able to bring the previous value back.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from smaragdine.errors import UserError
from smaragdine.sensors.nvml.gpus import ask, is_lost, nvml, text

Kind = Literal["power", "graphics_clock", "memory_clock", "application_clocks"]
KINDS: tuple[Kind, ...] = get_args(Kind)
UNITS: dict[Kind, str] = {
    "power": "W",
    "graphics_clock": "MHz",
    "memory_clock": "MHz",
    "application_clocks": "MHz",
}

# invalid: makes no sense, or is outside the range · not_found: there is no such device or lease (any more)
# denied: the driver says no, or the lease is somebody else's · unsupported: not on this device or driver
# unavailable: no answer, try again · held: somebody else holds this limit
Code = Literal["invalid", "not_found", "denied", "unsupported", "unavailable", "held"]


class LimitError(UserError):
    """Says in one line why a limit was not set; `code` says it to programs."""

    def __init__(self, code: Code, what: str, why: str = "", remedy: str = "") -> None:
        super().__init__(what, why, remedy)
        self.code: Code = code


class LimitValue(NamedTuple):
    """What a limit is set to.

    power: `value` W. Locked clocks: from `low` to `value` MHz. Application clocks: `value` graphics MHz
    and `low` memory MHz.
    """

    value: float
    low: float = 0.0


@dataclass(frozen=True)
class LimitRange:
    """What a limit of a device may be."""

    device: str
    kind: Kind
    lowest: float
    highest: float
    steps: tuple[float, ...] = ()  # where only certain values are possible, ascending
    low_steps: tuple[float, ...] = ()  # application clocks: the memory clocks
    current: LimitValue | None = None  # None: the driver does not tell
    default: LimitValue | None = None


@dataclass(frozen=True)
class LimitedGpu:
    device: str
    uuid: str
    handle: Any
    mig: bool


def open_gpus() -> list[LimitedGpu]:
    """The GPUs that answer. NVML must be held open. Raises NVMLError where NVML itself does not answer."""
    lib = nvml()
    gpus: list[LimitedGpu] = []
    for index in range(lib.nvmlDeviceGetCount()):
        handle = ask(lib.nvmlDeviceGetHandleByIndex, index)
        uuid = None if handle is None else ask(lib.nvmlDeviceGetUUID, handle)
        if uuid is not None:
            mode = ask(lib.nvmlDeviceGetMigMode, handle)
            mig = mode is not None and mode[0] == lib.NVML_DEVICE_MIG_ENABLE
            gpus.append(LimitedGpu(f"gpu:{index}", text(uuid), handle, mig))
    return gpus


def limit_ranges(gpu: LimitedGpu) -> list[LimitRange]:
    """Every kind of limit that this GPU has."""
    lib, found = nvml(), list[LimitRange]()
    bounds = ask(lib.nvmlDeviceGetPowerManagementLimitConstraints, gpu.handle)
    if bounds is not None:
        default_mw = ask(lib.nvmlDeviceGetPowerManagementDefaultLimit, gpu.handle)
        default = None if default_mw is None else LimitValue(default_mw / 1000)
        lowest, highest = (mw / 1000 for mw in bounds)
        current = ask(current_setting, gpu, "power")
        found.append(LimitRange(gpu.device, "power", lowest, highest, (), (), current, default))
    pairs = _supported_clocks(gpu)
    if not pairs:
        return found
    memory = tuple(sorted(pairs))
    graphics = tuple(sorted({mhz for clocks in pairs.values() for mhz in clocks}))
    found.append(LimitRange(gpu.device, "graphics_clock", graphics[0], graphics[-1], graphics))
    found.append(LimitRange(gpu.device, "memory_clock", memory[0], memory[-1], memory))
    current = ask(current_setting, gpu, "application_clocks")
    if current is not None:
        default = _application_clocks(gpu, lib.nvmlDeviceGetDefaultApplicationsClock)
        bounds = graphics[0], graphics[-1]
        found.append(
            LimitRange(gpu.device, "application_clocks", *bounds, graphics, memory, current, default)
        )
    return found


def current_setting(gpu: LimitedGpu, kind: Kind) -> LimitValue | None:
    """What is set now; None for locked clocks, which NVML sets but does not tell. Raises NVMLError."""
    lib = nvml()
    if kind == "power":
        return LimitValue(lib.nvmlDeviceGetPowerManagementLimit(gpu.handle) / 1000)
    if kind == "application_clocks":
        return LimitValue(
            lib.nvmlDeviceGetApplicationsClock(gpu.handle, lib.NVML_CLOCK_GRAPHICS),
            lib.nvmlDeviceGetApplicationsClock(gpu.handle, lib.NVML_CLOCK_MEM),
        )
    return None


def checked(gpu: LimitedGpu, kind: Kind, asked: LimitValue) -> LimitValue:
    """`asked` as NVML would take it. Raises `LimitError`, which names what is allowed."""
    if not all(math.isfinite(number) and number >= 0 for number in asked):
        raise LimitError(
            "invalid", f"{gpu.device} {kind_words(kind)} {asked.value:g}", "not a number above 0"
        )
    allowed = {found.kind: found for found in limit_ranges(gpu)}.get(kind)
    if allowed is None:
        # `limit_ranges` swallowed this error. It tells a lost GPU from one without this limit.
        _raise_why_absent(gpu, kind)
        raise _unsupported(gpu, kind)
    if kind == "power":
        if asked.low:
            raise LimitError("invalid", f"{gpu.device} power limit", "it has no lowest value to set")
        _inside(allowed, asked.value)
        return LimitValue(round(asked.value * 1000) / 1000)
    if kind == "application_clocks":
        _one_of(allowed.device, "application memory clock", asked.low, allowed.low_steps)
        graphics = tuple(sorted(_supported_clocks(gpu)[round(asked.low)]))
        _one_of(
            allowed.device, f"application graphics clock at memory {asked.low:g} MHz", asked.value, graphics
        )
        return asked
    low = asked.low or allowed.lowest
    for number in (asked.value, low):
        _one_of(allowed.device, kind_words(kind), number, allowed.steps)
    if low > asked.value:
        why = f"the lowest ({low:g} MHz) is above the highest ({asked.value:g} MHz)"
        raise LimitError("invalid", f"{gpu.device} {kind_words(kind)}", why)
    return LimitValue(asked.value, low)


def apply(gpu: LimitedGpu, kind: Kind, setting: LimitValue) -> None:
    """Sets a limit that was `checked`. Raises NVMLError."""
    lib = nvml()
    value, low = round(setting.value), round(setting.low)
    if kind == "power":
        lib.nvmlDeviceSetPowerManagementLimit(gpu.handle, round(setting.value * 1000))
    elif kind == "graphics_clock":
        lib.nvmlDeviceSetGpuLockedClocks(gpu.handle, low, value)
    elif kind == "memory_clock":
        lib.nvmlDeviceSetMemoryLockedClocks(gpu.handle, low, value)
    else:
        lib.nvmlDeviceSetApplicationsClocks(gpu.handle, low, value)


def bring_back(gpu: LimitedGpu, kind: Kind, previous: LimitValue | None) -> None:
    """Sets what was before; None leaves it to the driver again. Raises NVMLError."""
    lib = nvml()
    if kind == "graphics_clock":
        lib.nvmlDeviceResetGpuLockedClocks(gpu.handle)
    elif kind == "memory_clock":
        lib.nvmlDeviceResetMemoryLockedClocks(gpu.handle)
    elif kind == "application_clocks" and (
        previous is None or previous == _application_clocks(gpu, lib.nvmlDeviceGetDefaultApplicationsClock)
    ):
        # Set to the default is not the same as never set: only a reset follows a later default.
        lib.nvmlDeviceResetApplicationsClocks(gpu.handle)
    elif previous is not None:
        apply(gpu, kind, previous)


def limit_error(device: str, kind: Kind, error: Any, *, mig: bool = False) -> LimitError:
    """An NVMLError as one line."""
    lib = nvml()
    what = f"{device} {kind_words(kind)} not set"
    if error.value == lib.NVML_ERROR_NO_PERMISSION:
        remedy = "Run the daemon, or the command, as root; in a container add the capability SYS_ADMIN"
        why = "the NVIDIA driver lets only root with CAP_SYS_ADMIN do that"
        return LimitError("denied", what, why, remedy)
    if error.value in (lib.NVML_ERROR_NOT_SUPPORTED, lib.NVML_ERROR_FUNCTION_NOT_FOUND):
        return _unsupported(LimitedGpu(device, "", None, mig), kind)
    if error.value in (lib.NVML_ERROR_INVALID_ARGUMENT, getattr(lib, "NVML_ERROR_FREQ_NOT_SUPPORTED", 24)):
        return LimitError("invalid", what, f"the driver refuses the value ({error})")
    gone = "the GPU does not answer" if is_lost(error) else "the driver does not answer"
    return LimitError("unavailable", what, f"{gone} ({error}, NVML error {error.value})", "Try again")


def setting_words(kind: Kind, setting: LimitValue | None) -> str:
    """A setting for people: `300 W`, `345 to 1200 MHz`."""
    if setting is None:
        return "the driver's choice"
    if kind == "power":
        return f"{setting.value:g} W"
    if kind == "application_clocks":
        return f"{setting.value:g} MHz (memory {setting.low:g} MHz)"
    return f"{setting.low:g} to {setting.value:g} MHz"


def _supported_clocks(gpu: LimitedGpu) -> dict[int, list[int]]:
    """Graphics clocks by the memory clock they go with, MHz."""
    lib = nvml()
    memory = ask(lib.nvmlDeviceGetSupportedMemoryClocks, gpu.handle) or []
    pairs = {mhz: ask(lib.nvmlDeviceGetSupportedGraphicsClocks, gpu.handle, mhz) or [] for mhz in memory}
    return {mhz: clocks for mhz, clocks in pairs.items() if clocks}


def _application_clocks(gpu: LimitedGpu, call: Any) -> LimitValue | None:
    lib = nvml()
    graphics = ask(call, gpu.handle, lib.NVML_CLOCK_GRAPHICS)
    memory = ask(call, gpu.handle, lib.NVML_CLOCK_MEM)
    return None if graphics is None or memory is None else LimitValue(graphics, memory)


def _raise_why_absent(gpu: LimitedGpu, kind: Kind) -> None:
    lib = nvml()
    try:
        if kind == "power":
            lib.nvmlDeviceGetPowerManagementLimitConstraints(gpu.handle)
        else:
            lib.nvmlDeviceGetSupportedMemoryClocks(gpu.handle)
    except lib.NVMLError as error:
        raise limit_error(gpu.device, kind, error, mig=gpu.mig) from None


def _unsupported(gpu: LimitedGpu, kind: Kind) -> LimitError:
    why = "this GPU or its driver has no such limit" + (" (MIG is on)" if gpu.mig else "")
    remedy = "Locked clocks do the same on newer GPUs" if kind == "application_clocks" else ""
    return LimitError("unsupported", f"{gpu.device} {kind_words(kind)} not set", why, remedy)


def _inside(allowed: LimitRange, value: float) -> None:
    if not allowed.lowest <= value <= allowed.highest:
        unit = UNITS[allowed.kind]
        raise LimitError(
            "invalid",
            f"{allowed.device} {kind_words(allowed.kind)} of {value:g} {unit}",
            "outside the device's range",
            f"Allowed: {allowed.lowest:g} to {allowed.highest:g} {unit}",
        )


def _one_of(device: str, what: str, value: float, steps: Sequence[float]) -> None:
    if value in steps:
        return
    after = bisect(steps, value)
    near = " and ".join(f"{step:g}" for step in steps[max(after - 1, 0) : after + 1])
    raise LimitError(
        "invalid",
        f"{device} {what} of {value:g} MHz",
        "not one of the device's clocks",
        f"Nearest: {near} MHz; allowed: {steps[0]:g} to {steps[-1]:g} MHz",
    )


def kind_words(kind: Kind) -> str:
    """A kind of limit for people."""
    return {"power": "power limit"}.get(kind, kind.replace("_", " "))
