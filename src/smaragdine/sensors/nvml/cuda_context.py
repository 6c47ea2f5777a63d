"""A process that is attached to every visible GPU and does nothing: idle power as a program sees it.

Run as a script, it makes a context on each GPU, prints how many, and holds them until its stdin closes. It
runs without site packages, so it is standard library alone and does not use messages.py: the number is all
that it says.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def attached_context(environment: Mapping[str, str]) -> Iterator[int]:
    """While the block runs, another process holds a context on each visible GPU. Yields how many.

    Raises OSError with the driver's reason when none can be made.
    """
    holder = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
        text=True,
    )
    with holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        try:
            line = holder.stdout.readline()
            if not line:
                raise OSError(holder.stderr.read().strip() or "the CUDA driver ended the process")
            yield int(line)
        finally:
            with contextlib.suppress(OSError):
                holder.stdin.close()


def _hold() -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_int()
    for status in (driver.cuInit(0), driver.cuDeviceGetCount(ctypes.byref(count))):
        if status != 0:
            raise OSError(f"CUDA driver error {status}")
    for ordinal in range(count.value):
        device, context = ctypes.c_int(), ctypes.c_void_p()
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        status = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        if status != 0:
            raise OSError(f"CUDA driver error {status} on device {ordinal}")
    print(count.value, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    try:
        _hold()
    except OSError as error:
        sys.exit(str(error))
