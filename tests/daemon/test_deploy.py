"""What an operator installs: the unit, the script, the container, and a client in another language."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from cli import environment
from node_client import node_command, read_with_node
from smaragdine.daemon.unit import CAPABILITIES, notify, unit_text
from smaragdine.monitor.contract import monitor_pb2 as messages
from smaragdine.monitor.contract.service import METHODS, SERVICE
from smaragdine.version import __version__

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "deploy"
SCORE = re.compile(r"Overall exposure level for \S+: ([\d.]+)")


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--prometheus", ":9402"),
        ("--group", "a b%i$X'\""),
        ("--state=/srv/a b", "--socket", "/srv/run/monitor.sock"),
    ],
)
def test_systemd_takes_the_unit(tmp_path: Path, options: tuple[str, ...]) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "smaragdine.service"
    unit.write_text(unit_text("/bin/true", options))
    done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_how_exposed_the_unit_is(tmp_path: Path) -> None:
    """systemd's own score, 0 to 10; the documentation names the same."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    scores: list[float] = []
    for name, options in (("alone", ()), ("tcp", ("--prometheus", ":9402"))):
        unit = tmp_path / f"{name}.service"
        unit.write_text(unit_text("/bin/true", options))
        done = subprocess.run(
            [analyze, "security", "--offline=true", "--no-pager", str(unit)],
            capture_output=True,
            text=True,
            check=False,
        )
        found = SCORE.search(done.stdout)
        if found is None:
            pytest.skip("this systemd-analyze cannot look at a file")
        scores.append(float(found[1]))
    # Versions weigh things a little differently.
    assert scores[0] <= 3.0
    assert scores[0] < scores[1] <= 4.0


def test_a_network_only_where_it_is_asked_for() -> None:
    alone, scraped = unit_text("/x/smaragdine"), unit_text("/x/smaragdine", ["--prometheus=:9402"])
    assert "PrivateNetwork=yes" in alone
    assert "RestrictAddressFamilies=AF_UNIX\n" in alone
    assert "PrivateNetwork" not in scraped
    assert "ExecStart=/x/smaragdine daemon --prometheus=:9402\n" in scraped


def test_folders_of_their_own_are_writable() -> None:
    text = unit_text("/x/smaragdine", ["--state", "/srv/state", "--socket=/run/smaragdine/monitor.sock"])
    assert re.findall(r"^ReadWritePaths=(.*)$", text, re.MULTILINE) == ["-/srv/state", "-/srv/state-limits"]


def test_words_mean_themselves_to_systemd() -> None:
    text = unit_text("/x y/s", ["--group", "a%b$c", 'd"e\\f'])
    assert 'ExecStart="/x y/s" daemon --group a%%b$$c "d\\"e\\\\f"\n' in text


def test_systemd_is_told(tmp_path: Path) -> None:
    for address in (str(tmp_path / "notify"), f"@smaragdine-test-{os.getpid()}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(address.replace("@", "\0", 1) if address[0] == "@" else address)
            assert notify("READY=1", {"NOTIFY_SOCKET": address})
            assert manager.recv(100) == b"READY=1"
    assert not notify("READY=1", {})
    assert not notify("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "nobody")})


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, REPOSITORY],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    if built.returncode != 0:
        pytest.skip(f"no wheel can be built here: {built.stderr.strip()[-200:]}")
    return next(folder.glob("*.whl"))


def install(*words: str | Path, destdir: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", DEPLOY / "install.sh", *words],
        env=environment({"DESTDIR": str(destdir), "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1"}),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="accounts and units are root's")
def test_installed_twice_and_removed(tmp_path: Path, wheel: Path) -> None:
    destdir, prefix = tmp_path / "machine", tmp_path / "machine" / "opt"
    (destdir / "etc").mkdir(parents=True)
    options = ("--prefix", prefix, "--from", wheel, "--python", sys.executable, "--group", "physics")
    first = install(*options, destdir=destdir)
    assert first.returncode == 0, first.stderr
    unit = destdir / "etc" / "systemd" / "system" / "smaragdine.service"
    for line in (
        f"made {prefix}",
        f"installed smaragdine {__version__} in {prefix}",
        "made the group physics",
        "made the user smaragdine",
        f"wrote {unit}",
        "  systemctl enable --now smaragdine     # after an upgrade: systemctl restart smaragdine",
    ):
        assert line in first.stdout.splitlines()
    assert unit.read_text() == unit_text(f"{prefix}/bin/smaragdine", ["--group", "physics"])
    assert unit.stat().st_mode & 0o777 == 0o644
    assert re.search(r"^physics:x:\d+:$", (destdir / "etc" / "group").read_text(), re.MULTILINE)
    account = (destdir / "etc" / "passwd").read_text()
    assert re.fullmatch(r"smaragdine:.:\d+:\d+::/nonexistent:/usr/sbin/nologin\n", account)

    before = {path: path.stat().st_mtime_ns for path in (unit, destdir / "etc" / "group")}
    second = install(*options, destdir=destdir)
    assert second.returncode == 0, second.stderr
    assert not re.search(r"^(made|wrote)", second.stdout, re.MULTILINE)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert (destdir / "etc" / "passwd").read_text() == account

    removed = install("--prefix", prefix, "--uninstall", destdir=destdir)
    assert removed.returncode == 0, removed.stderr
    assert not prefix.exists()
    assert not unit.exists()
    again = install("--prefix", prefix, "--uninstall", destdir=destdir)
    assert again.returncode == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--prefix", "relative"), "--prefix must be an absolute path, and not /"),
        (("--prefix", "/"), "--prefix must be an absolute path, and not /"),
        (("--prefix",), "--prefix needs a value. See install.sh --help"),
        (("--colour",), "unknown option --colour. See install.sh --help"),
        (("--group", "a;b"), "a;b is no name for a group"),
        (("--python", "/bin/false"), "/bin/false is missing or older than 3.11. Name another with --python"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, words: tuple[str, ...], line: str) -> None:
    done = install(*words, destdir=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"install.sh: {line}\n")
    assert list(tmp_path.iterdir()) == []


def test_other_peoples_folders_stay(tmp_path: Path) -> None:
    prefix = tmp_path / "home"
    prefix.mkdir()
    (prefix / "thesis").write_text("years of work")
    for words, line in (
        ((), "holds something else. Name another place with --prefix"),
        (("--uninstall",), "was not made by this script: it is left as it is"),
    ):
        done = install("--prefix", prefix, "--python", sys.executable, *words, destdir=tmp_path / "machine")
        assert (done.returncode, done.stderr) == (2, f"install.sh: {prefix} {line}\n")
    assert (prefix / "thesis").read_text() == "years of work"


def test_the_image_is_made_by_the_same_script() -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    runs = [words for step, words in steps if step == "RUN"]
    assert len(runs) == 1
    assert runs[0].startswith("sh /src/deploy/install.sh --prefix /opt/smaragdine ")
    options = set(re.findall(r"--[a-z-]+", runs[0]))
    assert options <= set(re.findall(r"--[a-z-]+", (DEPLOY / "install.sh").read_text()))
    copied: set[str] = set()
    for step, words in steps:
        if step == "COPY" and not words.startswith("--from"):
            for source in words.split()[:-1]:
                assert (REPOSITORY / source).exists(), source
                copied.add(source)
    # Without these the wheel cannot be built.
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert copied > set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"])


def test_containers_get_nothing_they_do_not_need() -> None:
    text = (DEPLOY / "README.md").read_text()
    blocks = re.findall(r"(?:^ {4}.*\n)+", text, re.MULTILINE)
    runs = [block for block in blocks if "docker run" in block]
    assert len(runs) == 2
    for block in runs:
        assert "--privileged" not in block
        for option in ("--read-only", "--cap-drop ALL", "--security-opt no-new-privileges", "--network none"):
            assert option in block
    given = {f"CAP_{name}" for name in re.findall(r"--cap-add (\w+)", runs[0])}
    # perf is no way inside a container, and limits are asked for apart.
    assert given == set(CAPABILITIES.split()) - {"CAP_PERFMON", "CAP_SYS_ADMIN"}


WRAPS_AT_J = 100.0
T_NS = 1_700_000_000_123_456_789  # no double holds it


class StandIn:
    """Speaks the contract with readings known beforehand, and is gone once in the middle."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.reads: list[Any] = []

    def Start(self, request: Any, context: grpc.ServicerContext) -> Any:
        if request.pid == 1:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "process 1 is root's. Ask for one of your own")
        self.started.append(request)

        def channel(number: int, device: str, **more: Any) -> Any:
            return messages.Channel(
                number=number,
                device=device,
                quantity="energy",
                unit="J",
                kind=messages.KIND_COUNTER,
                provenance=messages.PROVENANCE_MEASURED,
                **{"scope": messages.SCOPE_DEVICE, **more},
            )

        channels = [
            channel(0, "cpu:0", wraps_at=WRAPS_AT_J),
            channel(1, "cpu:0/core", wraps_at=WRAPS_AT_J, scope=messages.SCOPE_PART),
            channel(5, "gpu:0"),
            messages.Channel(number=6, device="gpu:0", quantity="power", kind=messages.KIND_SAMPLE),
        ]
        return messages.StartResponse(session_id="s1", sequence=11, channels=channels, period_ms=10)

    def Read(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self.reads.append(request)
        rows = {
            11: [(0, 90.0), (1, 1.0), (5, 1000.0), (6, 300.0)],
            12: [(0, 99.5), (5, 1500.5)],
            13: [(0, 3.25), (1, 2.0), (5, 1501.0)],  # 100 is 0 again
        }
        for sequence in range(request.sequence, 14):
            yield messages.ReadResponse(
                next_sequence=sequence + 1,
                t_ns=[T_NS + sequence] * len(rows[sequence]),
                channel=[channel for channel, _ in rows[sequence]],
                value=[value for _, value in rows[sequence]],
                ended=sequence == 13,
            )
            if sequence == 12 and len(self.reads) == 1:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the daemon is stopping")


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[tuple[StandIn, str]]:
    service = StandIn()
    handlers = {}
    for name in ("Start", "Read"):
        method = METHODS[name]
        make = grpc.unary_stream_rpc_method_handler if method.streams else grpc.unary_unary_rpc_method_handler
        handlers[name] = make(
            getattr(service, name), method.request.FromString, method.response.SerializeToString
        )
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    address = f"unix:{tmp_path}/monitor.sock"
    server.add_insecure_port(address)
    server.start()
    yield service, address
    server.stop(None).wait()


def test_node_works_from_the_proto_alone(stand_in: tuple[StandIn, str]) -> None:
    service, address = stand_in
    seen = read_with_node(address, 4321, "--period-ms", "2.5", "--job", "bert")
    (started,) = service.started
    assert (started.pid, started.period_ms, started.job) == (4321, 2.5, "bert")
    # It went on where it was when the daemon went away.
    assert [(read.session_id, read.sequence, read.follow) for read in service.reads] == [
        ("s1", 11, True),
        ("s1", 13, True),
    ]
    energies = {row["device"]: row["energy_j"] for row in seen["channels"]}
    assert energies == {"cpu:0": 9.5 + 0.5 + 3.25, "cpu:0/core": 1.0, "gpu:0": 501.0}
    cpu = next(row for row in seen["channels"] if row["device"] == "cpu:0")
    assert (int(cpu["first_t_ns"]), int(cpu["last_t_ns"])) == (T_NS + 11, T_NS + 13)
    assert (cpu["scope"], cpu["provenance"], cpu["readings"]) == ("SCOPE_DEVICE", "PROVENANCE_MEASURED", 3)


def test_node_says_the_daemons_own_line(stand_in: tuple[StandIn, str]) -> None:
    done = subprocess.run(node_command(stand_in[1], 1), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "read.mjs: process 1 is root's. Ask for one of your own\n"
