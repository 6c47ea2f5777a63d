"""Fleet metrics: totals that only grow, a bounded number of series, and what Prometheus makes of them."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli import TIMEOUT_S, wait_for
from smaragdine.daemon.metrics import (
    OTHER,
    DaemonHealth,
    Fleet,
    SessionEnergy,
    refreshed,
    serve_metrics,
    slurm_job_id,
)
from smaragdine.daemon.totals import RunningTotal
from smaragdine.sensors.base import Scope

HEALTH = DaemonHealth(
    begin_s=1_700_000_000.0,
    cpu_s=1.25,
    memory_bytes=30_000_000,
    sensors_up={("cpu:0", "energy"): True, ("gpu:0", "power"): False},
)
CPU = ("cpu:0", "measured")


def session(name: str, joules: float, job: str = "train", ended: bool = False, **more: str) -> SessionEnergy:
    labels = {"user": "ada", "slurm_job_id": "", **more}
    return SessionEnergy(name, job, labels["user"], labels["slurm_job_id"], {CPU: joules}, ended)


def total(device: str, joules: float, scope: Scope = "device", power_w: float | None = None) -> RunningTotal:
    return RunningTotal(device, joules, power_w, "measured", scope, 0)


def values(text: str, metric: str) -> dict[str, float]:
    """Labels as they stand → value."""
    lines = re.findall(rf"^smaragdine_{metric}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in lines}


def of_jobs(fleet: Fleet) -> dict[str, float]:
    found = values(fleet.text(HEALTH), "session_energy_joules_total")
    return {re.findall(r'job="([^"]*)"', labels)[0]: value for labels, value in found.items()}


def test_every_family_as_it_is_written() -> None:
    fleet = Fleet()
    device = total("cpu:0", 10.0)
    fleet.update(100.0, [device], [session("a", 2.5, slurm_job_id="77")])
    device = total("cpu:0", 40.0, power_w=15.0)
    fleet.update(102.0, [device], [session("a", 5.5, slurm_job_id="77")])
    text = fleet.text(HEALTH)
    device_labels = 'device="cpu:0",provenance="measured",scope="device"'
    assert values(text, "device_energy_joules_total") == {device_labels: 40.0}
    assert values(text, "device_power_watts") == {device_labels: 15.0}
    share = 'device="cpu:0",job="train",user="ada",slurm_job_id="77",provenance="measured"'
    assert values(text, "session_energy_joules_total") == {share: 5.5}
    assert values(text, "sessions") == values(text, "sessions_started_total") == {"": 1.0}
    assert values(text, "sensor_up") == {
        'device="cpu:0",quantity="energy"': 1.0,
        'device="gpu:0",quantity="power"': 0.0,
    }
    assert values(text, "daemon_cpu_seconds_total") == {"": 1.25}
    helps = re.findall(r"^# HELP (\S+) .+\n# TYPE \1 (?:counter|gauge)$", text, re.MULTILINE)
    assert len(helps) == len(set(helps)) == text.count("# HELP")


def test_sessions_of_a_job_add_up_and_the_end_of_one_takes_nothing_back() -> None:
    fleet = Fleet(kept_s=60.0)
    fleet.update(0.0, [], [session("a", 1.0), session("b", 2.0)])
    assert of_jobs(fleet) == {"train": 3.0}
    fleet.update(1.0, [], [session("a", 1.5, ended=True), session("b", 2.5)])
    fleet.update(2.0, [], [session("b", 3.0)])
    assert of_jobs(fleet) == {"train": 4.5}
    assert values(fleet.text(HEALTH), "sessions") == {"": 1.0}
    fleet.update(3.0, [], [])
    fleet.update(60.0, [], [])
    assert of_jobs(fleet) == {"train": 4.5}  # seen last at 2 s
    fleet.update(63.0, [], [])
    assert of_jobs(fleet) == {}


def test_what_was_counted_before_a_restart_is_not_counted_again() -> None:
    """A total that came back smaller, but not at 0, would be added to the old one by Prometheus."""
    fleet = Fleet()
    fleet.take_up(0.0, [session("a", 100.0), session("b", 50.0, ended=True)])
    fleet.update(1.0, [], [session("a", 101.5), session("b", 50.0, ended=True), session("c", 2.0)])
    assert of_jobs(fleet) == {"train": 3.5}
    assert values(fleet.text(HEALTH), "sessions_started_total") == {"": 1.0}


def test_jobs_beyond_the_bound_are_others_for_life() -> None:
    fleet = Fleet(most_jobs=2, kept_s=10.0)
    three = [session(name, 1.0, job=name) for name in "abc"]
    fleet.update(0.0, [], three)
    assert of_jobs(fleet) == {"a": 1.0, "b": 1.0, OTHER: 1.0}
    # a's series goes; c's session has its place among the others all the same, or its energy would jump.
    fleet.update(20.0, [], [session("b", 2.0, job="b"), session("c", 5.0, job="c")])
    fleet.update(
        40.0, [], [session("b", 2.0, job="b"), session("c", 6.0, job="c"), session("d", 1.0, job="d")]
    )
    assert of_jobs(fleet) == {"b": 2.0, OTHER: 6.0, "d": 1.0}
    # Another session of an old job's name begins anew, and the others keep theirs.
    fleet.update(80.0, [], [session("b", 2.0, job="b")])
    fleet.update(81.0, [], [session("b", 2.0, job="b"), session("c2", 3.0, job="c")])
    assert of_jobs(fleet) == {"b": 2.0, OTHER: 6.0, "c": 3.0}


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),  # which session
            st.sampled_from(["grow", "shrink", "end", "restart"]),
            st.integers(1, 400),  # seconds until the next look
        ),
        max_size=60,
    )
)
def test_no_series_runs_backwards_and_nothing_is_counted_twice(steps: list[tuple[int, str, int]]) -> None:
    fleet = Fleet(most_jobs=2, kept_s=300.0)
    live: dict[int, tuple[str, float]] = {}
    highest: dict[str, float] = {}  # session id → the most it ever had
    before: dict[str, float] = {}
    increase = 0.0
    now_s = 0
    for turn, (which, what, wait_s) in enumerate(steps):
        name, joules = live.get(which, (f"{which}-{turn}", 0.0))
        if what == "end":
            live.pop(which, None)
        elif what == "restart":
            live[which] = (f"{which}-{turn}", 1.0)
        else:
            live[which] = (name, max(0.0, joules + (2.0 if what == "grow" else -1.0)))
        sessions = [session(name, joules, job=f"job{w}") for w, (name, joules) in live.items()]
        for shown in sessions:
            highest[shown.session_id] = max(highest.get(shown.session_id, 0.0), shown.own_exclusive_j[CPU])
        now_s += wait_s
        fleet.update(now_s, [], sessions)
        now = of_jobs(fleet)
        assert len(now) <= 3
        for job, value in now.items():
            assert value >= before.get(job, 0.0)
            increase += value - before.get(job, 0.0)
        before = now
    assert increase == sum(highest.values())


def test_labels_are_escaped() -> None:
    fleet = Fleet()
    fleet.update(0.0, [], [session("a", 1.0, user='a"b\\c\nd\udcff')])
    assert 'user="a\\"b\\\\c\\nd?"' in fleet.text(HEALTH)
    fleet.text(HEALTH).encode()


@pytest.mark.parametrize(
    ("cgroup", "job"),
    [
        ("0::/system.slice/slurmstepd.scope/job_123/step_0/user/task_0\n", "123"),
        ("0::/system.slice/node7_slurmstepd.scope/job_5/step_batch/user/task_special\n", "5"),
        ("12:pids:/\n9:memory:/slurm/uid_1000/job_42/step_extern/task_0\n1:name=systemd:/x\n", "42"),
        ("5:cpuset:/slurm_gpu01/uid_0/job_7\n", "7"),
        ("0::/user.slice/user-1000.slice/job_9\n", ""),
        ("0::/system.slice/slurmd.service\n", ""),
        ("0::/system.slice/slurmstepd.scope/job_12x/step_0\n", ""),
        ("", ""),
    ],
)
def test_the_slurm_job_of_a_process(tmp_path: Path, cgroup: str, job: str) -> None:
    (tmp_path / "31").mkdir()
    (tmp_path / "31" / "cgroup").write_text(cgroup)
    assert slurm_job_id(31, tmp_path) == job
    assert slurm_job_id(32, tmp_path) == ""


def test_the_same_text_for_a_second() -> None:
    times_s = iter([10.0, 10.5, 10.99, 11.0, 11.9, 13.0])
    made = iter("abc")
    text = refreshed(lambda: next(made), lambda: next(times_s))
    assert [text() for _ in range(6)] == ["a", "a", "a", "b", "b", "c"]


@contextmanager
def serving(render: Callable[[], str], patience_s: float = 5.0) -> Iterator[int]:
    """The port of a server on a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def call(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(20)

    server = call(serve_metrics("127.0.0.1", 0, render, patience_s=patience_s))
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        call(ended(server))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()


async def ended(server: asyncio.Server) -> None:
    """With all its connections: one that is still open when its loop is closed cannot end any more."""
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def exchange(port: int, *pieces: bytes) -> bytes:
    """What comes back until the other side closes; nothing is closed from here."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        received = b""
        try:
            while chunk := connection.recv(65536):
                received += chunk
        except ConnectionResetError:
            pass
        return received


def test_requests_good_and_bad() -> None:
    with serving(lambda: "metrics\n") as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics?x=1", timeout=TIMEOUT_S) as answer:
            assert answer.read() == b"metrics\n"
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=TIMEOUT_S) as answer:
            assert b'href="/metrics"' in answer.read()
        head = exchange(port, b"HEAD /metrics HTTP/1.1\r\n", b"Host: x\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert head.endswith(b"\r\n\r\n")
        for request, status in {
            b"GET /other HTTP/1.1\r\n\r\n": b"404",
            b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello": b"405",
            b"GET /metrics\r\n\r\n": b"400",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n": b"400",
            b"\r\n\r\n": b"400",
            b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n": b"431",
        }.items():
            answer = exchange(port, request)
            # A peer that is still sending may see the reset instead of the answer.
            assert answer[9:12] == status or (status == b"431" and answer == b""), request[:40]
        assert exchange(port, b"GET /met") == b""
        assert exchange(port, b"GET /metrics HTTP/1.0\r\n\r\n").endswith(b"\r\n\r\nmetrics\n")


def test_a_failure_to_render_is_an_error_and_no_more() -> None:
    answers = iter([RuntimeError("secret detail"), "fine\n"])

    def render() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with serving(render) as port:
        first = exchange(port, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 500 ")
        assert b"secret" not in first
        assert exchange(port, b"GET /metrics HTTP/1.1\r\n\r\n").endswith(b"fine\n")


def test_slow_clients_are_cut_and_hold_nobody_up() -> None:
    """One that never ends its request, one that never reads, and more than there is room for."""
    large = "x" * 50_000_000
    with serving(lambda: large, patience_s=0.3) as port:
        idle = [socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) for _ in range(40)]
        silent, deaf, *_ = idle
        silent.sendall(b"GET /metr")
        deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        # All are let go in the end, and then there is room again.
        for connection in idle[2:]:
            assert wait_for(lambda connection=connection: closed(connection))
        assert closed(silent)
        assert wait_for(lambda: exchange(port, b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200"))
        received = 0
        try:
            while chunk := deaf.recv(1 << 20):
                received += len(chunk)
        except ConnectionResetError:
            pass
        assert received < len(large)
        for connection in idle:
            connection.close()


def closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def fleet_text() -> str:
    fleet = Fleet(most_jobs=2)
    devices = [
        total("cpu:0", 1000.0),
        total("cpu:0/core", 700.0, "part"),
        total("gpu:0", 5000.5),
    ]
    jobs = [session(name, 100.0, job=name, slurm_job_id="12") for name in ("bert", "resnet", "one too many")]
    fleet.update(0.0, [], [])
    fleet.update(0.0, devices, jobs)
    fleet.update(2.0, devices, jobs)
    return fleet.text(HEALTH)


def test_promtool_finds_nothing_wrong() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (Debian's prometheus) is not installed")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=fleet_text(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_real_prometheus_scrapes_it(tmp_path: Path) -> None:
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("prometheus (Debian's package) is not installed")
    with serving(fleet_text) as port, socket.create_server(("127.0.0.1", 0)) as free:
        own_port = free.getsockname()[1]
        free.close()
        config = tmp_path / "prometheus.yml"
        target = f"127.0.0.1:{port}"
        scrape = {"job_name": "node", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
        config.write_text(json.dumps({"scrape_configs": [scrape]}))
        process = subprocess.Popen(
            [
                prometheus,
                f"--config.file={config}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{own_port}",
                "--log.level=error",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:

            def ask(query: str) -> dict[str, float]:
                url = f"http://127.0.0.1:{own_port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
                try:
                    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                        result = json.load(answer)["data"]["result"]
                except (urllib.error.URLError, ConnectionError):
                    return {}
                return {next(iter(row["metric"].values()), ""): float(row["value"][1]) for row in result}

            by_device = 'sum by (device) (smaragdine_device_energy_joules_total{scope="device"})'
            assert wait_for(lambda: ask(by_device)) == {"cpu:0": 1000.0, "gpu:0": 5000.5}
            assert ask("up") == {"up": 1.0} or ask("max(up)") == {"": 1.0}
            assert ask("sum by (exported_job) (smaragdine_session_energy_joules_total)") == {
                "bert": 100.0,
                "resnet": 100.0,
                OTHER: 100.0,
            }
        finally:
            process.kill()
            process.wait()
