"""Draws docs/gallery from recordings that it makes itself: a BERT on a simulated GPU, from a fixed seed.

python docs/make_gallery.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from smaragdine.recording.format import MARKS, WINDOWS, channel_to_dict
from smaragdine.recording.marks import marks_table
from smaragdine.recording.reader import Recording, open_recording
from smaragdine.recording.writer import ReadingsWriter, TableWriter, write_edges, write_events, write_windows
from smaragdine.sensors.base import Channel

MS = 1_000_000
BEGIN_NS = 1_800_000_000_000_000_000
IDLE_W, HOST_W = 45.0, 38.0
PID = 4711

CHANNELS = (
    Channel("gpu:0", "power", "W", "sample", "measured", 20.0, "nvml", window_ms=20.0),
    Channel("gpu:0", "energy", "J", "counter", "measured", 2000.0, "nvml"),
    Channel("cpu:0", "energy", "J", "counter", "estimated", 100.0, "estimate"),
    Channel("gpu:0", "power_limit", "W", "level", "measured", 1000.0, "nvml"),
)


@dataclass(frozen=True)
class Setting:
    """A training or a prediction on one GPU."""

    layers: int = 12
    hidden: int = 768
    limit_w: float = 300.0
    epochs: int = 10
    steps: int = 6  # in an epoch
    backward: bool = True
    traced: int = 3  # steps of each epoch but the first, up to the sixth


@dataclass(frozen=True)
class Operation:
    name: str
    phase: str
    ms: float
    power_w: float


def operations(setting: Setting) -> Iterator[Operation]:
    """One step, kernel by kernel: matrix products are long and hot, the rest short and cool."""
    wide = setting.hidden / 768
    layer = (
        ("attention/self/query/MatMul", 0.5, 265),
        ("attention/self/key/MatMul", 0.5, 265),
        ("attention/self/value/MatMul", 0.5, 265),
        ("attention/self/scores/BatchMatMul", 0.5, 215),
        ("attention/self/Softmax", 0.25, 160),
        ("attention/output/dense/MatMul", 0.5, 265),
        ("attention/output/LayerNorm/Norm", 0.2, 140),
        ("intermediate/dense/MatMul", 1.6, 290),
        ("intermediate/Gelu", 0.2, 150),
        ("output/dense/MatMul", 1.5, 285),
        ("output/LayerNorm/Norm", 0.2, 140),
    )
    forward = [
        ("bert/embeddings/word_embeddings/Gather", 1.0, 120.0),
        ("bert/embeddings/position_embeddings/Gather", 0.4, 115.0),
        ("bert/embeddings/LayerNorm/Norm", 0.3, 140.0),
        *((f"bert/encoder/layer_{i}/{n}", t, p) for i in range(setting.layers) for n, t, p in layer),
        ("bert/pooler/dense/MatMul", 0.6, 240.0),
        ("classifier/dense/MatMul", 0.5, 230.0),
    ]
    for name, ms, power_w in forward:
        yield Operation(name, "forward", ms * (wide**2 if "MatMul" in name else wide), power_w * wide**0.2)
    if setting.backward:
        for name, ms, power_w in reversed(forward):
            longer = 2 * ms * (wide**2 if "MatMul" in name else wide)
            yield Operation(name, "backward", longer, 1.03 * power_w * wide**0.2)
        for name, ms, power_w in (("Mul", 2.0, 170.0), ("AddCdiv", 3.0, 190.0), ("Sqrt", 1.5, 165.0)):
            yield Operation(f"optimizer/AdamW/{name}", "optimizer", ms * wide**2, power_w)


def edges(setting: Setting) -> list[tuple[str, str]]:
    found = [
        ("bert/embeddings/word_embeddings/Gather", "bert/embeddings/LayerNorm/Norm"),
        ("bert/embeddings/position_embeddings/Gather", "bert/embeddings/LayerNorm/Norm"),
        ("bert/embeddings/LayerNorm/Norm", "bert/encoder/layer_0/attention/self/query/MatMul"),
        ("bert/pooler/dense/MatMul", "classifier/dense/MatMul"),
    ]
    for i in range(setting.layers):
        at = f"bert/encoder/layer_{i}"
        self, norm = f"{at}/attention/self", f"{at}/attention/output/LayerNorm/Norm"
        following = f"bert/encoder/layer_{i + 1}/attention/self/query/MatMul"
        found += [
            (f"{self}/query/MatMul", f"{self}/scores/BatchMatMul"),
            (f"{self}/key/MatMul", f"{self}/scores/BatchMatMul"),
            (f"{self}/scores/BatchMatMul", f"{self}/Softmax"),
            (f"{self}/value/MatMul", f"{self}/Softmax"),
            (f"{self}/Softmax", f"{at}/attention/output/dense/MatMul"),
            (f"{at}/attention/output/dense/MatMul", norm),
            (norm, f"{at}/intermediate/dense/MatMul"),
            (norm, f"{at}/output/LayerNorm/Norm"),
            (f"{at}/intermediate/dense/MatMul", f"{at}/intermediate/Gelu"),
            (f"{at}/intermediate/Gelu", f"{at}/output/dense/MatMul"),
            (f"{at}/output/dense/MatMul", f"{at}/output/LayerNorm/Norm"),
            (
                f"{at}/output/LayerNorm/Norm",
                following if i + 1 < setting.layers else "bert/pooler/dense/MatMul",
            ),
        ]
    return found


def record(folder: Path, setting: Setting, seed: int) -> Recording:
    """Write a whole recording, as a run of that setting would have left it."""
    chance = np.random.default_rng(seed)
    step = list(operations(setting))
    length_ns: list[int] = []  # of stretches of constant power, one after the other
    power_w: list[float] = []
    marks: list[dict[str, object]] = []
    events: list[dict[str, object]] = []
    windows: list[dict[str, object]] = []
    now_ns = BEGIN_NS

    def pass_time(ns: int, w: float) -> None:
        nonlocal now_ns
        length_ns.append(ns)
        power_w.append(w)
        now_ns += ns

    def mark(name: str, index: int | None = None) -> None:
        marks.append(
            {"t_ns": now_ns, "name": name, "index": index, "rank": 0, "pid": PID, "source": "gallery"}
        )

    drift = chance.normal(1, 0.012)  # no two runs are the same
    pass_time(900 * MS, IDLE_W)
    mark("train_begin")
    for epoch in range(setting.epochs):
        mark("epoch_begin", epoch)
        traced_from = 2 if 0 < epoch < 6 and setting.traced else setting.steps
        seen: list[dict[str, int]] = []
        warm = 1 + 0.02 * (1 - 0.6**epoch) + chance.normal(0, 0.004)
        for n in range(setting.steps):
            number = epoch * setting.steps + n
            tracing = traced_from <= n < traced_from + setting.traced
            begun_ns = now_ns
            pass_time(int(MS * chance.uniform(2, 24) * (1.3 if tracing else 1)), IDLE_W + 20)
            for one in step:
                w = one.power_w * warm * drift * chance.normal(1, 0.01)
                slower = max(1.0, w / setting.limit_w) ** 1.6
                ns = int(one.ms * MS * slower * chance.normal(1, 0.015))
                if tracing:
                    events.append(
                        {
                            "name": one.name,
                            "device": "gpu:0",
                            "start_ns": now_ns,
                            "duration_ns": ns,
                            "phase": one.phase,
                            "lane": 7,
                            "step": number,
                        }
                    )
                pass_time(ns, min(w, setting.limit_w))
            mark("step_end", number)
            if tracing:
                seen.append({"index": number, "begin_ns": begun_ns, "end_ns": now_ns})
        if seen:
            windows.append(_window(seen, len(step) * len(seen)))
        mark("epoch_end", epoch)
        pass_time(int(120 * MS * chance.uniform(0.8, 1.2)), IDLE_W + 8)
    pass_time(400 * MS, IDLE_W)
    _write(folder, np.array(length_ns), np.array(power_w), setting, marks, chance)
    if events:
        assert write_events(folder, pa.Table.from_pylist(events)) is None
        assert write_windows(folder, pa.Table.from_pylist(windows, schema=WINDOWS)) is None
        between = edges(setting)
        pairs = pa.table({"source": [a for a, _ in between], "target": [b for _, b in between]})
        assert write_edges(folder, pairs) is None
    return open_recording(folder)


def _window(steps: Sequence[dict[str, int]], events: int) -> dict[str, object]:
    begin_ns, end_ns = steps[0]["begin_ns"], steps[-1]["end_ns"]
    busy_ns = end_ns - begin_ns
    return {
        "framework": "gallery",
        "source": "gallery",
        "rank": 0,
        "pid": PID,
        "asked_ns": begin_ns,
        "begin_ns": begin_ns,
        "end_ns": end_ns,
        "stopped_ns": end_ns,
        "steps": list(steps),
        "events": events,
        "busy_ns": busy_ns,
        "placed_ns": busy_ns,
        "counts_divide": True,
        "remarks": [],
    }


def _write(
    folder: Path,
    length_ns: np.ndarray,
    power_w: np.ndarray,
    setting: Setting,
    marks: list[dict[str, object]],
    chance: np.random.Generator,
) -> None:
    """Write readings of that power as sensors give them: samples of 20 ms with jitter, counters at times."""
    edge_ns = BEGIN_NS + np.concatenate([[0], np.cumsum(length_ns)])
    used_j = np.concatenate([[0.0], np.cumsum(power_w * length_ns * 1e-9)])
    end_ns = int(edge_ns[-1])

    def until_j(t_ns: np.ndarray) -> np.ndarray:
        return np.interp(t_ns, edge_ns, used_j)

    def times(every_ms: float, jitter: float) -> np.ndarray:
        even_ns = np.arange(BEGIN_NS, end_ns + 1, int(every_ms * MS))
        off_ns = np.clip(chance.normal(0, jitter, even_ns.size), -0.4, 0.4) * every_ms * MS
        return np.clip(even_ns + off_ns.astype(np.int64), BEGIN_NS, end_ns)

    sampled = times(20, 0.06)[1:]
    before = np.concatenate([[BEGIN_NS], sampled[:-1]])
    sampled_w = (until_j(sampled) - until_j(before)) / ((sampled - before) * 1e-9)
    counted, estimated, limits = times(2000, 0.01), times(100, 0.15), times(1000, 0.01)
    host_w = HOST_W * chance.normal(1, 0.05)
    folder.mkdir(parents=True)
    writer = ReadingsWriter(folder, CHANNELS)
    for n, (t_ns, value) in enumerate(
        (
            (sampled, sampled_w),
            (counted, until_j(counted)),
            (estimated, (estimated - BEGIN_NS) * 1e-9 * host_w),
            (limits, np.full(limits.size, setting.limit_w)),
        )
    ):
        writer.write([(n, [(int(t), 0, float(v)) for t, v in zip(t_ns, value, strict=True)])])
    writer.close()
    table = TableWriter(folder / "marks.arrows", MARKS)
    for batch in marks_table(marks).to_batches():
        table.write(batch)
    table.close()
    info = {
        "format_version": 1,
        "status": "complete",
        "command": ["python", "train.py", f"--layers={setting.layers}", f"--hidden={setting.hidden}"],
        "host": {"gpus": [{"device": "gpu:0", "power_limit_w": setting.limit_w}]},
        "clock": {"begin": {"wall_ns": BEGIN_NS}},
        "begin_ns": BEGIN_NS,
        "end_ns": end_ns,
        "channels": [channel_to_dict(channel) for channel in CHANNELS],
        "problems": [],
    }
    (folder / "run.json").write_text(json.dumps(info))


def repeated(folder: Path, name: str, setting: Setting, runs: int, seed: int) -> list[Recording]:
    return [record(folder / f"{name}-{n + 1}", setting, seed + n) for n in range(runs)]


BASE = Setting()
# Each figure, from which recordings it is drawn, and what one can read off it.
SHOWN = {
    "stages": ("stages", "Three stages of three runs each: the total of all steps, by phase."),
    "diagram": ("base", "From all operations of a step down to where the energy goes; shares of the level."),
    "epoch_power": ("base", "One epoch, averaged over all; when one layer ran, and others like it."),
    "top_energy": ("base", "The names that take the most energy, siblings merged (STEF)."),
    "top_power": ("base", "The names that draw the most power (STPF)."),
    "layers": ("base", "The layers that repeat, one by one."),
    "phases": ("base", "How the energy of each device splits into phases and idle."),
    "asss": ("base", "How alike the footprint stays with fewer readings."),
    "assw": ("base", "How alike one run is to more and more others."),
    "similarity": ("variants", "Variants of a model against each other, beside constant power."),
    "difference": ("variants", "The same variants: how much more or less they take and draw."),
    "power": ("limits", "Power over time, one panel for each power limit."),
    "cumulative": ("limits", "Energy used: a lower limit takes longer and less."),
    "epochs": ("limits", "Energy and time of an epoch for each power limit."),
    "sampling": ("base", "How far readings are apart, and how much that varies."),
}


def recordings(folder: Path) -> dict[str, list[Recording]]:
    short = replace(BASE, epochs=6, steps=5)
    found = {
        "base": repeated(folder / "base", "bert", BASE, 5, 100),
        "stages": [
            *repeated(folder / "stages", "pre-training", replace(BASE, epochs=12), 3, 200),
            *repeated(folder / "stages", "fine-tuning", replace(BASE, epochs=8), 3, 210),
            *repeated(folder / "stages", "prediction", replace(BASE, epochs=4, backward=False), 3, 220),
        ],
        "variants": [],
        "limits": [],
    }
    for n, (layers, hidden) in enumerate(((6, 512), (6, 768), (8, 512), (8, 768), (12, 512), (12, 768))):
        setting = replace(short, layers=layers, hidden=hidden)
        found["variants"] += [record(folder / "variants" / f"L{layers}H{hidden}", setting, 300 + n)]
    for n, limit_w in enumerate((150.0, 200.0, 250.0, 300.0)):
        setting = replace(BASE, limit_w=limit_w, traced=0)
        found["limits"] += repeated(folder / "limits", f"limit{limit_w:.0f}W", setting, 3, 400 + 10 * n)
    return found


def main(target: Path) -> None:
    from smaragdine.report.figures.draw import FIGURES, alt_text, save
    from smaragdine.report.figures.runs import runs_of

    lines = [
        "# Gallery",
        "",
        "Every figure that `smaragdine report RUN… --figures DIR` draws, at the width of a column (84 mm) or",
        "of a page (174 mm), of recordings of a GPU that never was: `python docs/make_gallery.py` makes all.",
        "Each is saved as PDF, SVG and PNG, with its alt text inside; names that had to be shortened stand",
        "there in full, and in `captions.md`. Colours are those of Okabe and Ito, and a scale of one hue.",
    ]
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: runs_of(found) for name, found in recordings(Path(folder)).items()}
        for name, (of, text) in SHOWN.items():
            figure = FIGURES[name](runs[of])
            (file,) = save(figure, target / "gallery", name, ("png",))
            _shrink(file)
            title, _, rest = alt_text(figure).partition(". ")
            lines += ["", f"## {name}", "", f"{title}. {text}", "", f"![{title}. {rest}](gallery/{name}.png)"]
    (target / "gallery.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _shrink(file: Path) -> None:
    """Save with few colours: the page has many pictures, and they take a third of the bytes this way."""
    from PIL import Image

    with Image.open(file) as image:
        small = image.convert("RGB").quantize(96, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    small.save(file, optimize=True, dpi=(300, 300))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
