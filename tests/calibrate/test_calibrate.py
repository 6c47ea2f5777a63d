"""`smaragdine calibrate` as a user runs it: a recording, a simulated card behind the real NVML binding, and a
process in PyTorch's place whose operations draw what the test says."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import nvml_fake
from cli import finish, smaragdine, start, wait_for
from nvml_fake import GpuSpec, nvml_environment
from recordings import MS, T0, S, put
from smaragdine.accounting.run import Run
from smaragdine.calibrate.store import CacheState, MeasuredCall, Store
from smaragdine.recording.format import CALLS, EVENTS_WITH_CALLS
from smaragdine.recording.marks import marks_table
from smaragdine.recording.writer import write_calls
from smaragdine.sensors.base import Channel

UUID = "GPU-00000000-0000-4000-8000-000000000000"
IDLE_W = 100.0
GPU = Channel("gpu:0", "power", "W", "sample", "measured", 20.0, "nvml", window_ms=20.0)
TRUE = {"aten::mm": 900.0, "aten::sum": 250.0, "aten::strange": 400.0}
CALL = {"aten::mm": 11, "aten::sum": 12, "aten::strange": 13}
MS_LONG = {"aten::mm": 5, "aten::sum": 9, "aten::strange": 1}


def recorded(folder: Path, uuid: str = UUID, lost: str = "") -> Path:
    """Forty steps of 20 ms, ten of them traced: a product, a sum, something strange, and 5 ms of nothing. The
    operation `lost`, or all, ran from a CUDA graph."""
    events, steps = [], []
    marks: list[dict[str, Any]] = [{"t_ns": T0, "name": "experiment_begin", "source": "run"}]
    mean_w = (IDLE_W * 5 + sum(TRUE[op] * long for op, long in MS_LONG.items())) / 20
    who = {"rank": 0, "pid": 42, "source": "torch"}
    readings = [
        (T0 + 20 * (step + 1) * MS, 0, mean_w if 0 <= step < 40 else IDLE_W) for step in range(-2, 60)
    ]
    ends = [(step, T0 + 20 * (step + 1) * MS) for step in range(40)]
    marks += [{"t_ns": t_ns, "name": "step_end", "index": step, **who} for step, t_ns in ends]
    for step in range(10, 20):
        at = T0 + 20 * step * MS
        steps.append({"index": step, "begin_ns": at, "end_ns": at + 20 * MS})
        for op, long in MS_LONG.items():
            events.append(
                {
                    "name": f"net/{op.removeprefix('aten::')}",
                    "device": "gpu:0",
                    "start_ns": at,
                    "duration_ns": long * MS,
                    "phase": "forward",
                    "lane": 7,
                    "step": step,
                    "call": CALL[op],
                }
            )
            at += long * MS
    marks.append({"t_ns": T0 + S, "name": "experiment_end", "source": "run"})
    window = {
        "framework": "torch",
        "source": "torch",
        "rank": 0,
        "pid": 42,
        "asked_ns": T0 + 200 * MS,
        "begin_ns": T0 + 200 * MS,
        "end_ns": T0 + 400 * MS,
        "stopped_ns": T0 + 400 * MS,
        "steps": steps,
        "events": len(events),
        "busy_ns": 150 * MS,
        "placed_ns": 150 * MS,
        "counts_divide": True,
        "remarks": [],
    }
    facts = {
        "command": ["python", "train.py"],
        "begin_ns": T0,
        "end_ns": T0 + S,
        "clock": {"begin": {"wall_ns": T0 - S, "mono_ns": 5 * S}},
        "host": {
            "gpus": [{"device": "gpu:0", "name": "NVIDIA Fake H200", "uuid": uuid, "power_limit_w": 1000.0}]
        },
    }
    table = pa.Table.from_pylist(events, schema=EVENTS_WITH_CALLS)
    put(folder, facts, [GPU], [(0, readings)], marks_table(marks), [window], table)
    calls = [
        {
            "call": CALL[op],
            "framework": "torch",
            "device": "gpu:0",
            "op": op,
            "inputs": '{"why":"it ran from a CUDA graph"}'
            if lost in (op, "all")
            else '{"dims":[[4]],"strides":[[1]],"types":["float"],"values":[""]}',
            "settings": '{"tf32":false}',
            "kernels": f'[["{op}",[200,1,1]]]',
            "count": 10,
            "busy_ns": 10 * long * MS,
        }
        for op, long in MS_LONG.items()
    ]
    assert write_calls(folder, pa.Table.from_pylist(calls, schema=CALLS)) is None
    return folder


def gpu_spec(**facts: Any) -> GpuSpec:
    limits = {"limit_default_w": 1200.0, "limit_max_w": 1200.0}
    return GpuSpec(
        **{"low_w": IDLE_W, "high_w": 1100.0, "announced": True, "processes": 0, **limits, **facts}
    )


class Bench:
    """A machine with one simulated card, and what its operations draw."""

    def __init__(self, tmp_path: Path, **gpu: Any) -> None:
        self.tmp = tmp_path
        self.env = nvml_environment(tmp_path, [gpu_spec(**gpu)])
        self.env["FAKE_CARD"] = str(tmp_path / "card.json")
        self.env["SMARAGDINE_CALIBRATION"] = str(tmp_path / "store")
        self.python = tmp_path / "python-of-the-program"
        card = Path(__file__).parents[1] / "fakes" / "card.py"
        self.python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{card}" "$@"\n')
        self.python.chmod(self.python.stat().st_mode | stat.S_IXUSR)
        self.draws({op: {"cold": [power_w, MS_LONG[op] / 1000]} for op, power_w in TRUE.items()})

    def draws(self, what: Mapping[str, Any]) -> None:
        Path(self.env["FAKE_CARD"]).write_text(json.dumps(what))

    def calibrate(self, run: Path, *more: str) -> Any:
        return smaragdine("calibrate", run, "--python", self.python, *more, env=self.env)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def energies(run: Path) -> dict[str, float]:
    step = Run.open(run).step
    assert step is not None
    return {row["name"]: row["energy_j"] for row in step.device_rows("gpu:0").to_pylist()}


def truth() -> dict[str, float]:
    return {f"net/{op.removeprefix('aten::')}": TRUE[op] * long / 1000 for op, long in MS_LONG.items()}


def test_rows_are_what_each_operation_draws(bench: Bench, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    equal = energies(run)
    assert abs(equal["net/mm"] / truth()["net/mm"] - 1) > 0.2  # else there would be nothing to mend
    done = bench.calibrate(run)
    assert done.returncode == 0, done.stderr
    assert "gpu:0: 3 of 3 calls are known, 100.0% of the busy time; 3 were replayed now" in done.stdout
    assert energies(run) == pytest.approx(truth(), rel=0.03)
    assert sum(energies(run).values()) + Run.open(run).needed.devices["gpu:0"].idle_j == pytest.approx(
        Run.open(run).needed.devices["gpu:0"].total_j
    )
    report = smaragdine("report", run, env={**bench.env, "COLUMNS": "160"})
    assert "calibration" in report.stdout
    assert "rows rest on calibration" in report.stdout
    # What is known is not replayed again: another run of the same program takes no time, and needs no card.
    other = recorded(tmp_path / "other")
    again = smaragdine(
        "calibrate", other, env={"SMARAGDINE_CALIBRATION": bench.env["SMARAGDINE_CALIBRATION"]}
    )
    assert again.returncode == 0, again.stderr
    assert "0 were replayed now" in again.stdout
    assert energies(other) == pytest.approx(energies(run))
    listed = smaragdine("calibrate", "--list", env=bench.env)
    assert f"{UUID}  NVIDIA Fake H200  3 calls  (torch 2.11.0+fake, driver " in listed.stdout
    # A card of the same kind borrows it, and says so.
    borrowed = recorded(tmp_path / "borrowed", UUID.replace("8000-0", "8000-f"))
    lent = smaragdine("calibrate", borrowed, "--no-replay", "--json", env=bench.env)
    assert json.loads(lent.stdout)[0]["lent_from"] == "another NVIDIA Fake H200"
    assert "lent from another NVIDIA Fake H200" in smaragdine("report", borrowed, env=bench.env).stdout
    assert smaragdine("calibrate", "--forget", UUID, env=bench.env).returncode == 0
    assert smaragdine("calibrate", "--list", env=bench.env).stdout.startswith("no card is known")


def test_caches_between_cold_and_hot_give_power_between(bench: Bench, tmp_path: Path) -> None:
    """A product that the program ran in 5 ms: 6 ms cold at 800 W, 4 ms hot at 1,000 W."""
    bench.draws(
        {
            "aten::mm": {"cold": [800, 0.006], "hot": [1000, 0.004]},
            "aten::sum": {"cold": [250, 0.009]},
            "aten::strange": {"cold": [400, 0.001]},
        }
    )
    run = recorded(tmp_path / "run")
    done = bench.calibrate(run)
    assert done.returncode == 0, done.stderr
    assert energies(run) == pytest.approx(truth(), rel=0.03)


def test_what_cannot_be_made_again_is_said_and_costs_no_other(bench: Bench, tmp_path: Path) -> None:
    bench.draws(
        {
            "aten::mm": {"cold": [900, 0.005]},
            "aten::sum": {"why": "no overload takes what was recorded"},
            "aten::strange": {"dies": True},
        }
    )
    run = recorded(tmp_path / "run")
    done = bench.calibrate(run)
    assert done.returncode == 0, done.stderr
    assert "1 of 3 calls are known, 33.3% of the busy time" in done.stdout
    assert "not replayed: aten::sum: no overload takes what was recorded" in done.stdout
    assert "not replayed: aten::strange: making it again ends the process" in done.stdout
    rows = Run.open(run).needed.device_rows("gpu:0").to_pylist()
    assert {row["name"]: row["basis"] for row in rows} == {
        "net/mm": "calibration",
        "net/sum": "prior",
        "net/strange": "prior",
    }
    for row in rows:
        assert abs(row["energy_j"] - truth()[row["name"]]) <= row["uncertainty_j"], row["name"]


def test_what_cannot_be_made_again_goes_by_what_the_card_is_known_to_do(bench: Bench, tmp_path: Path) -> None:
    """Reductions that other programs called draw what sums do: the sum of this one came from a CUDA graph."""
    store = Store(tmp_path / "store")
    for i in range(24):
        op, above_w = ("aten::sum", 150.0) if i % 2 else ("aten::mm", 800.0)
        state = CacheState(IDLE_W + above_w + i, 0.005, 0.01, 1980.0, 0.0, 50.0, 0.0)
        about = {"kernel": op, "blocks": 200, "program": f"python {i % 3}.py"}
        store.add(
            MeasuredCall(f"{i}", op, UUID, "NVIDIA Fake H200", "1", "torch", IDLE_W, cold=state, **about)
        )
    run = recorded(tmp_path / "run", lost="aten::sum")
    done = bench.calibrate(run)
    assert done.returncode == 0, done.stderr
    assert "2 of 3 calls are known, 40.0% of the busy time" in done.stdout
    assert "60.0% of the busy time: what was not replayed goes by a model of the card" in done.stdout
    assert "not replayed: aten::sum: it ran from a CUDA graph" in done.stdout
    rows = {row["name"]: row for row in Run.open(run).needed.device_rows("gpu:0").to_pylist()}
    assert {name: row["basis"] for name, row in rows.items()} == {
        "net/mm": "calibration",
        "net/sum": "model",
        "net/strange": "calibration",
    }
    for name, row in rows.items():
        assert abs(row["energy_j"] - truth()[name]) <= row["uncertainty_j"], name
    assert rows["net/sum"]["energy_j"] == pytest.approx(truth()["net/sum"], rel=0.1)
    said = " ".join(smaragdine("report", run, env=bench.env).stdout.split())
    assert "40.0% of the busy time was replayed and 60.0% modelled" in said
    assert "learned from 26 calls; with one program after the other left out, it is" in said
    # Where nothing at all can be replayed, the model is all there is.
    graph = recorded(tmp_path / "graph", lost="all")
    assert bench.calibrate(graph).returncode == 0
    rows = {row["name"]: row for row in Run.open(graph).needed.device_rows("gpu:0").to_pylist()}
    assert {row["basis"] for row in rows.values()} == {"model"}


def test_the_largest_come_first_and_the_next_time_goes_on(bench: Bench, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    first = bench.calibrate(run, "--budget", "0.1s")
    assert first.returncode == 2
    assert "nothing is known of the calls" in first.stderr
    assert "there was no time left" in first.stderr
    some = bench.calibrate(run, "--budget", "3.2s")
    assert some.returncode == 0, some.stderr
    assert Store(tmp_path / "store").of(UUID)[0].op == "aten::sum"  # it ran longest
    whole = bench.calibrate(run)
    assert "3 of 3 calls are known" in whole.stdout


def test_a_store_that_cannot_help_says_why(bench: Bench, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")

    def ask(store: Path, *more: str) -> Any:
        return smaragdine("calibrate", run, "--no-replay", "--store", store, *more, env=bench.env)

    nowhere = ask(tmp_path / "nowhere")
    assert nowhere.returncode == 2
    assert "there is no such folder" in nowhere.stderr
    assert "no time left" not in nowhere.stderr
    (tmp_path / "file").write_text("")
    for words in (["calibrate", run, "--no-replay"], ["calibrate", "--list"]):
        refused = smaragdine(*words, "--store", tmp_path / "file", env=bench.env)
        assert refused.returncode == 2
        assert "cannot be read: Not a directory" in refused.stderr
    assert bench.calibrate(run).returncode == 0
    # Half a line, and one whose power no card draws, are said and count for nothing.
    store = tmp_path / "store" / f"{UUID}.jsonl"
    first, *others = store.read_text().splitlines()
    odd = first.replace('"power_w":', '"power_w":-')
    store.write_text("\n".join([odd, *others])[:-20])
    some = ask(store.parent)
    assert "2 of 3 lines cannot be read, and count for nothing" in some.stderr
    assert "1 of 3 calls are known" in some.stdout
    assert "equal shares of what is left; a model of the card takes at least twelve replays" in some.stdout
    assert "the store does not have it" in some.stdout
    # A recording keeps its calibration where a store knows none of its calls.
    before = (run / "calibration.json").read_bytes()
    store.write_text(others[0].replace('"key":"', '"key":"0') + "\n")
    kept = ask(store.parent)
    assert kept.returncode == 2
    assert (run / "calibration.json").read_bytes() == before
    # As `--list` and the docs name it.
    forgotten = smaragdine("calibrate", "--forget", f"{UUID[:12]}…", "--json", env=bench.env)
    assert json.loads(forgotten.stdout) == {"forgotten": UUID}


def test_another_driver_is_another_calibration(bench: Bench, tmp_path: Path) -> None:
    """Kernels change with drivers and libraries: what was replayed with older ones is borrowed at most."""
    run = recorded(tmp_path / "run")
    assert bench.calibrate(run).returncode == 0
    later = recorded(tmp_path / "later")
    about = json.loads((later / "run.json").read_text())
    about["host"]["driver"] = "999.1"
    (later / "run.json").write_text(json.dumps(about))
    borrowed = bench.calibrate(later, "--no-replay")
    assert "3 of 3 calls are known" in borrowed.stdout
    assert "lent from the same card (driver 580.00.fake, torch 2.11.0+fake)" in borrowed.stdout
    again = bench.calibrate(later)
    assert "3 were replayed now" in again.stdout


def test_interrupted_it_keeps_what_is_done(bench: Bench, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    process = start("calibrate", run, "--python", bench.python, env=bench.env)
    wait_for(lambda: Store(tmp_path / "store").of(UUID))
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = finish(process)
    assert code == -signal.SIGINT  # as a shell knows it: 130
    assert "interrupted: what was replayed is kept; smaragdine calibrate" in err
    assert "Traceback" not in err
    known = len(Store(tmp_path / "store").of(UUID))
    done = bench.calibrate(run)
    assert f"{3 - known} were replayed now" in done.stdout


def test_a_card_in_use_is_waited_for_and_then_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    nvml_fake.write_spec(Path(bench.env["FAKE_NVML"]), [gpu_spec(processes=1)])
    run = recorded(tmp_path / "run")
    process = start("calibrate", run, "--python", bench.python, env=bench.env)
    assert process.stderr is not None
    assert "waiting for process 1000" in process.stderr.readline()
    nvml_fake.write_spec(Path(bench.env["FAKE_NVML"]), [gpu_spec()])
    code, out, err = finish(process)
    assert code == 0, err
    assert "3 of 3 calls are known" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["calibrate"], "name a recording, or one of --list and --forget"),
        (["calibrate", "--forget", "GPU-12345678"], "nothing is known of GPU-12345678"),
        (["calibrate", "--forget", "../../etc/passwd"], "is no UUID of a GPU"),
        (["calibrate", "missing"], "missing does not exist"),
        (["calibrate", "run", "--budget", "soon"], "soon is no time: 90s, 5min, 1h"),
        (
            ["calibrate", "run", "--list"],
            "name a recording, or one of --list and --forget, and no two of them",
        ),
        (["run", "--calibrate", "x.py"], "--calibrate needs an NVIDIA GPU"),
        (["run", "--calibrate", "--trace", "off", "x.py"], "--calibrate says how to trace: --trace is off"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    done = smaragdine(*words, cwd=tmp_path, env={"SMARAGDINE_CALIBRATION": str(tmp_path / "store")})
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_other_machines_are_one_line(bench: Bench, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", UUID.replace("8000-0", "8000-f"))
    done = bench.calibrate(run)
    assert (done.returncode, done.stdout) == (2, "")
    assert "this machine does not have NVIDIA Fake H200 GPU-" in done.stderr
    nowhere = recorded(tmp_path / "nowhere")
    done = smaragdine("calibrate", nowhere, env={"SMARAGDINE_CALIBRATION": str(tmp_path / "none")})
    assert done.returncode == 2
    assert "no GPU can be measured here" in done.stderr
    broken = bench.calibrate(nowhere, "--python", "/bin/false")
    assert broken.returncode == 2
    assert "/bin/false cannot replay on" in broken.stderr
    for each in (done, broken):
        assert each.stderr.strip().splitlines()[-1].startswith("smaragdine: ")
        assert "Traceback" not in each.stderr


def test_a_damaged_store_or_calibration_is_no_wrong_figure(bench: Bench, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    assert bench.calibrate(run).returncode == 0
    store = tmp_path / "store" / f"{UUID}.jsonl"
    whole = store.read_bytes()
    store.write_bytes(b"\xff\x00 no JSON\n" + whole[:-40])  # and the last line is half
    assert len(Store(tmp_path / "store").of(UUID)) == 2
    listed = smaragdine("calibrate", "--list", env=bench.env)
    assert f"{UUID}.jsonl: 2 of 4 lines cannot be read, and count for nothing" in listed.stderr
    done = bench.calibrate(run)
    assert "1 were replayed now" in done.stdout
    equal = energies(recorded(tmp_path / "plain"))
    for text in (
        '{"devices": {"gpu:0": {"calls": {"11": {"power_w": 1e9, "deviation": 0}}, "idle_w": 100}}}',
        '{"devices": {"gpu:0": {"calls": 5}}}',
        "[" * 100_000,
        "",
    ):
        (run / "calibration.json").write_text(text)
        assert energies(run) == pytest.approx(equal)
        said = smaragdine("report", run, env=bench.env).stdout
        assert "calibration.json is damaged" in " ".join(said.split())


def test_a_damaged_table_of_calls_is_what_is_said(bench: Bench, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    table = run / "calls.arrows"
    table.write_bytes(table.read_bytes()[: table.stat().st_size // 2])
    done = bench.calibrate(run)
    assert done.returncode == 2
    assert "has no calls to replay: calls.arrows is damaged" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_card_that_is_lost_is_one_line_and_loses_nothing(bench: Bench, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    process = start("calibrate", run, "--python", bench.python, env=bench.env)
    wait_for(lambda: Store(tmp_path / "store").of(UUID))
    nvml_fake.write_spec(Path(bench.env["FAKE_NVML"]), [gpu_spec(lost=True)])
    code, _, err = finish(process)
    assert code == 2
    assert "NVIDIA Fake H200 can no longer be measured: GPU is lost" in err
    assert "Traceback" not in err
    assert Store(tmp_path / "store").of(UUID)


def test_a_clock_that_stands_still_is_said(tmp_path: Path) -> None:
    bench = Bench(tmp_path, counter=False)
    done = bench.calibrate(recorded(tmp_path / "run"))
    assert done.returncode == 2
    assert "has no energy counter" in done.stderr
