"""One NVIDIA GPU as NVML shows it, and which of NVML's errors mean that it is gone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from smaragdine.clock import Clock
from smaragdine.sensors.base import SensorLost

T = TypeVar("T")

# A driver that is reset or under load answers with passing errors for a while. One that answers nothing else
# for this long, this many times, will not come back.
GIVE_UP_NS = 3_000_000_000
GIVE_UP_ERRORS = 5


def nvml() -> Any:
    """The binding, which we import only to look for a GPU."""
    import pynvml

    return pynvml


def text(value: bytes | str) -> str:
    """NVML's strings are bytes in older versions of the binding."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def usual_step(stamps: Sequence[int]) -> float:
    """The time between stamps that come regularly, except that they jitter and sometimes drop out. Needs two.

    Stamps jitter by half a step (9 to 31 ms around 20 on an H200). That moves the median of a hundred
    differences by several per cent, so we use the median only to see where stamps are missing.
    """
    steps = [later - earlier for earlier, later in pairwise(stamps)]
    middle = statistics.median(steps)
    if middle <= 0:
        return middle
    whole = sum(1 if step < 1.7 * middle else round(step / middle) for step in steps)
    return (stamps[-1] - stamps[0]) / whole


@dataclass(frozen=True)
class Gpu:
    """A physical GPU. `index` is NVML's, or the one it had before a reload; `handle` NVML's opaque one."""

    index: int
    handle: Any
    name: str
    uuid: str
    pci_bus_id: str
    pci_device_id: int
    architecture: int
    mig: bool

    @property
    def device(self) -> str:
        return f"gpu:{self.index}"


def ask(call: Callable[..., T], *args: Any) -> T | None:
    """What `call` answers, or None where this GPU or driver does not have it. For questions at the start."""
    try:
        return call(*args)
    except (nvml().NVMLError, AttributeError):
        return None


def is_lost(error: Any) -> bool:
    """Whether an NVMLError says that the GPU will not answer again before a reset."""
    lib = nvml()
    return error.value in (
        lib.NVML_ERROR_GPU_IS_LOST,
        lib.NVML_ERROR_RESET_REQUIRED,
        lib.NVML_ERROR_GPU_NOT_FOUND,
        lib.NVML_ERROR_UNINITIALIZED,
    )


class Health:
    """Tells a passing error from a lost GPU, for one sensor."""

    def __init__(self, device: str, clock: Clock) -> None:
        self._device = device
        self._clock = clock
        self._errors = 0
        self._since_ns = 0

    def attempt(self, call: Callable[[], T]) -> T | None:
        """What `call` gives; None after a passing error. Raises `SensorLost` when the error is for good."""
        lib = nvml()
        try:
            result = call()
        except lib.NVMLError as error:
            self.bad(error)
            return None
        self.good()
        return result

    def good(self) -> None:
        self._errors = 0

    def bad(self, error: Any) -> None:
        """Note an NVMLError. Raises `SensorLost` when it is for good."""
        now_ns = self._clock.mono_ns()
        if self._errors == 0:
            self._since_ns = now_ns
        self._errors += 1
        repeated = self._errors >= GIVE_UP_ERRORS and now_ns - self._since_ns >= GIVE_UP_NS
        if is_lost(error):
            raise SensorLost(f"{self._device} stopped answering: {error} (NVML error {error.value})")
        if repeated:
            raise SensorLost(
                f"{self._device} stopped answering: {error} (NVML error {error.value}), "
                f"{self._errors} times in a row"
            )


def hold_library() -> None:
    """Open NVML. Every sensor holds it open for itself, so that closing one leaves the others working."""
    nvml().nvmlInit()


def release_library() -> None:
    """Undo one `hold_library`. Does not raise."""
    lib = nvml()
    try:
        lib.nvmlShutdown()
    except lib.NVMLError:
        return
