"""The plugin's C interface, as a C compiler lays it out: every call, with what it takes and what it gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import smaragdine.calibrate
from pjrt_fake import build_plugin

FOLDER = Path(smaragdine.calibrate.__path__[0])

PROGRAM = """
import ctypes, sys
sys.path.insert(0, sys.argv[2])
import pjrt
plugin = pjrt.Plugin(sys.argv[1])
print("version", plugin.version, flush=True)
plugin.initialize()
plugin.open()
try:
    plugin.compile(b"bad", b"")
except pjrt.PjrtError as error:
    print("refused:", error, flush=True)
values = (ctypes.c_uint8 * 24)(7)
buffers = [plugin.buffer(ctypes.addressof(values), 11, [2, 3], [0, 1], 4) for _ in range(2)]
buffers.append(plugin.buffer(ctypes.addressof(values), 4, [], [], 4))
program = plugin.compile(b"12345678", b"options")
for given, taken in ((buffers, [1]), (buffers, []), ([], [])):
    run, arguments = program.prepare(given, taken)
    assert list(arguments)[: len(given)] == given
    results, event = run()
    plugin.wait(event)
    for each in results[: program.outputs]:
        plugin.free(each)
for each in buffers:
    plugin.free(each)
program.close()
left = ctypes.CDLL(sys.argv[1]).alive_objects()
print(plugin.platform(), "outputs", program.outputs, "left", left, flush=True)
"""


def test_every_call_has_the_plugins_own_layout(tmp_path: Path) -> None:
    library = build_plugin(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, library, FOLDER], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    buffer = "buffer of type 11 [2 every 4, 0] [3 every 8, 1] begins with 7"
    assert done.stdout.splitlines() == [
        "version [0, 90]",
        "preallocate is off",
        "refused: INTERNAL: it is no program",
        *[buffer] * 2,
        "buffer of type 4 begins with 7",
        "compile 8 bytes, options 7 bytes",
        "execute with 3, kept 0 2",
        "execute with 3, kept 0 1 2",
        "execute with 0, kept",
        "cuda 13000 outputs 2 left 0",
    ]
