"""What every test starts from."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from daemon_fake import Daemon, Machine
    from smaragdine.monitor.client import Client

# The same examples every time: a change that breaks nothing stays green. New ones are looked for on purpose,
# with HYPOTHESIS_PROFILE=search.
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# A shell starts background jobs with Ctrl-C ignored, and nohup ignores a hangup: the programs under test
# would inherit that.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of localhost, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "node.crt", folder / "node.key"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    subprocess.run(
        [*words.split(), "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert)],
        check=True,
        capture_output=True,
    )
    return cert, key


@pytest.fixture(scope="module")
def daemon(machine: Machine) -> Iterator[Daemon]:
    """On the `machine` that a module of tests has."""
    with machine.daemon() as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.connect() as client:
        yield client
