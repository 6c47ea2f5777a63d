"""A simulated GPU and a program for sweeps: its power is the limit, its work is chosen by the tests.

The GPU draws whatever it may (its limit is below what it would take) while the program has work for it, and
nothing else: energy is limit × time of the work, exactly, however long the program was held up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import CompletedProcess, Popen
from typing import Any

from cli import smaragdine, start, wait_for, write_script
from nvml_fake import WORK, GpuSpec, nvml_environment, settings_made, settings_now, write_spec

GPU = GpuSpec(high_w=900)  # 100 to 700 W, 700 by default
WORKING = replace(GPU, low_w=0, announced=True)
DEFAULT_MW = 700_000

# Works for `seconds(limit in W, how often it ran at it before)`.
PROGRAM = """
import os, sys, time
from pathlib import Path
import pynvml
{WORK}
pynvml.nvmlInit()
limit_w = pynvml.nvmlDeviceGetPowerManagementLimit(pynvml.nvmlDeviceGetHandleByIndex(0)) / 1000
ran = Path(f"ran-{{limit_w:g}}")
before = len(ran.read_text()) if ran.exists() else 0
ran.write_text("x" * (before + 1))
print("limit", limit_w, *sys.argv[1:])
seconds = {seconds}
if seconds:
    work(seconds)
"""


@dataclass
class Bench:
    folder: Path
    env: dict[str, str]

    @property
    def spec(self) -> Path:
        return Path(self.env["FAKE_NVML"])

    @property
    def sweep(self) -> Path:
        return self.folder / "sweep"

    def program(self, seconds: str = "0") -> Path:
        return write_script(self.folder / "work.py", PROGRAM.format(WORK=WORK, seconds=seconds))

    def run(self, *words: str | Path, **more: Any) -> CompletedProcess[str]:
        return smaragdine("sweep", *words, env=self.env, cwd=self.folder, **more)

    def start(self, *words: str | Path) -> Popen[str]:
        return start("sweep", *words, env=self.env, cwd=self.folder)

    def gpu(self, spec: GpuSpec) -> None:
        write_spec(self.spec, [spec])

    def set_values(self) -> list[int]:
        """Power limits that were ever set, in order."""
        return [value for _, what, value in settings_made(self.spec) if what == "l"]

    def restored(self) -> bool:
        """Whether the limit is back, as read from outside; waits for it."""
        return wait_for(lambda: settings_now(self.spec).get((0, "l"), DEFAULT_MW) == DEFAULT_MW)


def make_bench(folder: Path, gpu: GpuSpec | None = GPU) -> Bench:
    env = {
        "SMARAGDINE_LIMITS_JOURNAL": str(folder / "limits" / "journal"),
        "SMARAGDINE_POWERCAP_ROOT": str(folder / "none"),
        "SMARAGDINE_HWMON_ROOT": str(folder / "none"),
        "SMARAGDINE_PERF_ROOT": str(folder / "none"),
    }
    if gpu is not None:
        made = nvml_environment(folder, [gpu])
        env |= {name: made[name] for name in ("LD_LIBRARY_PATH", "FAKE_NVML")}
    return Bench(folder, env)
