"""A study in a few files, to keep or to publish, and back into the folder that `smaragdine study` works in.

    python experiments/study/pack.py OUT KEPT             # OUT has a few files for every run, KEPT two tables
    python experiments/study/pack.py --back KEPT OUT      # then: smaragdine study figures OUT

    KEPT/runs.parquet           a row for each run: what OUT/results and OUT/sketches say of it, as JSON
         footprints.parquet     a row for each run, footprint and name: energy in joules, time in seconds
         study.json, overhead.json, notes.md     as they are in OUT

A run has the footprint of a step; the first run of a setting also has those of a traced step by all readings
and by every second one. No figure is rounded: what is unpacked equals what was packed, to the last digit.
Recordings, logs, figures and tables are not kept; `study figures` draws the last two again.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

RUNS, FOOTPRINTS = "runs.parquet", "footprints.parquet"
COPIED = ("study.json", "overhead.json", "notes.md")
RESULTS, SKETCHES = "results", "sketches"
META = b"smaragdine.footprint"  # the totals of a footprint, beside its rows
# footprint → where it is in the folder of a study
PLACES = {"step": (RESULTS, ""), "all": (SKETCHES, "-all"), "half": (SKETCHES, "-half")}


def pack(study: Path, kept: Path) -> None:
    """Write the tables of a study. Only runs that are whole are taken: their JSON file is written last."""
    names = sorted(path.stem for path in (study / RESULTS).glob("*.json"))
    if not names:
        raise SystemExit(f"{study} has no results")
    runs: list[dict[str, Any]] = []
    footprints: list[pa.Table] = []
    for name in names:
        run: dict[str, Any] = {"run": name}
        for column, folder in (("result", RESULTS), ("sketch", SKETCHES)):
            path = study / folder / f"{name}.json"
            run[column] = path.read_text(encoding="utf-8") if path.is_file() else None
        for footprint, (folder, suffix) in PLACES.items():
            path = study / folder / f"{name}{suffix}.parquet"
            if not path.is_file():
                continue
            rows = pq.read_table(path)
            run[f"totals_{footprint}"] = rows.schema.metadata[META].decode()
            rows = rows.replace_schema_metadata(None)
            for column, value in (("footprint", footprint), ("run", name)):
                rows = rows.add_column(0, column, pa.array([value] * rows.num_rows, pa.string()))
            footprints.append(rows)
        runs.append(run)
    kept.mkdir(parents=True, exist_ok=True)
    columns = ("run", "result", "sketch", *(f"totals_{footprint}" for footprint in PLACES))
    schema = pa.schema([(column, pa.string()) for column in columns])
    _write(pa.Table.from_pylist(runs, schema=schema), kept / RUNS)
    _write(pa.concat_tables(footprints), kept / FOOTPRINTS)
    _copy(study, kept)


def unpack(kept: Path, study: Path) -> None:
    """Write the folder of a study, with the same files that were packed. It must be a new one."""
    if study.exists():
        raise SystemExit(f"{study} exists: name a new folder")
    runs = pq.read_table(kept / RUNS).to_pylist()
    rows = _by_footprint(pq.read_table(kept / FOOTPRINTS))
    for folder in (RESULTS, SKETCHES):
        (study / folder).mkdir(parents=True)
    for run in runs:
        name = run["run"]
        for footprint, (folder, suffix) in PLACES.items():
            totals = run[f"totals_{footprint}"]
            if totals is not None:
                table = rows[name, footprint].replace_schema_metadata({META: totals})
                _write(table, study / folder / f"{name}{suffix}.parquet")
        for column, folder in (("result", RESULTS), ("sketch", SKETCHES)):
            if run[column] is not None:
                (study / folder / f"{name}.json").write_text(run[column], encoding="utf-8")
    _copy(kept, study)


def _by_footprint(table: pa.Table) -> dict[tuple[str, str], pa.Table]:
    """The rows of each footprint. They lie together, in the order in which they were packed."""
    keys = list(zip(table["run"].to_pylist(), table["footprint"].to_pylist(), strict=True))
    starts = [n for n, key in enumerate(keys) if n == 0 or key != keys[n - 1]]
    rows = table.drop_columns(["run", "footprint"])
    ends = [*starts[1:], len(keys)]
    return {keys[start]: rows.slice(start, end - start) for start, end in zip(starts, ends, strict=True)}


def _copy(source: Path, target: Path) -> None:
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _write(table: pa.Table, path: Path) -> None:
    numbers = [field.name for field in table.schema if pa.types.is_floating(field.type)]
    # Digits of measured figures do not repeat, but their exponents do. Counts repeat as a whole.
    split = [name for name in numbers if name != "count"]
    others = [name for name in table.schema.names if name not in split]
    how: dict[str, Any] = {"use_dictionary": others, "use_byte_stream_split": split}
    pq.write_table(table, path, compression="zstd", compression_level=19, row_group_size=1 << 20, **how)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="FROM")
    parser.add_argument("target", type=Path, metavar="TO")
    parser.add_argument(
        "--back", action="store_true", help="FROM has tables, TO becomes the folder of a study"
    )
    asked = parser.parse_args()
    (unpack if asked.back else pack)(asked.source, asked.target)


if __name__ == "__main__":
    main()
