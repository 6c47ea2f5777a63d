"""`smaragdine allocate`: the published tables, what is printed and drawn, and one line for every mistake."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cli import smaragdine
from refusal import refused
from smaragdine.cli.allocate import main
from smaragdine.hetero.shards import read_allocation

DATA = os.environ.get("SMARAGDINE_DATA")
published = pytest.mark.skipif(
    not DATA, reason="SMARAGDINE_DATA is not set: the published tables are not here"
)


def hetero() -> list[str]:
    folder = Path(DATA or "") / "hetero"
    return ["--gpu", f"a10={folder}/cifar_a10.json", "--gpu", f"t4={folder}/cifar_t4.json"]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    assert main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def chosen(method: dict[str, Any]) -> list[tuple[str, int, float]]:
    return [(each["gpu"], each["batch"], each["power_limit_w"]) for each in method["allocation"]]


@published
def test_the_original_figures(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--global-batch", "4096", "--eta", "0.5", "--objective", "sum", "--model", "quadratic"]
    found, err = printed(capsys, *hetero(), *words)
    assert list(found) == ["methods"]
    methods = {each["method"]: each for each in found["methods"]}
    assert list(methods) == ["baseline", "heuristic", "brute-force", "optimal"]
    for name, each in methods.items():
        assert set(each) == {"method", "objective", "cost", "seconds", "allocation"}
        assert each["objective"] == "sum"
        even = name == "baseline"
        assert round(each["cost"], 4) == (645.6322 if even else 576.3956)
        assert chosen(each) == (
            [("a10", 2048, 100), ("t4", 2048, 60)] if even else [("a10", 1874, 100), ("t4", 2222, 60)]
        )
    # Nothing of this was measured, and it is said.
    a10, t4 = (line for line in err.splitlines() if "outside what was profiled, 32–1024" in line)
    assert "a10: batch 2048 (baseline) and 1874 (heuristic, brute-force, optimal)" in a10
    assert "t4: batch 2048 (baseline) and 2222 (heuristic, brute-force, optimal)" in t4
    assert err.count("is not possible") == 2


@published
def test_monotone_on_the_published_tables(capsys: pytest.CaptureFixture[str]) -> None:
    found, err = printed(capsys, *hetero(), "--global-batch", "4096")
    costs = {each["method"]: each["cost"] for each in found["methods"]}
    assert costs["optimal"] == pytest.approx(costs["brute-force"], rel=1e-12)
    assert costs["optimal"] < min(costs["baseline"], costs["heuristic"])
    assert "is not possible" not in err
    assert "outside what was profiled" in err
    inside, err = printed(capsys, *hetero(), "--global-batch", "1024", "--max-batch", "a10=900")
    assert "outside" not in err
    assert all(32 <= batch <= 1024 for _, batch, _ in chosen(inside["methods"][-1]))
    assert chosen(inside["methods"][-1])[0][1] <= 900


@published
def test_strongest(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--global-batch", "2048", "--method", "heuristic"]
    for strongest, gpu, lowest_w in ((["--strongest", "t4"], "t4", 60), ([], "a10", 100)):
        found, _ = printed(capsys, *hetero(), *words, *strongest)
        (only,) = found["methods"]
        assert {name: limit for name, _, limit in chosen(only)}[gpu] == lowest_w


@pytest.fixture
def profiles(tmp_path: Path) -> list[str]:
    """Two GPUs, three batch sizes, two limits."""
    words: list[str] = []
    for name, speed in (("big", 100.0), ("small", 40.0)):
        values = {
            str(batch): [
                {
                    "power_limit": w,
                    "time": (4 + batch) / speed / w**0.5,
                    "energy": (4 + batch) / speed * w**0.4,
                }
                for w in (100.0, 150.0)
            ]
            for batch in (8, 16, 32)
        }
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(values))
        words += ["--gpu", f"{name}={file}"]
    return words


def test_table(profiles: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    waits = ["--wait-power", "big=20", "--wait-power", "small=10"]
    more = ["--objective", "sync", "--pareto", "--all-reduce", "0.01", "--leave-out"]
    assert main([*profiles, "--global-batch", "60", *waits, *more]) == 0
    out, _ = capsys.readouterr()
    for word in (
        "60 samples a step, monotone model",
        "baseline",
        "heuristic",
        "brute-force",
        "optimal",
        "best for η",
    ):
        assert word in out
    assert "! small: batch" in out or "! big: batch" in out


def test_a_slowdown_is_kept(profiles: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    waits = [
        "--wait-power",
        "big=20",
        "--wait-power",
        "small=10",
        "--global-batch",
        "60",
        "--method",
        "optimal",
    ]

    def cost(*words: str) -> float:
        return printed(capsys, *profiles, *waits, *words)[0]["methods"][0]["cost"]

    free, tight = cost("--objective", "energy"), cost("--objective", "energy", "--slowdown", "1%")
    loose = cost("--objective", "energy", "--slowdown", "1000%")
    assert free == loose <= tight


def test_an_allocation_is_chosen_among_the_fast_enough(
    profiles: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = ["--wait-power", "big=20", "--wait-power", "small=10", "--global-batch", "60"]
    words = [*profiles, *waits, "--objective", "energy", "--slowdown", "1%"]
    found = printed(capsys, *words)[0]
    by_name = {each["method"]: each for each in found["methods"]}
    assert by_name["baseline"]["too_slow"]
    assert "too_slow" not in by_name["optimal"]
    by_name["baseline"]["cost"] = 0.0
    (tmp_path / "allocation.json").write_text(json.dumps(found))
    taken = read_allocation(tmp_path / "allocation.json")
    assert list(taken.batches) == [row["batch"] for row in by_name["optimal"]["allocation"]]
    main(words)
    assert "baseline: longer steps than asked for" in capsys.readouterr().out


def test_too_many_for_brute_force(profiles: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    four = [*profiles, *(word.replace("=", "2=", 1) if "=" in word else word for word in profiles)]
    assert main([*four, "--global-batch", "2000"]) == 0
    out, _ = capsys.readouterr()
    assert "no brute-force: " in out
    refused(
        lambda: main([*four, "--global-batch", "2000", "--method", "brute-force"]), "too many allocations"
    )


def test_a_stated_gap(profiles: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("smaragdine.allocate.optimal.EXACT_GPUS", 1)
    monkeypatch.setattr("smaragdine.allocate.optimal.MOST_WORK", 1)
    words = [*profiles, "--global-batch", "60", "--wait-power", "big=20", "--wait-power", "small=10"]
    words += ["--objective", "sync", "--method", "optimal"]
    found, _ = printed(capsys, *words)
    (only,) = found["methods"]
    assert only["lower_bound"] < only["cost"]
    assert main(words) == 0
    assert "optimal: not known to be the best" in capsys.readouterr().out


def test_figures(profiles: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'smaragdine[figures]'")
    waits = ["--wait-power", "big=20", "--wait-power", "small=10", "--objective", "sync", "--pareto"]
    folder = tmp_path / "figures"
    assert main([*profiles, "--global-batch", "60", *waits, "--plot", str(folder)]) == 0
    names = {"allocate", "allocate_models", "allocate_split"}
    captions = (folder / "captions.md").read_text()
    files = [file for file in folder.iterdir() if file.name != "captions.md"]
    drawn = {file.stem for file in files}
    assert names <= drawn <= {*names, "allocate_pareto"}
    assert {file.suffix for file in files} == {".pdf", ".svg", ".png"}
    assert {line.split("**")[1] for line in captions.splitlines() if line} == drawn
    assert "Allocations by method. baseline: big 30 at" in (folder / "allocate.svg").read_text()
    assert capsys.readouterr().err.count(str(folder)) == len(files) + 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--global-batch", "0"], ["whole number from 1"]),
        (["--global-batch", "9" * 23], ["above 999999999, the most there can be"]),
        (["--global-batch", "1"], ["no split can hold", "2 GPUs need one each"]),
        (["--global-batch", "60", "--max-batch", "big=20", "--max-batch", "small=20"], ["hold 40 in all"]),
        (["--global-batch", "60", "--max-batch", "other=20"], ["no GPU named other", "big, small"]),
        (["--global-batch", "60", "--max-batch", "big"], ["NAME=VALUE"]),
        (["--global-batch", "60", "--max-batch", "big=x"], ["'x' is not a whole number"]),
        (["--global-batch", "60", "--max-batch", "big=5", "--max-batch", "big=6"], ["big is given twice"]),
        (["--global-batch", "60", "--wait-power", "big=-1"], ["power above 0"]),
        (["--global-batch", "60", "--strongest", "other"], ["no GPU named other"]),
        (["--global-batch", "60", "--eta", "1.5"], ["number from 0 to 1"]),
        (["--global-batch", "60", "--eta", "nan"], ["number from 0 to 1"]),
        (
            ["--global-batch", "60", "--eta", "0.5", "--objective", "time"],
            ["--eta weighs energy", "sum or sync"],
        ),
        (["--global-batch", "60", "--all-reduce", "-1"], ["seconds from 0"]),
        (
            ["--global-batch", "60", "--objective", "sync"],
            ["wait power of big is not known", "--wait-power big=W"],
        ),
        (["--global-batch", "60", "--slowdown", "10%"], ["--objective energy"]),
        (["--global-batch", "60", "--objective", "time", "--pareto"], ["no η"]),
        (["--global-batch", "60", "--method", "luck"], ["no method named luck"]),
        (["--global-batch", "60", "--model", "cubic"], ["invalid choice"]),
        ([], ["--global-batch"]),
    ],
)
def test_bad_options(profiles: list[str], words: list[str], said: list[str]) -> None:
    refused(lambda: main([*profiles, *words]), *said)


def test_bad_gpus(profiles: list[str]) -> None:
    refused(lambda: main(["--global-batch", "9"]), "no GPU to allocate to")
    refused(lambda: main([*profiles, *profiles[:2], "--global-batch", "9"]), "GPU big is given twice")
    refused(lambda: main(["--gpu", "big", "--global-batch", "9"]), "not NAME=VALUE")
    refused(lambda: main(["--gpu", "big=/nowhere", "--global-batch", "9"]), "/nowhere cannot be read")


def test_the_verb(profiles: list[str]) -> None:
    done = smaragdine("allocate", *profiles, "--global-batch", "48", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["methods"]) == 4
    bad = smaragdine("allocate", *profiles, "--global-batch", "1")
    assert bad.returncode == 2
    assert bad.stderr.startswith("smaragdine: no split")
    assert bad.stderr.count("\n") == 1
