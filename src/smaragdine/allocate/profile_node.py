"""What a node of a Ray cluster does for a profile: measures its device, and sends each point as it comes.

So that what was measured is not lost with the node, and can be gone on with.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from smaragdine.allocate.device import (
    Device,
    Profiled,
    Request,
    check_request,
    devices_to_profile,
    profile_device,
)
from smaragdine.errors import UserError
from smaragdine.sweep.ray_child import Send, journal_for, packed, stream, unpack

# device: what is profiled, before anything is · said: a line · files: an archive of the profile's folder
# profiled: the last one · refused: why there is none
What = Literal["device", "said", "files", "profiled", "refused"]


@dataclass(frozen=True)
class News:
    what: What
    value: Any


@dataclass(frozen=True)
class Known:
    """What was measured already, on which device."""

    device: Device | None
    archive: bytes


def profile_on_node(request: Request, cwd: str, place: str, known: Known) -> Iterator[News]:
    """Called by Ray. `place` is what the profile's folder is called there where it is gathered."""
    yield from stream(_profile, request, cwd, place, known)


def _profile(send: Send, request: Request, cwd: str, place: str, known: Known) -> None:
    with tempfile.TemporaryDirectory(prefix="smaragdine-") as name:
        folder = Path(name)

        def kept(stem: str) -> None:
            # The point last: where it is, all is there.
            send(News("files", packed(folder, (f"{stem}.log", stem, f"{stem}.json"))))

        try:
            os.chdir(cwd)
            device = devices_to_profile(None, bool(request.limits_w), os.environ)[0]
            check_request(device, request)
            send(News("device", device))
            if known.device == device:
                unpack(known.archive, folder)
            journal = journal_for([device.name])
            profiled: Profiled = profile_device(
                device, request, folder, lambda line: send(News("said", line)), kept, journal
            )
            send(News("profiled", profiled))
        except UserError as error:
            send(News("refused", str(error).replace(name, place)))
        except OSError as error:
            send(News("refused", str(error)))
