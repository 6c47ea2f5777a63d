"""A study in two tables: `experiments/study/pack.py`."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from made_study import Study, results
from smaragdine.accounting.repeats import LayerTimes, Repeated
from smaragdine.recording.format import EDGES
from smaragdine.study.results import Sketch, load_results, load_sketch, save_result, save_sketch

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs/measurements/2026-11-16-h200-study"


def pack(*words: object) -> str:
    """What it says on stderr."""
    command = [sys.executable, ROOT / "experiments/study/pack.py", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (not done.stderr), done.stderr
    return done.stderr


def assert_same(a: Path, b: Path) -> None:
    files = sorted(path.relative_to(a) for path in a.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(b) for path in b.rglob("*") if path.is_file())
    for file in files:
        if file.suffix == ".parquet":
            one, other = pq.read_table(a / file), pq.read_table(b / file)
            assert one.schema.equals(other.schema, check_metadata=True)
            assert repr(one.to_pylist()) == repr(other.to_pylist())  # nan equals nan, to the last digit
        else:
            assert (a / file).read_bytes() == (b / file).read_bytes()


def test_a_study_comes_back_as_it_was(tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    made = results(Study(runs=2), "bert")
    for result in made:
        save_result(out, result)
    power = Repeated(
        "steps", 3, np.array([0.0, 0.1, 0.2]), np.array([100.0, np.nan]), np.array([1.0, np.nan])
    )
    edges = pa.Table.from_pylist([{"source": "a", "target": "b"}], schema=EDGES)
    first = made[0]
    ran = LayerTimes("layer_*", [[(0.0, 0.1)]])
    save_sketch(out, Sketch(first.name, "gpu:0", edges, power, ran, first.step, made[1].step))
    (out / "study.json").write_text("{}")
    (out / "notes.md").write_text("## µ\n")
    assert pack(out, tmp_path / "kept") == pack("--back", tmp_path / "kept", again) == ""
    assert_same(out, again)
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
        "footprints.parquet",
        "notes.md",
        "runs.parquet",
        "study.json",
    ]
    assert "name a new folder" in pack("--back", tmp_path / "kept", again)
    assert "has no results" in pack(tmp_path, tmp_path / "other")


def test_the_study_that_is_kept_here_can_be_drawn_again(tmp_path: Path) -> None:
    for part, runs, sketches in (("", 74, 29), ("again", 27, 0), ("more-steps", 2, 0)):
        out = tmp_path / f"out-{part}"
        assert pack("--back", KEPT / part, out) == ""
        found = load_results(out)
        assert len(found) == runs
        assert sum(load_sketch(out, result.name) is not None for result in found) == sketches
    assert pack(out, tmp_path / "kept") == ""
    assert_same(tmp_path / "kept", KEPT / "more-steps")
