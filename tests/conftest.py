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
from hypothesis.database import DirectoryBasedExampleDatabase

if TYPE_CHECKING:
    from daemon_fake import Daemon, Machine
    from smaragdine.monitor.client import Client

# The same examples every time: a change that breaks nothing stays green. New ones are looked for on purpose,
# with `make search`, and those that failed before come first.
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# Where CI is set, Hypothesis would take the same examples here too and forget those that failed.
settings.register_profile(
    "search",
    derandomize=False,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
    max_examples=500,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# A shell starts background jobs with Ctrl-C ignored, and nohup ignores a hangup: the programs under test
# would inherit that.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What `make search` runs: properties, and whatever is called a fuzz test."""
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False) or "fuzz" in item.path.stem:
            item.add_marker("search")


@pytest.fixture(autouse=True)
def _as_wide_as_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a library or the caller's terminal has set."""
    monkeypatch.delenv("COLUMNS", raising=False)


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
