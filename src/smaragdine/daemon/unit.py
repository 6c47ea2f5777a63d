"""What systemd and the operator see of the daemon: its unit, its state, and a line for each event.

The unit limits once more what the daemon may do, which also drops its privileges by itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

_NETWORK_OPTIONS = ("--listen", "--prometheus")
_USUAL_FOLDERS = ("/run/smaragdine", "/var/lib/smaragdine", "/var/lib/smaragdine-limits")

_UNIT = """\
# Written by `smaragdine daemon --systemd`. Put it into /etc/systemd/system/smaragdine.service, then
#   systemctl daemon-reload && systemctl enable --now smaragdine
[Unit]
Description=Smaragdine, the energy monitor
After=nvidia-persistenced.service{after}
# However often it fails: only a running daemon brings limits back.
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=all
ExecStart={command}
Restart=always
RestartSec=1
# The parent waits for the keeper of limits, which puts every limit back.
KillMode=mixed
TimeoutStopSec=15
RuntimeDirectory=smaragdine
RuntimeDirectoryMode=0755
# Containers hold a mount of this folder: it must stay the same one.
RuntimeDirectoryPreserve=restart
StateDirectory=smaragdine smaragdine-limits
StateDirectoryMode=0700
UMask=0077
LimitNOFILE=65536
LimitCORE=0
TasksMax=256

# Root opens the counters, becomes another user, and puts limits back; the server itself keeps none of these.
CapabilityBoundingSet={capabilities}
AmbientCapabilities=
NoNewPrivileges=yes

# Lanes may take an early turn; nothing else is asked of the scheduler.
LimitRTPRIO=1
LimitNICE=-10

# The GPUs, and no other device: 195 is NVIDIA's number, also while no driver is loaded.
DevicePolicy=closed
DeviceAllow=char-195 rw
DeviceAllow=char-nvidia* rw

# Other users' processes must be seen (ProtectProc, ProcSubset), /sys/class/powercap stays readable.
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateIPC=yes
PrivateMounts=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
RestrictNamespaces=yes
RestrictSUIDSGID=yes
LockPersonality=yes
MemoryDenyWriteExecute=yes
KeyringMode=private
SystemCallArchitectures=native
SystemCallFilter=@system-service perf_event_open
SystemCallFilter=~@mount @swap @reboot @obsolete @keyring
SystemCallErrorNumber=EPERM
{network}{writable}

[Install]
WantedBy=multi-user.target
"""

# SETUID, SETGID, SETPCAP and CHOWN to become another user and hand its folders over; KILL to pass a signal on
# to it; SYS_ADMIN for NVML to set limits; PERFMON for perf's energy events where powercap is missing.
CAPABILITIES = "CAP_CHOWN CAP_KILL CAP_SETGID CAP_SETPCAP CAP_SETUID CAP_SYS_ADMIN CAP_PERFMON"

_NO_NETWORK = """\
PrivateNetwork=yes
IPAddressDeny=any
RestrictAddressFamilies=AF_UNIX"""
_NETWORK = "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6"


def unit_text(executable: str, options: Sequence[str] = ()) -> str:
    """A unit that runs `EXECUTABLE daemon OPTIONS…`. Without an option for TCP it has no network at all."""
    network = any(word.split("=", 1)[0] in _NETWORK_OPTIONS for word in options)
    online = "network-online.target"
    folders = _folders_of_their_own(options)
    return _UNIT.format(
        command=" ".join(map(_quoted, (executable, "daemon", *options))),
        after=f" {online}\nWants={online}" if network else "",
        capabilities=CAPABILITIES,
        network=_NETWORK if network else _NO_NETWORK,
        writable="".join(
            f"\n# Make it before.\nReadWritePaths={_quoted(f'-{folder}')}" for folder in folders
        ),
    )


def _folders_of_their_own(options: Sequence[str]) -> list[str]:
    """Unusual folders for socket and state: the daemon may write nowhere else."""
    folders: list[str] = []
    for name, value in _values(options):
        path = Path(value)
        if name == "--state":
            folders += [str(path), str(path.with_name(f"{path.name}-limits"))]
        elif name == "--socket":
            folders.append(str(path.parent))
    return [folder for folder in folders if folder not in _USUAL_FOLDERS]


def _values(options: Sequence[str]) -> Iterator[tuple[str, str]]:
    for i, word in enumerate(options):
        name, equals, value = word.partition("=")
        yield name, value if equals else next(iter(options[i + 1 : i + 2]), "")


def notify(state: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Tell systemd `READY=1`, `STOPPING=1` or `STATUS=…`. False where nobody asked to be told."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)
        return True
    return False


def _quoted(word: str) -> str:
    """Quoted for systemd, to which % and $ mean something, and whose quotes go around a whole word."""
    word = word.replace("%", "%%").replace("$", "$$")
    if re.fullmatch(r"[\w%$+,./:=@-]+", word, re.ASCII):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


# One line on stderr for each event worth knowing, and never a flood of them.

_BURST = 50
_PER_SECOND = 2.0
_SAME_EVERY_S = 60.0


def make_say(mono_s: Callable[[], float] = time.monotonic) -> Callable[[str], None]:
    """Limits lines by a bucket that refills. It counts those that do not fit, and the next line says how
    many. It says a line that comes again and again once a minute."""
    left, seen_s, held_back = float(_BURST), mono_s(), 0
    last_line, last_s = "", 0.0

    def say(line: str) -> None:
        nonlocal left, seen_s, held_back, last_line, last_s
        now_s = mono_s()
        left = min(float(_BURST), left + (now_s - seen_s) * _PER_SECOND)
        seen_s = now_s
        if left < 1.0 or (line == last_line and now_s - last_s < _SAME_EVERY_S):
            held_back += 1
            return
        last_line, last_s = line, now_s
        left -= 1.0
        more = f" ({held_back} lines before this one were held back)" if held_back else ""
        held_back = 0
        try:
            print(f"smaragdine: {_one_line(line)}{more}", file=sys.stderr, flush=True)
        except (OSError, ValueError):  # nobody listens any more
            return

    return say


def _one_line(text: str) -> str:
    """One line of visible text: users' names must not look like a line of ours or move the cursor."""
    return "".join(c if c.isprintable() else " " for c in text)[:500]
