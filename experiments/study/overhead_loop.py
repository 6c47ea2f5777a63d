"""Run a program of the study with nothing around it, and stamp the ends of its steps.

    STEP_STAMPS=FILE python overhead_loop.py torch torch_bert.py --stage pretrain …

A stamp is 16 bytes: the monotonic clock in nanoseconds and the number of steps so far, both little-endian.
It writes one about every tenth of a second, at the end of a step, after the GPU has done all that it was
asked. So between two stamps all steps are whole. SIGTERM ends the program at the end of a step, with exit
code 0.
"""

from __future__ import annotations

import os
import runpy
import signal
import struct
import sys
import time
from pathlib import Path

EVERY_NS = 100_000_000


class Stamps:
    def __init__(self, path: str) -> None:
        self.catch_up = lambda: None  # wait until the device has done what it was asked
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._steps = 0
        self._next_ns = 0
        self._ending = False
        signal.signal(signal.SIGTERM, self._end)

    def _end(self, *_: object) -> None:
        self._ending = True

    def step_end(self) -> None:
        self._steps += 1
        if self._ending:
            raise SystemExit(0)
        if time.monotonic_ns() < self._next_ns:
            return
        self.catch_up()
        now_ns = time.monotonic_ns()
        self._next_ns = now_ns + EVERY_NS
        os.write(self._fd, struct.pack("<qq", now_ns, self._steps))


def watch_torch(stamps: Stamps) -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    if torch.cuda.is_available():
        stamps.catch_up = torch.cuda.synchronize
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: stamps.step_end())


def watch_keras(stamps: Stamps) -> None:
    import keras

    original = keras.callbacks.CallbackList.on_train_batch_end

    def on_train_batch_end(self, *args, **kwargs):
        original(self, *args, **kwargs)
        stamps.step_end()

    keras.callbacks.CallbackList.on_train_batch_end = on_train_batch_end


WATCH = {"torch": watch_torch, "keras": watch_keras}


def main() -> None:
    framework, program, *words = sys.argv[1:]
    stamps = Stamps(os.environ["STEP_STAMPS"])
    WATCH[framework.partition("-")[0]](stamps)
    sys.argv = [program, *words]
    sys.path[0] = str(Path(program).resolve().parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
