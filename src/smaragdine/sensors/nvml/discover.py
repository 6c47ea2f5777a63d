"""NVIDIA GPUs through NVML: which of them the program sees, and their power and telemetry.

It only reads, and never sets anything through NVML.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from smaragdine.clock import SYSTEM, Clock
from smaragdine.sensors.base import Absent, Channel, Found, Kind, Sensor
from smaragdine.sensors.nvml.cuda import bus_key, cuda_bus_ids, has_indices, visible_gpus
from smaragdine.sensors.nvml.gpus import (
    Gpu,
    Health,
    ask,
    hold_library,
    is_lost,
    nvml,
    release_library,
    text,
    usual_step,
)
from smaragdine.sensors.nvml.power import open_power

ARCHITECTURES = {
    2: "Kepler",
    3: "Maxwell",
    4: "Pascal",
    5: "Volta",
    6: "Turing",
    7: "Ampere",
    8: "Ada",
    9: "Hopper",
    10: "Blackwell",
    13: "Rubin",
}
NO_DRIVER_REMEDY = (
    "check that `nvidia-smi` works here; in a container start it with the GPUs (`docker run --gpus all …`)"
)


def open_sensors(
    *,
    visible: str | None,
    device_order: str | None,
    pcie: bool = False,
    clock: Clock = SYSTEM,
    numbers: Mapping[str, int] | None = None,
) -> Found:
    """Sensors of the GPUs that a program with this environment sees.

    `visible` is its CUDA_VISIBLE_DEVICES (None: not set, so all GPUs), `device_order` its CUDA_DEVICE_ORDER.
    `pcie` adds PCIe throughput, whose calls take 20 ms each. `numbers` gives GPUs, by UUID, other numbers
    than NVML's index. It takes up to about 1 s to find out each GPU's update period.
    """
    if visible is not None and visible.strip() in ("", "-1"):
        return Found(absent=[_none_visible(f"CUDA_VISIBLE_DEVICES is {visible!r}: the program sees no GPU")])
    try:
        hold_library()
    except ImportError:
        reason = "the binding nvidia-ml-py is not installed"
        return Found(absent=[Absent("gpu power", reason, "pip install nvidia-ml-py")])
    except nvml().NVMLError as error:
        return Found(absent=[_no_nvml(error)])
    try:
        return _open(visible, device_order, pcie, clock, numbers or {})
    except nvml().NVMLError as error:
        return Found(absent=[_no_nvml(error)])
    finally:
        release_library()


def _open(
    visible: str | None, device_order: str | None, pcie: bool, clock: Clock, numbers: Mapping[str, int]
) -> Found:
    gpus, absent = _all_gpus()
    facts = _facts()
    if not gpus:
        if not absent:
            reason = "the NVIDIA driver is loaded but shows no GPU"
            absent = [
                Absent(
                    "gpu power", reason, "see `nvidia-smi -L` and `lspci`; in a container pass the GPUs in"
                )
            ]
        return Found(absent=absent, facts={**facts, "gpus": []})
    chosen, note = _visible(gpus, visible, device_order)
    chosen = [replace(gpu, index=numbers.get(gpu.uuid, gpu.index)) for gpu in chosen]
    absent.extend(note)
    facts["gpus"] = [_gpu_facts(gpu) for gpu in chosen]
    sensors: list[Sensor] = []
    if chosen:
        # We watch each GPU for up to a second. On a node of eight that must not add up.
        def opener(gpu: Gpu) -> tuple[list[Sensor], Absent | None]:
            return open_power(gpu, clock)

        with ThreadPoolExecutor(len(chosen), thread_name_prefix="nvml-open") as pool:
            opened = list(pool.map(opener, chosen))
        for gpu, (power, missing) in zip(chosen, opened, strict=True):
            sensors += power
            absent += [missing] if missing is not None else []
            absent += [_no_mig_power(gpu)] if gpu.mig else []
            sensors += open_telemetry(gpu, clock, pcie=pcie)
    return Found(sensors, absent, facts)


def _all_gpus() -> tuple[list[Gpu], list[Absent]]:
    lib = nvml()
    gpus: list[Gpu] = []
    absent: list[Absent] = []
    for index in range(lib.nvmlDeviceGetCount()):
        try:
            gpus.append(_gpu(index))
        except lib.NVMLError as error:
            absent.append(_no_gpu(index, error))
    return gpus, absent


def _gpu(index: int) -> Gpu:
    lib = nvml()
    handle = lib.nvmlDeviceGetHandleByIndex(index)
    pci = lib.nvmlDeviceGetPciInfo(handle)
    architecture = ask(lib.nvmlDeviceGetArchitecture, handle)
    mig = ask(lib.nvmlDeviceGetMigMode, handle)
    return Gpu(
        index=index,
        handle=handle,
        name=text(lib.nvmlDeviceGetName(handle)),
        uuid=text(lib.nvmlDeviceGetUUID(handle)),
        pci_bus_id=text(pci.busId),
        pci_device_id=pci.pciDeviceId >> 16,
        architecture=lib.NVML_DEVICE_ARCH_UNKNOWN if architecture is None else architecture,
        mig=mig is not None and mig[0] == lib.NVML_DEVICE_MIG_ENABLE,
    )


def _visible(
    gpus: Sequence[Gpu], visible: str | None, device_order: str | None
) -> tuple[list[Gpu], list[Absent]]:
    """The GPUs that the program sees, in NVML's order, and what we could not tell."""
    if visible is None:
        return list(gpus), []
    ordinals: list[int] | None = None
    if has_indices(visible):
        ordinals = _cuda_order(gpus, device_order)
        if ordinals is None:
            reason = (
                f"CUDA_VISIBLE_DEVICES={visible} counts GPUs of different models in CUDA's own order, "
                "and CUDA cannot be asked for it (no working libcuda.so.1): all GPUs are recorded"
            )
            remedy = "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name the GPUs by UUID (`nvidia-smi -L`)"
            return list(gpus), [Absent("gpu selection", reason, remedy)]
    seen = visible_gpus(visible, [gpu.uuid for gpu in gpus], ordinals, lambda uuid: _mig_parent(gpus, uuid))
    note: list[Absent] = []
    if not seen.positions:
        named = f" names {seen.ended_by}" if seen.ended_by else " names none"
        note.append(_none_visible(f"CUDA_VISIBLE_DEVICES={visible}{named}: CUDA shows the program no GPU"))
    elif seen.ended_by and not seen.ended_by.endswith("'-1'"):
        reason = f"CUDA_VISIBLE_DEVICES={visible} names {seen.ended_by}: CUDA ends the list there"
        note.append(_none_visible(reason, "gpu selection"))
    return [gpus[position] for position in sorted(seen.positions)], note


def _cuda_order(gpus: Sequence[Gpu], device_order: str | None) -> list[int] | None:
    """Positions in `gpus` by CUDA's ordinals; None where only CUDA knows and cannot be asked.

    By default CUDA puts the fastest model first, by a measure of its own. That differs from the bus order
    only where models differ.
    """
    by_bus = sorted(range(len(gpus)), key=lambda n: bus_key(gpus[n].pci_bus_id))
    if device_order == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) == 1:
        return by_bus
    bus_ids = cuda_bus_ids(device_order)
    if not bus_ids:
        return None
    position = {bus_key(gpu.pci_bus_id): n for n, gpu in enumerate(gpus)}
    order = [position.get(bus_key(bus_id)) for bus_id in bus_ids]
    return [n for n in order if n is not None] if None not in order else None


def _mig_parent(gpus: Sequence[Gpu], uuid: str) -> int | None:
    """The position of the GPU that a MIG instance is cut from.

    Its name is its UUID or the start of it, or has the older form MIG-GPU-uuid/instance/instance.
    """
    lib = nvml()
    if uuid.startswith("MIG-GPU-"):
        parent = uuid[len("MIG-") :].split("/")[0].lower()
        older = [n for n, gpu in enumerate(gpus) if gpu.mig and gpu.uuid.lower().startswith(parent)]
        return older[0] if len(older) == 1 else None
    matches: set[int] = set()
    for position, gpu in enumerate(gpus):
        for number in range(ask(lib.nvmlDeviceGetMaxMigDeviceCount, gpu.handle) or 0):
            instance = ask(lib.nvmlDeviceGetMigDeviceHandleByIndex, gpu.handle, number)
            name = None if instance is None else ask(lib.nvmlDeviceGetUUID, instance)
            if name is not None and text(name).lower().startswith(uuid.lower()):
                matches.add(position)
    return matches.pop() if len(matches) == 1 else None


def _facts() -> dict[str, object]:
    lib = nvml()
    driver, version = ask(lib.nvmlSystemGetDriverVersion), ask(lib.nvmlSystemGetNVMLVersion)
    cuda = ask(lib.nvmlSystemGetCudaDriverVersion)
    return {
        "driver": None if driver is None else text(driver),
        "nvml": None if version is None else text(version),
        "cuda_driver": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
    }


def _gpu_facts(gpu: Gpu) -> dict[str, object]:
    lib = nvml()
    limit_mw = ask(lib.nvmlDeviceGetEnforcedPowerLimit, gpu.handle)
    default_mw = ask(lib.nvmlDeviceGetPowerManagementDefaultLimit, gpu.handle)
    range_mw = ask(lib.nvmlDeviceGetPowerManagementLimitConstraints, gpu.handle)
    memory = ask(lib.nvmlDeviceGetMemoryInfo, gpu.handle)
    return {
        "device": gpu.device,
        "name": gpu.name,
        "uuid": gpu.uuid,
        "pci_bus_id": gpu.pci_bus_id,
        "power_limit_w": None if limit_mw is None else limit_mw / 1000,
        "power_limit_default_w": None if default_mw is None else default_mw / 1000,
        "power_limit_range_w": None if range_mw is None else [mw / 1000 for mw in range_mw],
        "architecture": ARCHITECTURES.get(gpu.architecture, "unknown"),
        "mig": gpu.mig,
        "memory_mib": None if memory is None else memory.total // 2**20,
    }


def _none_visible(reason: str, channel: str = "gpu power") -> Absent:
    return Absent(channel, reason, "unset CUDA_VISIBLE_DEVICES, or name GPUs that `nvidia-smi -L` lists")


def _no_mig_power(gpu: Gpu) -> Absent:
    return Absent(
        f"{gpu.device}/mig power",
        "MIG is on, and NVML gives power for the whole GPU only, not for an instance",
        "read the GPU's energy as that of all its instances together, or run alone on it",
    )


def _no_gpu(index: int, error: Any) -> Absent:
    lib = nvml()
    if is_lost(error):
        remedy = "reset the GPU (nvidia-smi --gpu-reset) or reboot, and see the kernel log for Xid errors"
    elif error.value == lib.NVML_ERROR_NO_PERMISSION:
        remedy = (
            f"ask for access to /dev/nvidia{index} (device cgroup, job allocation, video or render group)"
        )
    elif error.value == lib.NVML_ERROR_INSUFFICIENT_POWER:
        remedy = "plug in the GPU's external power cables"
    else:
        remedy = "see `nvidia-smi` and the kernel log"
    return Absent(f"gpu:{index} power", f"NVML cannot open it: {error}", remedy)


def _no_nvml(error: Any) -> Absent:
    lib = nvml()
    reasons = {
        lib.NVML_ERROR_LIBRARY_NOT_FOUND: (
            "libnvidia-ml.so.1 not found: no NVIDIA driver is installed "
            "or it is not mounted in this container",
            NO_DRIVER_REMEDY,
        ),
        lib.NVML_ERROR_DRIVER_NOT_LOADED: (
            "the NVIDIA kernel driver is not loaded",
            "load it (`modprobe nvidia`) or reboot; `nvidia-smi` must work",
        ),
        lib.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
            "libnvidia-ml.so.1 and the loaded kernel driver are of different versions, as after an update",
            "reboot, or reload the kernel driver; in a container use the host's driver libraries",
        ),
        lib.NVML_ERROR_NO_PERMISSION: (
            "no permission to talk to the NVIDIA driver",
            "check the rights on /dev/nvidiactl and /dev/nvidia0 (video or render group, device cgroup)",
        ),
        lib.NVML_ERROR_GPU_NOT_FOUND: ("no NVIDIA GPU was found", NO_DRIVER_REMEDY),
        lib.NVML_ERROR_FUNCTION_NOT_FOUND: (
            "libnvidia-ml.so.1 is older than this binding needs",
            "update the NVIDIA driver",
        ),
    }
    reason, remedy = reasons.get(error.value, (f"NVML does not start: {error}", NO_DRIVER_REMEDY))
    return Absent("gpu power", reason, remedy)


# What a GPU was doing besides burning power: utilisation, clocks, temperature, limit, processes, PCIe. We
# poll each at the slowest rate that loses nothing. They have lanes of their own, because a slow call here
# must not delay the power readings.

LANE = "nvml-telemetry"
PCIE_LANE = "nvml-pcie"
MS_NS = 1_000_000
UTILISATION_MS = 200.0
FAST_MS, KEPT_MS = 50.0, 500.0  # a clock that stays is told twice a second
CLOCKS_MS = 500.0
SLOW_MS = 1000.0
PCIE_WINDOW_MS = 20.0
# Reasons that mean that the card would run faster if it were allowed to: power, heat, hardware.
SLOWED = 0x04 | 0x08 | 0x20 | 0x40 | 0x80


@dataclass(frozen=True)
class Item:
    """One quantity: how to read it (None: not now), and what its channel says."""

    quantity: str
    unit: str
    read: Callable[[], float | None]
    kind: Kind = "level"
    window_ms: float | None = None
    detail: str = ""


def open_telemetry(gpu: Gpu, clock: Clock, *, pcie: bool) -> list[Sensor]:
    """Sensors for whatever this GPU tells, without what it does not support."""
    utilisation_ms, whence = _utilisation_period(gpu)
    groups = [
        (LANE, utilisation_ms, _utilisation(gpu, utilisation_ms, whence)),
        (LANE, FAST_MS, _sm_clock(gpu)),
        (LANE, CLOCKS_MS, _clocks(gpu)),
        (LANE, SLOW_MS, _slow(gpu)),
    ]
    if pcie:
        groups.append((PCIE_LANE, SLOW_MS, _pcie(gpu)))
    sensors: list[Sensor] = []
    for lane, period_ms, items in groups:
        supported = [item for item in items if ask(item.read) is not None]
        if supported:
            sensors.append(TelemetrySensor(gpu, clock, lane, period_ms, supported))
    return sensors


class TelemetrySensor:
    """Some quantities of one GPU, read together."""

    def __init__(self, gpu: Gpu, clock: Clock, lane: str, period_ms: float, items: Sequence[Item]) -> None:
        hold_library()
        self.lane = lane
        self.period_ns = int(period_ms * MS_NS)
        self._clock = clock
        self._items = tuple(items)
        self._kept: dict[int, tuple[int, float]] = {}  # if read often: when each was told last, and what
        self._health = Health(gpu.device, clock)
        self._channels = tuple(
            Channel(
                gpu.device,
                item.quantity,
                item.unit,
                item.kind,
                "measured",
                period_ms,
                "nvml",
                window_ms=item.window_ms,
                detail=item.detail,
            )
            for item in items
        )

    def channels(self) -> Sequence[Channel]:
        return self._channels

    def read(self) -> Sequence[tuple[int, int, float]]:
        lib = nvml()
        readings: list[tuple[int, int, float]] = []
        failure: Any = None
        for position, item in enumerate(self._items):
            try:
                value = item.read()
            except lib.NVMLError as error:
                failure = error
                continue
            if value is not None:
                readings.append((self._clock.wall_ns(), position, value))
        if failure is not None and not readings:
            self._health.bad(failure)
        else:
            self._health.good()
        return [reading for reading in readings if self._is_news(*reading)]

    def _is_news(self, t_ns: int, position: int, value: float) -> bool:
        if self.period_ns >= KEPT_MS * MS_NS or self._items[position].kind != "level":
            return True
        told_ns, told = self._kept.get(position, (0, value))
        if value == told and t_ns - told_ns < KEPT_MS * MS_NS:
            return False
        self._kept[position] = t_ns, value
        return True

    def close(self) -> Sequence[tuple[int, int, float]]:
        release_library()
        return ()


def _utilisation_period(gpu: Gpu) -> tuple[float, str]:
    """(ms, where it comes from). NVIDIA only says that it is between 1/6 s and 1 s."""
    lib = nvml()
    answer = ask(lib.nvmlDeviceGetSamples, gpu.handle, lib.NVML_GPU_UTILIZATION_SAMPLES, 0)
    stamps_us = sorted({s.timeStamp for s in answer[1] if s.timeStamp > 0}) if answer else []
    period_ms = usual_step(stamps_us) / 1000 if len(stamps_us) >= 4 else 0.0
    if not 20 <= period_ms <= 2000:
        return UTILISATION_MS, "assumed"
    return round(period_ms, 1), "the spacing of the driver's samples"


def _utilisation(gpu: Gpu, period_ms: float, whence: str) -> list[Item]:
    lib = nvml()
    detail = f"window {period_ms:.4g} ms: {whence}"

    def gpu_percent() -> float:
        return lib.nvmlDeviceGetUtilizationRates(gpu.handle).gpu

    def memory_percent() -> float:
        return lib.nvmlDeviceGetUtilizationRates(gpu.handle).memory

    return [
        Item(
            "gpu_utilisation", "%", gpu_percent, "sample", period_ms, f"time with a kernel running; {detail}"
        ),
        Item(
            "memory_utilisation", "%", memory_percent, "sample", period_ms, f"time memory was busy; {detail}"
        ),
    ]


def _sm_clock(gpu: Gpu) -> list[Item]:
    """What a calibration needs to match: products slow down within milliseconds when they meet a limit."""
    lib = nvml()

    def clock_mhz() -> float:
        return lib.nvmlDeviceGetClockInfo(gpu.handle, lib.NVML_CLOCK_SM)

    # Its name changed with CUDA 12.
    reasons = getattr(lib, "nvmlDeviceGetCurrentClocksEventReasons", None)
    reasons = reasons or lib.nvmlDeviceGetCurrentClocksThrottleReasons

    def slowed() -> float:
        return float(reasons(gpu.handle) & SLOWED)

    bits = "NVML's bits: 4 power limit, 8 hardware, 32 and 64 heat, 128 power brake; 0: nothing"
    return [
        Item("sm_clock", "MHz", clock_mhz),
        Item("clock_held_by", "", slowed, detail=f"what holds the clock down; {bits}"),
    ]


def _clocks(gpu: Gpu) -> list[Item]:
    lib = nvml()

    def memory_clock_mhz() -> float:
        return lib.nvmlDeviceGetClockInfo(gpu.handle, lib.NVML_CLOCK_MEM)

    def performance_state() -> float | None:
        state = lib.nvmlDeviceGetPerformanceState(gpu.handle)
        return None if state == lib.NVML_PSTATE_UNKNOWN else state

    # The older call is deprecated, and older drivers do not have the newer one.
    has_new = ask(lambda: lib.nvmlDeviceGetTemperatureV(gpu.handle, lib.NVML_TEMPERATURE_GPU)) is not None

    def temperature_c() -> float:
        if has_new:
            return lib.nvmlDeviceGetTemperatureV(gpu.handle, lib.NVML_TEMPERATURE_GPU)
        return lib.nvmlDeviceGetTemperature(gpu.handle, lib.NVML_TEMPERATURE_GPU)

    return [
        Item("memory_clock", "MHz", memory_clock_mhz),
        Item("performance_state", "", performance_state, detail="0 is the fastest"),
        Item("temperature", "°C", temperature_c),
    ]


def _slow(gpu: Gpu) -> list[Item]:
    lib = nvml()

    def power_limit_w() -> float:
        return lib.nvmlDeviceGetEnforcedPowerLimit(gpu.handle) / 1000

    def memory_power_w() -> float:
        asked = (lib.NVML_FI_DEV_POWER_AVERAGE, lib.NVML_POWER_SCOPE_MEMORY)
        field = lib.nvmlDeviceGetFieldValues(gpu.handle, [asked])[0]
        if field.nvmlReturn != lib.NVML_SUCCESS:
            raise lib.NVMLError(field.nvmlReturn)
        return field.value.uiVal / 1000

    def processes() -> float:
        return len(lib.nvmlDeviceGetComputeRunningProcesses(gpu.handle))

    return [
        Item("power_limit", "W", power_limit_w, detail="enforced: the lowest of all limits in force"),
        Item("memory_power", "W", memory_power_w, "sample", SLOW_MS, "the memory's part of the GPU's power"),
        Item("processes", "", processes, detail="compute processes on the GPU, any user's"),
    ]


def _pcie(gpu: Gpu) -> list[Item]:
    lib = nvml()

    def rate_mb_s(counter: int) -> Callable[[], float]:
        # NVML counts in KB/s.
        return lambda: lib.nvmlDeviceGetPcieThroughput(gpu.handle, counter) / 1000

    window = "mean over the 20 ms of the call"
    return [
        Item("pcie_tx", "MB/s", rate_mb_s(lib.NVML_PCIE_UTIL_TX_BYTES), "sample", PCIE_WINDOW_MS, window),
        Item("pcie_rx", "MB/s", rate_mb_s(lib.NVML_PCIE_UTIL_RX_BYTES), "sample", PCIE_WINDOW_MS, window),
    ]
