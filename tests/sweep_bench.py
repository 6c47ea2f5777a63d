"""A simulated GPU and a program for sweeps: its power is the limit, its time is chosen by the tests.

The GPU draws whatever it may (its limit is below what it would take), so energy is limit × time, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess, Popen
from typing import Any

from cli import smaragdine, start, wait_for, write_script
from nvml_fake import GpuSpec, nvml_environment, settings_made, settings_now, write_spec

GPU = GpuSpec(high_w=900)  # 100 to 700 W, 700 by default
DEFAULT_MW = 700_000

# Ends `seconds(limit in W, how often it ran at it before)` after its process began.
PROGRAM = """
import os, sys, time
from pathlib import Path
import pynvml

ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
begin_s = time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks)
pynvml.nvmlInit()
limit_w = pynvml.nvmlDeviceGetPowerManagementLimit(pynvml.nvmlDeviceGetHandleByIndex(0)) / 1000
ran = Path(f"ran-{{limit_w:g}}")
before = len(ran.read_text()) if ran.exists() else 0
ran.write_text("x" * (before + 1))
print("limit", limit_w, *sys.argv[1:])
time.sleep(max(0.0, begin_s + ({seconds}) - time.time()))
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

    def program(self, seconds: str = "0.05") -> Path:
        return write_script(self.folder / "work.py", PROGRAM.format(seconds=seconds))

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
        return wait_for(lambda: settings_now(self.spec).get((0, "l"), DEFAULT_MW) == DEFAULT_MW, 60)


def make_bench(folder: Path, gpu: GpuSpec | None = GPU) -> Bench:
    env = {
        "SMARAGDINE_LIMITS_JOURNAL": str(folder / "limits" / "journal"),
        "SMARAGDINE_POWERCAP_ROOT": str(folder / "none"),
        "SMARAGDINE_HWMON_ROOT": str(folder / "none"),
    }
    if gpu is not None:
        made = nvml_environment(folder, [gpu])
        env |= {name: made[name] for name in ("LD_LIBRARY_PATH", "FAKE_NVML")}
    return Bench(folder, env)
