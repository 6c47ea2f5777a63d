"""GPUs for tests: builds the fake NVML and CUDA libraries and describes their GPUs.

A program sees the GPUs through its environment:

    env = nvml_environment(tmp_path, [GpuSpec(low_w=60, high_w=300, period_ms=200, duty=0.25)])
    subprocess.run([sys.executable, "-m", "smaragdine", "run", "train.py"], env=env)

and `write_spec(Path(env["FAKE_NVML"]), [...])` switches faults on while it runs. `energy_j` is the exact
energy to compare with. Change faults and limits while a program runs, never the waveform: the energy counter
is the integral of the waveform since a fixed time, and would jump.

A GPU with `announced=True` works only when a program says so, and exactly as long: programs run `WORK` and
call `work(seconds)`. However long the machine pauses, the energy is that of the work.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from smaragdine.clock import Clock

FAKES = Path(__file__).parent / "fakes"
NVML_LIBRARY = "libnvidia-ml.so.1"
CUDA_LIBRARY = "libcuda.so.1"
MS_NS = 1_000_000

KEPLER, PASCAL, VOLTA, TURING, AMPERE, ADA, HOPPER = 2, 4, 5, 6, 7, 8, 9

_built: dict[str, Path] = {}


# For programs under test. The work lies in the future when it is announced: nobody has read of that time yet.
# It returns when every counter shows all of it.
WORK = """
import os, time

def work(seconds, gpu=0, lead_s=0.1):
    path = os.environ["FAKE_NVML"] + ".work"
    before = open(path).read() if os.path.exists(path) else ""
    begin_ns = time.time_ns() + int(lead_s * 1e9)
    end_ns = begin_ns + round(seconds * 1e9)
    with open(path + ".new", "w") as file:
        file.write(f"{before}{gpu} {begin_ns} {end_ns}\\n")
    if time.time_ns() >= begin_ns:
        return work(seconds, gpu, 2 * lead_s)
    os.replace(path + ".new", path)
    while time.time_ns() < end_ns + 150_000_000:
        time.sleep(max(0.001, (end_ns - time.time_ns()) / 1e9 + 0.15))
"""


@dataclass(frozen=True)
class GpuSpec:
    """One GPU. Power is `high_w` for the first `duty` of each period of unix time, `low_w` for the rest;
    period_ms=0 means a constant `high_w`, `announced` means `high_w` while there is work."""

    name: str = "NVIDIA Fake H200"
    uuid: str = ""  # empty: made from the position
    pci_bus_id: str = ""  # empty: made from the position
    device_id: int = 0x2335
    architecture: int = ADA
    lag_ms: float = 0.0  # of its samples
    smoothing_ms: float = 0.0  # 0: each is a mean over the time since the last one
    low_w: float = 60.0
    high_w: float = 300.0
    period_ms: float = 0.0
    duty: float = 0.5
    phase_ms: float = 0.0
    announced: bool = False
    counter_phase_ms: float = 37.0  # the counter steps at this offset from the full 100 ms
    counter_cost_us: int = 0
    limit_default_w: float = 700.0
    limit_min_w: float = 100.0
    limit_max_w: float = 700.0
    limit_step_w: float = 0.0  # limits are rounded down to a multiple of it
    clock_mhz: int = 1980
    memory_clock_mhz: int = 3201
    memory_w: float = 0.0  # 0: it does not tell
    temperature: int = 41
    utilisation: int = -1  # -1: the share of time at high power
    processes: int = 1
    # What it supports.
    samples: bool = True
    counter: bool = True
    instant: bool = True
    usage: bool = True
    pcie: bool = True
    application_clocks: bool = True
    locked_clocks: bool = True
    # Faults.
    lost: bool = False
    error: int = 0  # an nvmlReturn_t that every call on this GPU gives
    no_permission: bool = False
    set_permission: bool = True
    set_error: int = 0  # an nvmlReturn_t that setters give, `set_failures` times in each process
    set_failures: int = 0  # -1: always
    set_hang_ms: int = 0  # how long a setter does not come back, unless the description changes
    mig: bool = False
    mig_uuids: tuple[str, ...] = ()

    def at(self, position: int) -> GpuSpec:
        """The same with the identity that position `position` gives."""
        return replace(
            self,
            uuid=self.uuid or f"GPU-{position:08x}-0000-4000-8000-{position:012x}",
            pci_bus_id=self.pci_bus_id or f"00000000:{0x3B + 16 * position:02X}:00.0",
        )


def build_nvml(tmp: Path) -> Path:
    """A folder under `tmp` with the fake libnvidia-ml.so.1, for LD_LIBRARY_PATH."""
    return _build(tmp, "nvml.c", NVML_LIBRARY)


def build_cuda(tmp: Path) -> Path:
    """A folder under `tmp` with the fake libcuda.so.1."""
    return _build(tmp, "cuda.c", CUDA_LIBRARY)


def write_spec(
    path: Path,
    gpus: Sequence[GpuSpec],
    *,
    init_error: int = 0,
    cuda_order: Sequence[int] = (),
    driver_load: int = 0,
) -> None:
    """Describes the GPUs, at once for every program that has `path` as its FAKE_NVML.

    `init_error` is what nvmlInit answers (9: driver not loaded, 4: no permission, 18: version mismatch);
    `cuda_order` the positions of the GPUs in CUDA's own order, fastest first. A `driver_load` other than
    the one a process started NVML with is a driver that was reloaded: every call answers "uninitialized"
    until NVML has been shut down and started again.
    """
    placed = [gpu.at(n) for n, gpu in enumerate(gpus)]
    in_order = [placed[n] for n in cuda_order] if cuda_order else placed
    lines = [f"init_error={init_error}", f"driver_load={driver_load}"]
    # CUDA writes four digits of the domain, NVML eight.
    lines.append("cuda_bus_ids=" + ",".join(gpu.pci_bus_id[4:] for gpu in in_order))
    lines.append("pci_bus_ids=" + ",".join(gpu.pci_bus_id[4:] for gpu in placed))
    for gpu in placed:
        lines += ["[gpu]", *(f"{key}={value}" for key, value in _numbers(gpu).items())]
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w") as file:
        file.write("\n".join(lines) + "\n")
    os.replace(name, path)


def nvml_environment(
    tmp: Path,
    gpus: Sequence[GpuSpec],
    *,
    cuda: bool = False,
    init_error: int = 0,
    cuda_order: Sequence[int] = (),
) -> dict[str, str]:
    """The environment in which a program finds these GPUs, with libcuda.so.1 too when `cuda`."""
    spec = tmp / "gpus.spec"
    write_spec(spec, gpus, init_error=init_error, cuda_order=cuda_order)
    folders = [build_nvml(tmp), *([build_cuda(tmp)] if cuda else [])]
    path = os.environ.get("LD_LIBRARY_PATH")
    environment = {
        k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    }
    environment["LD_LIBRARY_PATH"] = ":".join([*map(str, folders), *([path] if path else [])])
    environment["FAKE_NVML"] = str(spec)
    return environment


def settings_made(spec: Path) -> list[tuple[int, str, int]]:
    """What was set on these GPUs so far, by anybody: (GPU, what, value) in order.

    `what` is l (power limit, mW), c or m (locked graphics or memory clocks) or a (application clocks);
    clocks are 1,000,000 × the first (lowest; memory) + the second (highest; graphics) in MHz, 0 for a reset.
    """
    state = Path(f"{spec}.state")
    lines = state.read_text().splitlines() if state.exists() else []
    return [(int(gpu), what, int(value)) for gpu, what, _, value in map(str.split, lines)]


def settings_now(spec: Path) -> dict[tuple[int, str], int]:
    """What is in force on these GPUs by (GPU, what), where it is not the driver's default."""
    last = {(gpu, what): value for gpu, what, value in settings_made(spec)}
    return {where: value for where, value in last.items() if value}


def set_from_outside(spec: Path, gpu: int, what: str, value: int) -> None:
    """As nvidia-smi would: see `settings_made`."""
    with open(f"{spec}.state", "a") as state:
        state.write(f"{gpu} {what} {time.time_ns()} {value}\n")


@contextmanager
def in_process(tmp: Path) -> Iterator[None]:
    """Makes this process's pynvml use the fake; the caller sets FAKE_NVML in os.environ."""
    import pynvml

    before = pynvml.nvmlLib
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml.nvmlLib = ctypes.CDLL(str(build_nvml(tmp) / NVML_LIBRARY))
    try:
        yield
    finally:
        simulated_time(0)
        pynvml._nvmlGetFunctionPointer_cache.clear()
        pynvml.nvmlLib = before


def simulated_time(begin_ns: int) -> Clock:
    """Within `in_process`: the GPUs' time is this clock's, which moves only while somebody sleeps by it."""
    import pynvml

    now_ns = ctypes.c_int64.in_dll(pynvml.nvmlLib, "fake_now_ns")
    now_ns.value = begin_ns

    def sleep_s(seconds: float) -> None:
        now_ns.value += max(0, round(seconds * 1e9))

    return Clock(wall_ns=lambda: now_ns.value, mono_ns=lambda: now_ns.value - begin_ns, sleep_s=sleep_s)


def energy_j(gpu: GpuSpec, start_ns: int, end_ns: int, *, limit_w: float | None = None) -> float:
    """The exact energy between two unix times under one power limit (the default one), in joules."""
    limit = Fraction(gpu.limit_default_w if limit_w is None else limit_w)
    high, low = min(Fraction(gpu.high_w), limit), min(Fraction(gpu.low_w), limit)
    on_ns = _on_ns(gpu, end_ns) - _on_ns(gpu, start_ns)
    return float((high * on_ns + low * (end_ns - start_ns - on_ns)) / 10**9)


def _on_ns(gpu: GpuSpec, t_ns: int) -> Fraction:
    if not gpu.period_ms:
        return Fraction(t_ns)
    period_ns = Fraction(round(gpu.period_ms * MS_NS))
    on_ns = Fraction(round(gpu.period_ms * gpu.duty * MS_NS))
    cycles, rest = divmod(t_ns - round(gpu.phase_ms * MS_NS), period_ns)
    return cycles * on_ns + min(Fraction(rest), on_ns)


def _numbers(gpu: GpuSpec) -> dict[str, object]:
    return {
        "name": gpu.name,
        "uuid": gpu.uuid,
        "pci_bus_id": gpu.pci_bus_id,
        "device_id": gpu.device_id,
        "architecture": gpu.architecture,
        "lag_ns": round(gpu.lag_ms * MS_NS),
        "smoothing_ns": round(gpu.smoothing_ms * MS_NS),
        "low_mw": round(gpu.low_w * 1000),
        "high_mw": round(gpu.high_w * 1000),
        "period_ns": round(gpu.period_ms * MS_NS),
        "on_ns": round(gpu.period_ms * gpu.duty * MS_NS),
        "phase_ns": round(gpu.phase_ms * MS_NS),
        "announced": int(gpu.announced),
        "counter_phase_ns": round(gpu.counter_phase_ms * MS_NS),
        "counter_cost_us": gpu.counter_cost_us,
        "limit_default_mw": round(gpu.limit_default_w * 1000),
        "limit_min_mw": round(gpu.limit_min_w * 1000),
        "limit_max_mw": round(gpu.limit_max_w * 1000),
        "limit_step_mw": round(gpu.limit_step_w * 1000),
        "clock_mhz": gpu.clock_mhz,
        "memory_clock_mhz": gpu.memory_clock_mhz,
        "memory_mw": round(gpu.memory_w * 1000),
        "temperature": gpu.temperature,
        "utilisation": gpu.utilisation,
        "processes": gpu.processes,
        "samples": int(gpu.samples),
        "counter": int(gpu.counter),
        "instant": int(gpu.instant),
        "usage": int(gpu.usage),
        "pcie": int(gpu.pcie),
        "lost": int(gpu.lost),
        "error": gpu.error,
        "no_permission": int(gpu.no_permission),
        "set_permission": int(gpu.set_permission),
        "set_error": gpu.set_error,
        "set_failures": gpu.set_failures,
        "set_hang_ms": gpu.set_hang_ms,
        "application_clocks": int(gpu.application_clocks),
        "locked_clocks": int(gpu.locked_clocks),
        "mig": int(gpu.mig),
        "mig_uuids": ",".join(gpu.mig_uuids),
    }


def _build(tmp: Path, source: str, library: str) -> Path:
    """Compiled once a process and copied into `tmp`: a copy is a library with a state of its own."""
    folder = tmp / f"fake-{Path(source).stem}"
    folder.mkdir(exist_ok=True)
    target = folder / library
    if target.exists():
        return folder
    built = _built.get(source)
    if built is None or not built.exists():
        compiler = os.environ.get("CC", "cc")
        options = ["-std=gnu11", "-O1", "-shared", "-fPIC", "-pthread"]
        subprocess.run([compiler, *options, "-o", str(target), str(FAKES / source)], check=True)
        _built[source] = target
    else:
        shutil.copyfile(built, target)
    return folder
