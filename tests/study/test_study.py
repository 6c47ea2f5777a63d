"""`smaragdine study`: which runs it takes, that they are shared and resumed; every command once for real."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli import alive, finish, smaragdine, start, wait_for, write_script
from smaragdine.cli import study as cli_study
from smaragdine.cli.main import main
from smaragdine.jobs.job import RunRequest, RunResult, Stop
from smaragdine.study import folder as study_folder
from smaragdine.study import runner
from smaragdine.study.custom import custom_settings, customs_of
from smaragdine.study.document import materials
from smaragdine.study.folder import Study, expected_s, in_order, read_made
from smaragdine.study.plan import SIZES, STUDIES, Planned, StudyRequest, StudyRun, StudySetting, runs_of
from smaragdine.study.results import load_results
from smaragdine.study.scaling import scaling_of
from traced_recording import ten_and_three

BASE = StudyRequest(SIZES["base"])


def names(study: str, wanted: StudyRequest = BASE) -> set[str]:
    return {run.name for run in runs_of(STUDIES[study](wanted))}


def numbered(setting: str, runs: int) -> set[str]:
    return {f"{setting}-{number}" for number in range(1, runs + 1)}


def test_each_study_has_its_runs_and_shares_them() -> None:
    pretrain = "bert-pretrain-torch-L12-H768-fp32"
    stages = numbered("bert-finetune-torch-L12-H768-fp32", 5) | numbered(
        "bert-predict-torch-L12-H768-fp32", 5
    )
    assert names("bert") == numbered(pretrain, 5) | stages
    sizes = [(layers, hidden) for layers in (6, 8, 10, 12) for hidden in (512, 768)]
    of_sizes = [numbered(f"bert-pretrain-torch-L{layers}-H{hidden}-fp32", 5) for layers, hidden in sizes]
    assert names("variants") == set().union(*of_sizes)
    assert names("albert") == numbered(pretrain, 5) | numbered("albert-pretrain-torch-L12-H768-fp32", 5)
    assert names("precision") == numbered(pretrain, 45)
    for size, count in (("base", 45 + 5 + 5 + 35 + 5), ("small", 27 + 3 + 3 + 21 + 3)):
        wanted = StudyRequest(SIZES[size])
        together = runs_of([each for study in STUDIES.values() for each in study(wanted)])
        assert len(together) == len({run.name for run in together}) == count


def test_options_make_settings() -> None:
    wanted = StudyRequest(
        SIZES["tiny"], ("predict",), ("torch", "keras-jax"), ("bf16", "fp32"), (3,), (64,), 4, None, 2
    )
    found = {each.setting.name: each for each in STUDIES["bert"](wanted)}
    assert set(found) == {
        f"bert-predict-{framework}-L3-H64-{precision}-B4"
        for framework in ("torch", "keras-jax")
        for precision in ("bf16", "fp32")
    }
    one = found["bert-predict-keras-jax-L3-H64-bf16-B4"]
    assert one.runs == 2
    assert one.setting.environment == {"KERAS_BACKEND": "jax"}
    assert Path(one.setting.words[0]).name == "keras_bert.py"
    words = one.setting.words[1:]
    assert dict(zip(words[::2], words[1::2], strict=True)) == {
        "--model": "bert", "--stage": "predict", "--layers": "3", "--hidden": "64", "--batch": "4",
        "--length": "16", "--precision": "bf16", "--seconds": "1", "--steps": "27", "--vocabulary": "200",
    }  # fmt: skip
    assert one.setting.facts == {
        "model": "bert", "stage": "predict", "framework": "keras-jax", "layers": 3, "hidden": 64, "batch": 4,
        "length": 16, "precision": "bf16",
    }  # fmt: skip


def test_every_round_has_all_settings_in_an_order_of_its_own() -> None:
    settings = [StudySetting(f"s{n}", ()) for n in range(6)]
    runs = runs_of([Planned(setting, 3) for setting in settings])
    ordered = in_order(runs, 1)
    rounds = [ordered[n : n + 6] for n in (0, 6, 12)]
    assert [{run.number for run in each} for each in rounds] == [{1}, {2}, {3}]
    orders = [[run.setting.name for run in each] for each in rounds]
    assert all(sorted(order) == [setting.name for setting in settings] for order in orders)
    assert orders[0] != orders[1]
    assert in_order(runs, 1) == ordered
    assert in_order(runs, 2) != ordered


def test_time_left_is_that_of_the_setting_else_of_all() -> None:
    a, b = StudySetting("a", ()), StudySetting("b", ())
    took_s = {"a-1": 10.0, "a-2": 20.0, "c-1": 60.0}
    assert expected_s([StudyRun(a, 3)], took_s) == 15
    assert expected_s([StudyRun(a, 3), StudyRun(b, 1)], took_s) == 15 + 30
    assert expected_s([], {}) == 0
    assert expected_s([StudyRun(a, 1)], {}) is None


class Recorder:
    """In place of the process that records: leaves a recording made by hand, or fails."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.fails: Callable[[str], int] = lambda name: 0
        self.traces = True
        self.host: dict[str, object] = {}

    def record(self, job: RunRequest, recording: Path, log: Path, stop: Stop) -> RunResult:
        self.ran.append(recording.name)
        log.write_text("data: made by hand\nlast words\n")
        assert (job.trace_steps, job.trace_skip) == (4, 3)
        ten_and_three(recording, command=[sys.executable, *job.words], host=self.host)
        traced = [*recording.glob("events*"), *recording.glob("windows*")]
        for path in [] if self.traces else traced:
            path.unlink()
        return RunResult(self.fails(recording.name))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder()
    monkeypatch.setattr(runner, "record", made.record)
    monkeypatch.setattr(runner, "LEAST_PROCESSORS", 1 << 20)  # test_study_beside.py is of machines with many
    monkeypatch.chdir(tmp_path)
    return made


TINY = ("--size", "tiny", "--runs", "2", "-o", "out")


def test_what_is_there_is_not_run_again(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "bert", "--stage", "pretrain", *TINY, "--seed", "5"]) == 0
    pretrain = "bert-pretrain-torch-L2-H32-fp32"
    assert sorted(recorder.ran) == [f"{pretrain}-1", f"{pretrain}-2"]
    assert main(["study", "variants", *TINY]) == 0
    assert sorted(recorder.ran[2:]) == [f"bert-pretrain-torch-L1-H32-fp32-{n}" for n in (1, 2)]
    assert main(["study", "variants", *TINY]) == 0
    assert len(recorder.ran) == 4
    out = Path("out")
    results = load_results(out)
    assert [result.name for result in results] == sorted(recorder.ran)
    assert {result.data for result in results} == {"made by hand"}
    assert all((result.cost["account_s"] or 0) > 0 for result in results)
    # Three traced steps of 10 ms at 100 W, as long as the untraced ones.
    assert {round(result.step.devices["gpu:0"].total_j, 9) for result in results} == {1.0}
    # The first of each setting keeps its events.
    with_events = {path.parent.name for path in out.glob("runs/*/events*.arrows")}
    assert with_events == {f"{pretrain}-1", "bert-pretrain-torch-L1-H32-fp32-1"}
    assert {path.name for path in (out / "runs").iterdir()} == set(recorder.ran)
    assert all((out / "runs" / name / "power.arrows").is_file() for name in recorder.ran)
    assert main(["study", "variants", *TINY, "--keep", "none"]) == 0
    assert not list(out.glob("runs/*/events*.arrows"))
    assert {path.stem for path in out.glob("sketches/*.json")} == with_events
    made = json.loads((out / "study.json").read_text())
    assert made["seed"] == 5
    bert = ["smaragdine", "study", "bert", "--stage", "pretrain", *TINY, "--seed", "5"]
    variants = ["smaragdine", "study", "variants", *TINY]
    commands = [entry["command"] for entry in made["commands"]]
    assert commands == [bert, variants, variants, [*variants, "--keep", "none"]]
    assert {entry["seed"] for entry in made["commands"]} == {5}
    assert set(made["took_s"]) == set(recorder.ran)
    capsys.readouterr()


@pytest.mark.parametrize(("here", "said"), [("GPU-a", False), ("GPU-b", True)])
def test_another_card_of_the_same_kind_is_said(
    recorder: Recorder,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    here: str,
    said: bool,
) -> None:
    recorder.host = {"cpu": "a CPU", "gpus": [{"device": "gpu:0", "name": "a GPU", "uuid": "GPU-a"}]}
    machine = {"gpus": ["a GPU"], "cards": [here], "cpu": "a CPU", "kernel": "a kernel", "memory_bytes": 1}
    monkeypatch.setattr(cli_study, "machine_here", lambda: machine)
    assert main(["study", "bert", "--stage", "pretrain", *TINY]) == 0
    assert "beware" not in capsys.readouterr().err
    assert main(["study", "variants", *TINY]) == 0
    assert ("beware: out has runs of another such card" in capsys.readouterr().err) is said


def test_a_dry_run_says_what_is_left_and_changes_nothing(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["study", "albert", *TINY, "--dry-run"]
    assert main(words) == 0
    assert "4 of 4 runs are left; time: unknown until the first run has ended" in capsys.readouterr().out
    assert not Path("out").exists()
    assert main(["study", "bert", "--stage", "pretrain", *TINY]) == 0
    study = Study(Path("out"), [], {})
    for number in (1, 2):
        study.took(StudyRun(StudySetting("bert-pretrain-torch-L2-H32-fp32", ()), number), 7.5)
    study.close()
    before = sorted(str(path) for path in Path("out").rglob("*"))
    capsys.readouterr()
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "2 of 4 runs are left; time: about 15.0 s" in said
    assert "albert-pretrain-torch-L2-H32-fp32" in said
    assert "bert-pretrain-torch-L2-H32-fp32 " not in said.replace("albert-", "ALBERT-")
    assert sorted(str(path) for path in Path("out").rglob("*")) == before
    assert len(recorder.ran) == 2


def test_killed_between_runs_and_between_recording_and_result(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Killed(BaseException):
        pass

    whole = runner.result_of

    def killed(run: StudyRun, *more: Any) -> Any:
        if len(recorder.ran) == 2:
            raise Killed
        return whole(run, *more)

    words = ["study", "bert", *TINY]
    monkeypatch.setattr(runner, "result_of", killed)
    with pytest.raises(Killed):
        main(words)
    monkeypatch.setattr(runner, "result_of", whole)
    # A third was cut off while it was recorded.
    half = Path("out/unfinished") / f"bert-predict-torch-L2-H32-fp32-{2}"
    half.mkdir(exist_ok=True)
    (half / "run.json").write_text("{}")
    assert len(load_results(Path("out"))) == 1
    assert main(words) == 0
    # Six runs, each recorded once: the recording that lacked its result was used.
    assert sorted(recorder.ran) == sorted(
        f"bert-{stage}-torch-L2-H32-fp32-{n}" for stage in ("pretrain", "finetune", "predict") for n in (1, 2)
    )
    assert [result.name for result in load_results(Path("out"))] == sorted(recorder.ran)
    assert not list(Path("out/unfinished").iterdir())
    capsys.readouterr()


def test_what_fails_is_said_the_others_go_on_and_it_is_retried(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder.fails = lambda name: 3 * name.startswith("bert-finetune")
    words = ["study", "bert", "--size", "tiny", "--runs", "4", "-o", "out"]
    assert main(words) == 1
    said = capsys.readouterr().err
    name = "bert-finetune-torch-L2-H32-fp32"
    assert f"{name}-1: exit code 3: last words (see out/logs/{name}-1.log)" in said
    assert "4 of 12 runs have no result" in said
    # After two failures in a row a setting is left alone.
    assert [each for each in recorder.ran if each.startswith(name)] == [f"{name}-1", f"{name}-2"]
    assert len(load_results(Path("out"))) == 8
    recorder.fails = lambda name: 0
    assert main(words) == 0
    assert len(load_results(Path("out"))) == 12
    assert recorder.ran.count(f"{name}-1") == 2
    assert len(recorder.ran) == 8 + 2 + 4
    capsys.readouterr()


def test_a_recording_without_steps_fails(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    recorder.traces = False
    words = ["study", "bert", "--stage", "predict", "--size", "tiny", "-o", "out"]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert "bert-predict-torch-L2-H32-fp32-1: no footprint of a step: " in said
    assert "See smaragdine report out/unfinished/bert-predict-torch-L2-H32-fp32-1\n" in said
    assert Path("out/unfinished/bert-predict-torch-L2-H32-fp32-1").is_dir()
    assert not list(Path("out/runs").iterdir())
    recorder.traces = True
    assert main(words) == 0
    capsys.readouterr()


@pytest.mark.parametrize("suffix", ["json", "parquet"])
def test_a_result_cut_off_is_said_and_once_removed_made_anew(
    suffix: str, recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["study", "bert", "--stage", "predict", *TINY]
    assert main(words) == 0
    name = "bert-predict-torch-L2-H32-fp32-2"  # its events are gone
    result = Path("out/results", f"{name}.json")
    cut = result.with_suffix(f".{suffix}")
    cut.write_bytes(cut.read_bytes()[:100])
    for again in (words, ["study", "figures", "out"]):
        capsys.readouterr()
        assert main(again) == 2
        said = capsys.readouterr().err
        assert f"{result} is no result of a study: " in said
        assert said.endswith(". Remove it, and run the study again\n")
        assert said.count("\n") == 1
    result.unlink()
    assert main(words) == 0
    assert [name for name in recorder.ran if name.endswith("-2")] == [name, name]
    assert len(load_results(Path("out"))) == 2
    capsys.readouterr()


def test_a_folder_that_cannot_be_written_is_one_line(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_only(folder: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder / ".lock"))

    monkeypatch.setattr(study_folder, "locked", read_only)
    assert main(["study", "bert", *TINY]) == 2
    said = capsys.readouterr().err
    assert said == "smaragdine: out cannot be written: Read-only file system. Name another folder\n"


def test_a_dry_run_names_the_overhead_that_is_left(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", "precision", *TINY, "--dry-run"]) == 0
    assert "; then sampling's overhead, one or two minutes\n" in capsys.readouterr().out
    assert main(["study", "bert", "--stage", "predict", *TINY, "--dry-run"]) == 0
    assert "overhead" not in capsys.readouterr().out
    assert main(["study", "bert", "--stage", "predict", *TINY, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "runs": 2,
        "left": [f"bert-predict-torch-L2-H32-fp32-{n}" for n in (1, 2)],
        "expected_s": None,
        "overhead_left": False,
    }


def test_other_words_for_the_same_name_are_refused(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["study", "bert", "--stage", "predict", "--size", "tiny", "-o", "out"]
    assert main(words) == 0
    capsys.readouterr()
    assert main([*words, "--seconds", "9"]) == 2
    said = capsys.readouterr().err
    assert "ran with --seconds 1, and you ask for --seconds 9. Name another folder with -o DIR" in said
    assert len(recorder.ran) == 1
    # Where the study lies, and which interpreter ran it, is no difference.
    shutil.move("out", "elsewhere")
    assert main([*words[:-1], "elsewhere"]) == 0
    assert len(recorder.ran) == 1
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bart"], "unknown study bart. There are: bert, variants, albert, precision, all, custom, figures"),
        (["bert", "--stage", "pretrian"], "unknown stage pretrian. There are: pretrain, finetune, predict"),
        (["bert", "--framework", "mxnet"], "unknown framework mxnet. There are: torch, keras-tensorflow"),
        (["bert", "--precision", "fp8"], "unknown precision fp8. There are: fp32, tf32, bf16"),
        (["albert", "--framework", "tf1"], "tf1 has no ALBERT"),
        (["bert", "--layers", "0"], "not a whole number from 1"),
        (["bert", "--data", "nowhere"], "--data nowhere is no folder"),
        (["bert", "--data", "full"], "--data full has no data: there is no .txt and no .tsv file in it"),
        (["bert", "-o", "full"], "full holds something else: it has no study.json. Name another folder"),
        (["bert", "-o", "full/file"], "full/file is a file"),
        (["custom", "full/train.py", "--vary", "layers"], "'layers' is not NAME=VALUE,…"),
        (["custom", "full/train.py", "--vary", "layers="], "'layers=' is not NAME=VALUE,…"),
        (["custom", "full/train.py", "--vary", "x=1,1"], "two settings would be named train-x_1"),
        (["custom", "none.py", "--vary", "x=1"], "none.py does not exist"),
        (["custom", "--vary", "x=1"], "no program to run. Example: smaragdine study custom train.py"),
        (["figures", "full"], "full holds something else: it has no study.json. Name another folder\n"),
        (
            ["figures", "none"],
            "none has no results: nothing has been run. Run: smaragdine study bert",
        ),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("full").mkdir()
    for name in ("file", "train.py"):
        Path("full", name).write_text("")
    assert main(["study", *words]) == (127 if "none.py" in words else 2)
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not recorder.ran
    assert not Path("study").exists()
    assert sorted(path.name for path in Path("full").iterdir()) == ["file", "train.py"]


def test_a_missing_package_is_said_before_anything_runs(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from smaragdine.study import plan

    monkeypatch.setitem(plan._PROGRAMS, "torch", ("torch_bert.py", ("numpy", "no_such_a", "no_such_b")))
    assert main(["study", "bert", *TINY]) == 2
    err = capsys.readouterr().err
    assert "the study in torch cannot run: no_such_a and no_such_b are not installed for" in err
    assert "-m pip install no_such_a no_such_b" in err
    assert not Path("out").exists()


def test_custom_words(tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", "")
    vary = {"layers": [2, 4], "rate": ["1e-3"]}
    words = [str(script), "--epochs", "1", "--lr={rate}", "{other}"]
    found = custom_settings(words, vary, 7, 3)
    assert [setting.name for setting in found] == ["train-layers_2-rate_1e-3", "train-layers_4-rate_1e-3"]
    assert found[1].words == (str(script), "--epochs", "1", "--lr=1e-3", "{other}", "--layers", "4")
    written = hashlib.sha256(Path(script).read_bytes()).hexdigest()[:16]
    assert found[1].facts == {"program": "train", "script": written, "--layers": 4, "--rate": "1e-3"}
    assert (found[0].trace_steps, found[0].trace_skip) == (7, 3)
    (alone,) = custom_settings(["-m", "package.train"], {}, 7, 3)
    assert (alone.name, alone.words) == ("train", ("-m", "package.train"))


def test_custom_compares_settings(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs by hand: power is 100 W, and 200 W in the second setting, where a step takes twice the energy."""

    def record(job: RunRequest, recording: Path, log: Path, stop: Stop) -> RunResult:
        watts = 100.0 * int(job.words[-1])
        ten_and_three(recording, power_w=((400.0, watts),), command=[sys.executable, *job.words])
        return RunResult()

    monkeypatch.setattr(runner, "record", record)
    Path("train.py").write_text("")
    assert main(["study", "custom", "train.py", "--vary", "x=1,2", "--runs", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [own["name"] for own in found["settings"]] == ["train-x_1", "train-x_2"]
    assert [own["runs"] for own in found["settings"]] == [2, 2]
    assert [own["energy_j"] for own in found["settings"]] == pytest.approx([1.0, 2.0])
    assert [own["energy_std_j"] for own in found["settings"]] == pytest.approx([0.0, 0.0], abs=1e-12)
    assert [own["step_s"] for own in found["settings"]] == pytest.approx([0.01, 0.01])
    assert found["similarity"]["energy"] == [[pytest.approx(1.0)] * 2] * 2
    # 4 and 2 ms of work a step: 0.4 and 0.2 J against 0.8 and 0.4 J.
    assert found["difference_j"][0][1] == pytest.approx(-0.3)
    assert found["difference_j"][1][0] == pytest.approx(0.3)
    assert found["difference_w"][0][1] == pytest.approx(-100.0)
    assert main(["study", "custom", "train.py", "--vary", "x=1,2", "--runs", "2"]) == 0
    said = capsys.readouterr().out
    assert "train-x_2" in said
    assert "similarity of a step" in said
    assert not customs_of([], "train").settings
    assert main(["study", "custom", "train.py", "--vary", "x=10", "--runs", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [own["name"] for own in found["settings"]] == ["train-x_1", "train-x_2", "train-x_10"]
    scores = [{"every": 1, "energy": 1.0}, {"every": 2, "energy": None}]  # too few readings to leave any out
    few = [
        dataclasses.replace(each, asss={"cpu:0": scores, "gpu:0": scores})
        for each in load_results(Path("study"))
    ]
    assert [own.asss for own in customs_of(few, "train").settings] == [None] * 3
    Path("train.py").write_text("another = True\n")
    assert main(["study", "custom", "train.py", "--vary", "x=20"]) == 2
    said = capsys.readouterr().err
    assert "study has runs of another program: train.py is not what it was when train-x_1-1 ran" in said


def test_what_varies_may_have_any_name(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The study's own words among them."""

    def record(job: RunRequest, recording: Path, log: Path, stop: Stop) -> RunResult:
        ten_and_three(recording, command=[sys.executable, *job.words])
        return RunResult()

    monkeypatch.setattr(runner, "record", record)
    Path("train.py").write_text("")
    for name in ("program", "script", "scale", "framework"):
        assert main(["study", "custom", "train.py", "--vary", f"{name}=1,2", "--runs", "2", "-o", name]) == 0
        assert len(json.loads((Path(name) / "study.json").read_text())["took_s"]) == 4
        found = materials(Path(name), load_results(Path(name)))
        assert [list(kind.variants()) for kind in found] == [[f"{name} 1", f"{name} 2"]]
        assert not scaling_of(load_results(Path(name)))
        assert main(["study", "figures", name]) == 0
    assert main(["study", "custom", "train.py", "--vary", "x=1", "--vary", "x=2"]) == 2
    assert "--vary x is there twice" in capsys.readouterr().err


def test_ctrl_c_ends_cleanly_and_one_command_at_a_time(tmp_path: Path) -> None:
    script = write_script(
        tmp_path / "train.py",
        """
        import os, time
        from pathlib import Path
        Path("pid").write_text(f"{os.getpid()} ")
        time.sleep(300)
        """,
    )
    words = ["study", "custom", script.name, "--vary", "x=1,2", "--runs", "1", "-o", "out"]
    process = start(*words, cwd=tmp_path)
    pid = tmp_path / "pid"
    assert wait_for(lambda: pid.exists() or process.poll() is not None)
    assert wait_for(lambda: pid.read_text().endswith(" "))
    other = smaragdine(*words, cwd=tmp_path)
    assert other.returncode == 2
    assert "out is at work already" in other.stderr
    os.kill(process.pid, signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130, err
    assert "stopped. The same command again goes on in out" in err
    assert "Traceback" not in err
    assert wait_for(lambda: not alive(int(pid.read_text())))
    assert not list((tmp_path / "out" / "runs").iterdir())
    assert read_made(tmp_path / "out") is not None


def test_every_command_for_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the smallest size, in one folder: later commands use what earlier ones ran."""
    out, bert = tmp_path / "out", "bert-{}-torch-L{}-H32-fp32"

    def study(*words: str) -> str:
        # Threads that wait for each other take long on a machine that has more to do.
        done = smaragdine("study", *words, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        return done.stdout

    def results() -> set[str]:
        return {path.stem for path in (out / "results").glob("*.json")}

    size = ("--size", "tiny", "-o", "out")
    known = {f"{bert.format(stage, 2)}-1" for stage in ("pretrain", "predict")}
    found = json.loads(study("bert", "--stage", "pretrain,predict", *size, "--json"))
    assert {each["study"] for each in found} == {"bert"}
    assert results() == known
    study("variants", *size)
    known |= {f"{bert.format('pretrain', 1)}-1"}
    assert results() == known
    study("albert", *size)
    known |= {"albert-pretrain-torch-L2-H32-fp32-1"}
    assert results() == known
    study("precision", *size)
    base = bert.format("pretrain", 2)
    known |= {f"{base}-2", f"{base}-layers1-1"}
    assert results() == known
    assert (out / "overhead.json").is_file()
    assert "1 of 7 runs are left" in study("all", *size, "--dry-run")  # fine-tuning
    for result in load_results(out):
        assert result.traced_steps == 4
        assert result.step_s is not None
        assert result.step_s > 0
        assert result.data.startswith("generated")
        phases = set(result.step.rows["phase"].to_pylist())
        trains = result.facts["stage"] != "predict"
        assert ("backward" in phases) == trains
    script = write_script(
        tmp_path / "own.py",
        """
        import sys
        import torch

        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(int(sys.argv[2]))))
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(30):
            model(torch.ones(4, 16)).sum().backward()
            optimizer.step()
        """,
    )
    own = ("--vary", "layers=1,2", "--runs", "1", "--trace-steps", "4", "--trace-skip", "3", "-o", "out")
    # As on a machine of many processors.
    monkeypatch.setattr(runner, "LEAST_PROCESSORS", 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    assert main(["study", "custom", script.name, *own, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in said["settings"]] == ["own-layers_1", "own-layers_2"]
    for result in load_results(out):
        assert result.traced_steps == 4
        assert (result.cost["assemble_s"] or 0) > 0
        assert (result.cost["events"] or 0) > 0
    assert not list(out.glob("runs/*/traces"))
    found = json.loads(study("figures", "out", "--json"))
    assert {each["study"] for each in found} == {"bert", "variants", "albert", "precision"}
    assert (out / "findings.html").is_file()
    for folder, suffix in (("figures", "pdf"), ("figures", "png"), ("tables", "csv")):
        assert list((out / folder).glob(f"*.{suffix}"))


def test_a_program_that_does_not_end_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "stays.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    # On a busy machine it may take longer than that until it says something: then it has more time.
    for timeout_s in (1, 8, 64, 512):
        words = ["study", "custom", str(tmp_path / "stays.py"), "--runs", "1", "--timeout", str(timeout_s)]
        out = tmp_path / f"out-{timeout_s}"
        assert main([*words, "-o", str(out)]) == 1
        said = capsys.readouterr()
        assert "ended, for it took too long" in said.out + said.err
        assert "1 of 1 runs have no result" in said.err
        assert not list((out / "results").glob("*.json"))
        if "ended, for it took too long: here" in said.out + said.err:
            return
    pytest.fail("its last words are not told")
