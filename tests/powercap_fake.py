"""A powercap tree in a folder, with a writer that makes its counters move and wrap in real time.

The writer goes before others where it may. Where the machine holds it up all the same, counters stand still
and then jump: `shown_j` is what a perfect reader sees of them between two times, `jump_j` how much at once.

    tree = PowercapTree(tmp_path, packages=2, wrap_uj=5_000_000)
    tree.start({"cpu:0": 80.0, "dram:0": lambda t_s: 10.0 if t_s % 0.2 < 0.1 else 2.0})
    …   # SMARAGDINE_POWERCAP_ROOT=tree.root
    tree.stop()
    tree.exact_joules("cpu:0")

Devices are named as in channels: cpu:0, cpu:0/core, cpu:0/uncore, dram:0, psys.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Literal

Watts = float | Callable[[float], float]
Layout = Literal["nested", "flat", "links"]

# The range a 32-bit register of 61 µJ units has.
INTEL_WRAP_UJ = 262_143_328_850


class PowercapTree:
    """`root` is what to hand to the program. Counters wrap to 0 when they reach `wrap_uj`."""

    def __init__(
        self,
        folder: Path,
        packages: int = 2,
        dram: bool = True,
        core: bool = True,
        uncore: bool = False,
        psys: bool = False,
        dies: int = 1,
        mmio: bool = False,
        wrap_uj: int = INTEL_WRAP_UJ,
        start_uj: int = 0,
        layout: Layout = "nested",
    ) -> None:
        self.wrap_uj = wrap_uj
        self.start_uj = start_uj
        self.zones: dict[str, Path] = {}  # zone id → its folder
        self.devices: dict[str, list[str]] = {}  # device → its zone ids (one per die)
        self._fds: dict[str, int] = {}
        self._written_uj: dict[str, int] = {}
        self._layout: Layout = layout
        self._thread: threading.Thread | None = None
        self._halt = threading.Event()
        self._power: dict[str, Watts] = {}
        self._log: list[tuple[int, dict[str, float]]] = []  # when which energies were to be seen
        # As in sysfs: the zones lie nested in devices/virtual, and class/ holds a link to each.
        self._nested = folder / "devices" / "virtual" / "powercap" if layout == "links" else folder
        self.root = folder / "class" / "powercap" if layout == "links" else folder
        self.root.mkdir(parents=True, exist_ok=True)
        self._nested.mkdir(parents=True, exist_ok=True)
        number = 0
        for package in range(packages):
            for die in range(dies):
                name = f"package-{package}" + (f"-die-{die}" if dies > 1 else "")
                zone = self.add_zone(f"intel-rapl:{number}", name, f"cpu:{package}")
                parts = [("core", core, f"cpu:{package}/core"), ("uncore", uncore, f"cpu:{package}/uncore")]
                parts.append(("dram", dram, f"dram:{package}"))
                for index, (part, device) in enumerate((p, d) for p, wanted, d in parts if wanted):
                    self.add_zone(f"{zone}:{index}", part, device)
                number += 1
        if psys:
            self.add_zone(f"intel-rapl:{number}", "psys", "psys")
        if mmio:
            for package in range(packages):
                self.add_zone(f"intel-rapl-mmio:{package}", f"package-{package}", "mmio twin")

    def add_zone(self, zone_id: str, name: str, device: str) -> str:
        """One more zone; its parent is the zone its id begins with. Returns the id."""
        control = zone_id.split(":")[0]
        parent_id = zone_id.rpartition(":")[0]
        above = self.zones.get(parent_id, self._nested / control)
        path = self.root / zone_id if self._layout == "flat" else above / zone_id
        path.mkdir(parents=True)
        (path / "name").write_text(f"{name}\n")
        (path / "enabled").write_text("1\n")
        (path / "max_energy_range_uj").write_text(f"{self.wrap_uj}\n")
        (path / "energy_uj").touch()
        (path / "power").mkdir()
        (path / "subsystem").symlink_to(self.root)
        (path / "device").symlink_to(path.parent)
        if self._layout == "links":
            for linked in (self._nested / control, path):
                link = self.root / linked.name
                if not link.is_symlink():
                    link.symlink_to(os.path.relpath(linked, self.root))
        self.zones[zone_id] = path
        self.devices.setdefault(device, []).append(zone_id)
        self._fds[zone_id] = os.open(path / "energy_uj", os.O_WRONLY | os.O_CLOEXEC)
        self._written_uj[zone_id] = 0
        self._write(zone_id)
        return zone_id

    def add_joules(self, device: str, joules: float) -> None:
        """Advance a device's counters now, split evenly over its zones. Not while the writer runs."""
        for zone_id in self.devices[device]:
            self._written_uj[zone_id] += round(joules * 1e6 / len(self.devices[device]))
            self._write(zone_id)

    def exact_joules(self, device: str) -> float:
        """Everything ever added to a device's counters, unwrapped: what a perfect reader finds."""
        return sum(self._written_uj[zone_id] for zone_id in self.devices[device]) / 1e6

    def shown_j(self, device: str, begin_ns: int, end_ns: int) -> float:
        """By how much a device's counters rose between two unix times, as they were to be seen."""
        return self._shown_at(device, end_ns) - self._shown_at(device, begin_ns)

    def jump_j(self, device: str) -> float:
        """The most that a device's counters rose at once."""
        values = [each[device] for _, each in self._log]
        return max((later - value for value, later in pairwise(values)), default=0.0)

    def _shown_at(self, device: str, t_ns: int) -> float:
        index = bisect_right(self._log, t_ns, key=lambda entry: entry[0])
        return self._log[max(index - 1, 0)][1][device]

    def start(self, watts: Mapping[str, Watts], step_s: float = 0.001) -> None:
        """Move the counters by these watts (or by functions of the seconds since start) every `step_s`."""
        assert self._thread is None
        self._power = {device: power for device, power in watts.items() if self.devices[device]}
        self._halt.clear()
        self._thread = threading.Thread(target=self._run, args=(step_s,), name="powercap-fake", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The last step is written when this returns; `exact_joules` holds still from then on."""
        if self._thread is not None:
            self._halt.set()
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        self.stop()
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def __enter__(self) -> PowercapTree:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, step_s: float) -> None:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_FIFO, os.sched_param(1))
        start_ns = last_ns = time.monotonic_ns()
        owed_uj = dict.fromkeys(self._power, 0.0)
        running = True
        while running:
            running = not self._halt.wait(step_s)
            now_ns = time.monotonic_ns()
            middle_s = ((last_ns + now_ns) / 2 - start_ns) / 1e9
            for device, power in self._power.items():
                power_w = power(middle_s) if callable(power) else power
                zone_ids = self.devices[device]
                owed_uj[device] += power_w * (now_ns - last_ns) / 1e3
                each_uj = int(owed_uj[device] / len(zone_ids))
                owed_uj[device] -= each_uj * len(zone_ids)
                for zone_id in zone_ids:
                    self._written_uj[zone_id] += each_uj
                    self._write(zone_id)
            self._log.append((time.time_ns(), {device: self.exact_joules(device) for device in self._power}))
            last_ns = now_ns

    def _write(self, zone_id: str) -> None:
        # Fixed width and no truncation: a reader with the file open never sees it empty or half as long.
        value_uj = (self.start_uj + self._written_uj[zone_id]) % self.wrap_uj
        os.pwrite(self._fds[zone_id], b"%020d\n" % value_uj, 0)
