"""Measures the same stretches of work by Smaragdine and by the tools that people use today.

    pip install codecarbon perun pyJoules zeus          # each that is installed is compared
    python bench/others.py [--rounds 2] [--seconds 0.15,1,5] [--simulated]

Each tool has a process of its own, in random order, and measures regions of a GPU's work by its own means,
with its defaults. The truth is the mean power of ten seconds of the same work, by the card's energy
counter, between two of its changes. With `--simulated`, which needs no GPU, it is the exact integral of a
load that the tests' NVML has. Between regions the GPU works on, so that its power is the same throughout;
no setting is changed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

IDLE_S = 5.0
REFERENCE_S = 10.0

Work = Callable[[float], None]  # keeps the GPU at work for so many seconds


class Measured:
    """What a tool said about its regions."""

    def __init__(self, work: Work, regions: int, seconds: float) -> None:
        self._work, self._regions, self._seconds = work, regions, seconds
        self.measured_work = work  # a tool may put itself around it
        self.spans_ns: list[tuple[int, int]] = []
        self.energy_j: list[float] = []
        self.extra_s: list[float] = []  # to begin and end one
        self.idle_cpu_s = 0.0

    def take(self, begin: Callable[[int], object], end: Callable[[int], float | None]) -> None:
        """`end` gives the joules of a region, unless the tool gives all of them at its own end."""
        for n in range(self._regions):
            self._work(random.uniform(0.05, 0.25))
            called_s = time.perf_counter()
            begin(n)
            begin_ns, begin_s = time.time_ns(), time.perf_counter()
            # Counters step every 100 ms: of a whole number of these any counter is right.
            self.measured_work(self._seconds * random.uniform(0.9, 1.1))
            end_ns, end_s = time.time_ns(), time.perf_counter()
            found = end(n)
            self.extra_s.append(time.perf_counter() - called_s - (end_s - begin_s))
            self.spans_ns.append((begin_ns, end_ns))
            if found is not None:
                self.energy_j.append(found)
        begin(self._regions)
        before_s = cpu_s()
        time.sleep(IDLE_S)
        self.idle_cpu_s = cpu_s() - before_s
        end(self._regions)


def cpu_s() -> float:
    """CPU time of this process and all below it."""
    import psutil

    here = psutil.Process()
    times = [process.cpu_times() for process in (here, *here.children(recursive=True))]
    return sum(each.user + each.system for each in times)


# ---- the tools, each as its own manual has it -----------------------------------------------------------


def measure_smaragdine(measured: Measured, folder: Path) -> None:
    import smaragdine

    with smaragdine.record(folder / "run"):
        region = smaragdine.region("work")
        measured.take(lambda n: region.__enter__(), lambda n: region.__exit__())
    (found,) = smaragdine.summarise(folder / "run").regions
    measured.energy_j = [energy_j or 0.0 for energy_j in found.energies_j["gpu:0"][:-1]]


def measure_zeus(measured: Measured, folder: Path) -> None:
    from zeus.monitor import ZeusMonitor  # pyright: ignore

    monitor: Any = ZeusMonitor(gpu_indices=[0], cpu_indices=[])
    measured.take(
        lambda n: monitor.begin_window(str(n), sync_execution=False),
        lambda n: monitor.end_window(str(n), sync_execution=False).gpu_energy[0],
    )


def measure_codecarbon(measured: Measured, folder: Path) -> None:
    from codecarbon import OfflineEmissionsTracker  # pyright: ignore

    tracker: Any = OfflineEmissionsTracker(
        country_iso_code="DEU", save_to_file=False, log_level="critical", output_dir=str(folder)
    )
    tracker.start()
    measured.take(
        lambda n: tracker.start_task(str(n)), lambda n: tracker.stop_task(str(n)).gpu_energy * 3.6e6
    )
    tracker.stop()


def measure_pyjoules(measured: Measured, folder: Path) -> None:
    from pyJoules.device import DeviceFactory  # pyright: ignore
    from pyJoules.device.nvidia_device import NvidiaGPUDomain  # pyright: ignore
    from pyJoules.energy_meter import EnergyMeter  # pyright: ignore

    meter: Any = EnergyMeter(DeviceFactory.create_devices([NvidiaGPUDomain(0)]))

    def end(n: int) -> float:
        meter.stop()
        return sum(sample.energy["nvidia_gpu_0"] for sample in meter.get_trace()) * 1e-3

    measured.take(lambda n: meter.start(tag=str(n)), end)


def measure_perun(measured: Measured, folder: Path) -> None:
    """Under `perun monitor`, which writes its report after the program: see `perun_energy_j`."""
    from perun import monitor  # pyright: ignore

    measured.measured_work = monitor("region")(measured.measured_work)
    measured.take(lambda n: None, lambda n: None)


def perun_energy_j(folder: Path, seconds: float) -> float:
    """The energy of a region, as the mean over all: the power in its report, while the function ran."""
    found: list[dict[str, Any]] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            for key, below in node.items():  # pyright: ignore
                if key == "regions" and below:
                    found.append(below["region"])
                else:
                    walk(below)
        elif isinstance(node, list):
            for below in node:  # pyright: ignore
                walk(below)

    walk(json.loads(next(folder.glob("*.json")).read_text()))
    power_w = next(each["mean"] for each in found[0]["metrics"] if each["type"] == "power")
    return float(power_w) * seconds


TOOLS = {
    "smaragdine": measure_smaragdine,
    "zeus": measure_zeus,
    "codecarbon": measure_codecarbon,
    "pyJoules": measure_pyjoules,
    "perun": measure_perun,
}


# ---- the work --------------------------------------------------------------------------------------------


def gpu_work() -> Work:
    import torch

    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    c = torch.empty_like(a)

    def work(seconds: float) -> None:
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            for _ in range(8):  # some 2 ms
                torch.mm(a, a, out=c)
            torch.cuda.synchronize()

    work(2.0)  # until it is warm
    return work


def reference_w(work: Work) -> float:
    """The mean power by the card's own counter, from one of its changes to another."""
    import pynvml

    pynvml.nvmlInit()
    card = pynvml.nvmlDeviceGetHandleByIndex(0)

    def change() -> tuple[float, float]:
        first = pynvml.nvmlDeviceGetTotalEnergyConsumption(card)
        while (now := pynvml.nvmlDeviceGetTotalEnergyConsumption(card)) == first:
            work(0.0)
        return time.perf_counter(), now * 1e-3

    begin_s, begin_j = change()
    while time.perf_counter() - begin_s < REFERENCE_S:
        work(0.1)
    end_s, end_j = change()
    return (end_j - begin_j) / (end_s - begin_s)


def child(tool: str, regions: int, seconds: float, simulated: bool, folder: Path) -> None:
    work = time.sleep if simulated else gpu_work()
    if tool == "reference":
        print(json.dumps({"reference_w": reference_w(work)}))
        return
    measured = Measured(work, regions, seconds)
    TOOLS[tool](measured, folder)
    names = ("spans_ns", "energy_j", "extra_s", "idle_cpu_s")
    (folder / "measured.txt").write_text(json.dumps({name: getattr(measured, name) for name in names}))


# ---- all of them -----------------------------------------------------------------------------------------


@contextmanager
def simulation() -> Iterator[tuple[dict[str, str], Callable[[int, int], float]]]:
    """A GPU that draws 300 W for 0.25 s of every 0.7 s, else 60 W: the environment, and its exact energy."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from nvml_fake import GpuSpec, energy_j, nvml_environment

    gpu = GpuSpec(period_ms=700, duty=0.357)
    with tempfile.TemporaryDirectory() as name:
        environment = nvml_environment(Path(name), [gpu])
        smi = Path(name) / "nvidia-smi"  # CodeCarbon asks for it
        smi.write_text("#!/bin/sh\n")
        smi.chmod(0o755)
        environment["PATH"] = f"{name}:{environment['PATH']}"
        yield environment, lambda begin_ns, end_ns: energy_j(gpu, begin_ns, end_ns)


def run(tool: str, regions: int, seconds: float, environment: dict[str, str], simulated: bool) -> Any:
    """What the child process of a tool has written; a string says why there is nothing."""
    with tempfile.TemporaryDirectory() as name:
        words = [__file__, "--child", tool, "--regions", str(regions), "--seconds", str(seconds)]
        words += ["--folder", name, *(["--simulated"] if simulated else [])]
        command = [sys.executable, *words]
        if tool == "perun":
            command = [
                sys.executable,
                "-m",
                "perun",
                "monitor",
                "--format",
                "json",
                "--data-out",
                name,
                *words,
            ]
        done = subprocess.run(command, env=environment, text=True, capture_output=True, cwd=name, check=False)
        if tool == "reference":
            return json.loads(done.stdout)
        written = Path(name) / "measured.txt"
        if not written.exists():
            return (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        found = json.loads(written.read_text())
        if tool == "perun":
            lengths_s = [(end - begin) * 1e-9 for begin, end in found["spans_ns"]]
            found["energy_j"] = [perun_energy_j(Path(name), length_s) for length_s in lengths_s]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", default="0.15,1,5", help="how long the regions are, to 10 %%")
    parser.add_argument(
        "--simulated", action="store_true", help="a simulated GPU, whose energy is known exactly"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--regions", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    lengths = [float(part) for part in options.seconds.split(",")]
    if options.child:
        child(options.child, options.regions, lengths[0], options.simulated, options.folder)
    elif options.simulated:
        with simulation() as (environment, truth_j):
            compare(lengths, options.rounds, environment, truth_j)
    else:
        compare(lengths, options.rounds, dict(os.environ), None)


def compare(
    lengths: list[float],
    rounds: int,
    environment: dict[str, str],
    truth_j: Callable[[int, int], float] | None,
) -> None:
    here = [tool for tool in TOOLS if _version(tool)]
    for tool in TOOLS.keys() - set(here):
        print(f"{tool} is not installed: pip install {tool}")
    found: dict[tuple[str, float], list[Any]] = {}
    why: dict[str, str] = {}
    power_w: list[float] = []
    for number in range(rounds):
        if truth_j is None:
            power_w.append(run("reference", 0, 0, environment, False)["reference_w"])
        for tool, seconds in random.sample([(t, s) for t in here for s in lengths], len(here) * len(lengths)):
            regions = max(3, min(20, round(6 / seconds)))
            got = run(tool, regions, seconds, environment, truth_j is not None)
            if isinstance(got, str):
                why[tool] = got
            else:
                found.setdefault((tool, seconds), []).append(got)
            print(f"round {number + 1} of {rounds}: {tool}, {seconds:g} s", file=sys.stderr)
    if power_w:
        print(f"truth: {np.mean(power_w):.1f} W by the counter ({min(power_w):.1f} … {max(power_w):.1f})")
    said = f"{'error of a region of':22}" + "".join(f"{seconds:>17g} s" for seconds in lengths)
    print(f"{said} {'to begin and end':>17} {'CPU while idle':>15}")
    for tool in here:
        if tool in why:
            print(f"{tool:22} {why[tool]}")
            continue
        cells: list[str] = []
        for seconds in lengths:
            off = [
                energy_j / (truth_j(begin, end) if truth_j else np.mean(power_w) * (end - begin) * 1e-9) - 1
                for each in found[tool, seconds]
                for (begin, end), energy_j in zip(each["spans_ns"], each["energy_j"], strict=True)
            ]
            cells.append(f"{100 * np.mean(off):+.1f} ± {100 * np.std(off, ddof=1):.1f} %")
        every = [each for seconds in lengths for each in found[tool, seconds]]
        extra_ms = 1e3 * np.median([extra for each in every for extra in each["extra_s"]])
        idle = np.mean([each["idle_cpu_s"] / IDLE_S for each in every])
        label = f"{tool} {_version(tool)}"
        errors = "".join(f"{cell:>19}" for cell in cells)
        print(f"{label:22}{errors} {extra_ms:14.2f} ms {100 * idle:13.2f} %")


def _version(tool: str) -> str:
    try:
        return importlib.metadata.version(tool)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
