"""Draws the paper's figures from the results of a study. `NotDrawn` says why one cannot be drawn."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smaragdine.accounting.arithmetic import average, scale
from smaragdine.accounting.diagram import Node, diagram, walk, zoom
from smaragdine.accounting.footprint import Footprint, only
from smaragdine.accounting.precision import Score
from smaragdine.accounting.repeats import repeating
from smaragdine.accounting.similarity import Correlation, Scores
from smaragdine.report.figures.diagram import diagram as draw_diagram
from smaragdine.report.figures.epochs import epoch_power
from smaragdine.report.figures.layers import (
    family_of,
    layers,
    stages,
    top_energies,
    top_energy,
    top_power,
    top_powers,
)
from smaragdine.report.figures.matrices import difference, similarity
from smaragdine.report.figures.precision import asss, assw, pair
from smaragdine.report.figures.runs import NotDrawn, footprint_notes
from smaragdine.study.claims import stage_steps
from smaragdine.study.document import Material, of_phase
from smaragdine.study.folder import experiment_runs
from smaragdine.study.plan import STAGES
from smaragdine.study.precision import experiments_of, in_turn, summaries
from smaragdine.study.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_LEAST_SHARE = 0.0005  # of a diagram's level: the paper's diagrams have boxes below one percent
_MOST_PANELS = 6


def stages_figure(material: Material) -> Figure:
    found = {stage: material.like_base("bert", stage) for stage in STAGES}
    known = {stage: results for stage, results in found.items() if results}
    if not known:
        raise NotDrawn("no stage of BERT was run")
    count = {s: stage_steps(s, int(results[0].facts.get("batch", 1))) for s, results in known.items()}
    runs = {
        STAGES[stage]: [scale(only(result.step, [material.device]), count[stage]) for result in results]
        for stage, results in known.items()
    }
    if len(set(count.values())) == 1:
        return stages(runs, f"{max(count.values())} steps on {material.device}")
    said = [f"{STAGES[stage]}: {steps} steps" for stage, steps in count.items()]
    return stages(runs, f"a stage on {material.device}", said)


def program_figure(material: Material) -> Figure:
    """From the whole forward pass down to single transformers."""
    root = _forward(material)
    family = _family(root, material)
    above = family[0].path.rpartition("/")[0]
    way = [root, *(node for node in walk(root) if node.path and f"{above}/".startswith(f"{node.path}/"))]
    levels = [_in_order(node) for node in way if len(node.children) > 1]
    return _diagram(levels, material)


def transformers_figure(material: Material) -> Figure:
    steps = [result.step for result in material.base]
    device = material.device
    found = family_of(steps, device, material.base[0].setting)
    return layers(found, "a step", device, notes=footprint_notes([only(step, [device]) for step in steps]))


def power_figure(material: Material) -> Figure:
    sketch = material.sketch
    if sketch.power is None:
        raise NotDrawn(f"{sketch.name} has no traced steps with power")
    return epoch_power(sketch.power, sketch.device, sketch.ran, footprint_notes([sketch.all_readings]))


def transformer_figure(material: Material) -> Figure:
    """The first transformer, its layers, and self-attention, or whatever is the largest layer inside."""
    root = _forward(material)
    first = zoom(root, _family(root, material)[0].path)
    parts = [child for child in first.children if child.children]
    inner = [below for child in parts for below in child.children if len(below.children) > 1]
    chosen = max(inner, key=lambda node: (node.name == "self", node.energy_j), default=None)
    levels = [first]
    for child in parts:
        levels += [child] if len(child.children) > 1 else []
        levels += [below for below in child.children if below is chosen]
    return _diagram(levels[:_MOST_PANELS], material)


def similarity_figure(material: Material) -> Figure:
    """All readings against every second one."""
    sketch = material.sketch
    both = sketch.all_readings, sketch.half_readings
    return pair(*both, ("all", "every 2nd"), sketch.device, ["columns: the readings kept", sketch.name])


def asss_figure(material: Material) -> Figure:
    device = material.device
    found = [[score_of(one) for one in result.asss.get(device, ())] for result in material.base]
    shown = min(sum(score.scores.energy.value is not None for score in each) for each in found)
    if shown < 3:
        raise NotDrawn("the traced time has too few readings to leave any out")
    period_ms = material.base[0].period_ms.get(device)
    return asss([each[:shown] for each in found], device, period_ms, _notes(material.base, device))


def assw_figure(material: Material) -> Figure:
    """As in the paper: the pooled experiments include the one they are compared with."""
    experiments = _experiments(material, 3)
    device = material.device
    turns = in_turn(experiments, device)
    return assw(turns, device, len(experiments[0]), _notes(material.base, device), pooled=True)


def stability_figure(material: Material) -> Figure:
    experiments = _experiments(material, 2)
    size = len(experiments[0])
    means = {chr(ord("a") + n): average(each).mean for n, each in enumerate(experiments)}
    said = f"experiments a to {list(means)[-1]} of {size} run{'s' if size > 1 else ''} each"
    return similarity(means, material.device, [said])


def score_of(values: Mapping[str, float | int | None]) -> Score:
    """A score of ASSS, as results keep it."""

    def value(key: str) -> Correlation:
        return Correlation(values.get(key), "", 0, (), ())

    absent = Correlation(None, "not kept", 0, (), ())
    found = Scores(
        value("energy"), value("power"), value("constant_power"), absent, value("times_against_energy")
    )
    return Score(int(values["every"] or 0), found)


def _forward(material: Material) -> Node:
    """The base's mean forward pass, with the dataflow of one run."""
    mean = of_phase(_mean(material.base, material.device), "forward")
    if not mean.rows.num_rows:
        raise NotDrawn(f"{material.base[0].setting} has no forward pass of its own")
    try:
        edges = material.sketch.edges
    except NotDrawn:
        edges = None
    return diagram(mean, edges)


def _family(root: Node, material: Material) -> list[Node]:
    found = repeating(root)
    if not found:
        raise NotDrawn(f"no layers of {material.base[0].setting} repeat three times or more")
    return found


def _in_order(node: Node) -> Node:
    """Sorts numbered layers by number, if no dataflow says more."""
    numbers = {child.name: re.findall(r"\d+", child.name) for child in node.children}
    if node.edges or not all(numbers.values()):
        return node
    ordered = sorted(node.children, key=lambda child: [int(n) for n in numbers[child.name]])
    return dataclasses.replace(node, children=tuple(ordered))


def _diagram(levels: Sequence[Node], material: Material) -> Figure:
    count = len(material.base)
    said = ["forward pass", f"mean of {count} runs" if count > 1 else "one run"]
    if not any(node.edges for node in levels):
        said.append("dataflow not kept")
    return draw_diagram(levels, material.device, None, said, _LEAST_SHARE)


def _mean(results: Sequence[Result], device: str) -> Footprint:
    return average([only(result.step, [device]) for result in results]).mean


def _experiments(material: Material, least: int) -> list[list[Footprint]]:
    found = experiments_of(material.base, experiment_runs(material.out))
    if len(found) < least:
        raise NotDrawn(
            f"it takes {least} experiments of {material.base[0].setting} or more, not {len(found)}"
        )
    names = [result.name for result in material.base]
    by_name = dict(zip(names, summaries(material.base, material.device), strict=True))
    return [[by_name[result.name] for result in each] for each in found]


def _variants(material: Material) -> dict[str, Footprint]:
    found = material.variants()
    if len(found) < 2:
        raise NotDrawn("it takes two variants or more")
    merged = iter(summaries([result for results in found.values() for result in results], material.device))
    return {label: average([next(merged) for _ in results]).mean for label, results in found.items()}


def _models(material: Material) -> dict[str, list[Footprint]]:
    found = {model.upper(): material.like_base(model, "pretrain") for model in ("albert", "bert")}
    if not found["ALBERT"]:
        raise NotDrawn("ALBERT was not run")
    return {model: summaries(results, material.device) for model, results in found.items() if results}


def _notes(results: Sequence[Result], device: str) -> list[str]:
    return footprint_notes([only(result.step, [device]) for result in results])


# The figures of the paper: what each is called here, and what the paper's showed.


@dataclass(frozen=True)
class PaperFigure:
    """A figure of the paper: its file, what it is here, and what the paper's showed."""

    name: str
    title: str
    there: str
    draw: Callable[[Material], Figure]

    @property
    def number(self) -> int:
        return int(self.name.split("-")[1])


OF_BASE = range(2, 9)  # figures that show one setting, the base

FIGURES = (
    PaperFigure(
        "figure-1-stages",
        "Energy of the stages",
        "pre-training took over 60 kJ, fine-tuning 45 kJ and prediction about 2 kJ, most of it in the "
        "backward pass. Its 500 epochs are steps: a stage here is the energy of a step × 500, of prediction "
        "as often as CoLA's 1,063 test sentences take.",
        stages_figure,
    ),
    PaperFigure(
        "figure-2-transformers",
        "Transformer by transformer",
        "energy rose from the first transformer to the fifth and stayed level from there.",
        transformers_figure,
    ),
    PaperFigure(
        "figure-2-program",
        "The program and its encoder, forward pass",
        "the encoder took more than 99 %, each transformer 8.25 ± 0.61 %, the first ones up to 2 % less.",
        program_figure,
    ),
    PaperFigure(
        "figure-3-power",
        "Power during one step, and when the first transformer ran",
        "power was low while the first transformer ran and rose with the load.",
        power_figure,
    ),
    PaperFigure(
        "figure-4-transformer",
        "The first transformer and its nested layers, forward pass",
        "attention took 40.68 % of it and self-attention 72.51 % of that; dense layers dominate the rest.",
        transformer_figure,
    ),
    PaperFigure(
        "figure-5-top-energy",
        "Top ten by energy (STEF)",
        "all ten were matrix products, eight of them of the backward pass.",
        lambda material: top_energy(summaries(material.base, material.device), material.device),
    ),
    PaperFigure(
        "figure-5-top-power",
        "Top ten by power (STPF)",
        "the power of all matrix products was about the same.",
        lambda material: top_power(summaries(material.base, material.device), material.device),
    ),
    PaperFigure(
        "figure-6-similarity",
        "How accounting similarity is computed",
        "nine layers with all samples and with half of them: 0.9958.",
        similarity_figure,
    ),
    PaperFigure(
        "figure-7-asss",
        "Similarity with fewer readings (ASSS)",
        "between 0.90 and 0.94 as the period grew.",
        asss_figure,
    ),
    PaperFigure(
        "figure-7-assw",
        "Similarity with more experiments (ASSW)",
        "between 0.97 and 0.99 for 2 to 5 experiments of 5 runs each.",
        assw_figure,
    ),
    PaperFigure(
        "figure-8-stability",
        "Similarity of repeated experiments",
        "all pairs of nine experiments correlated strongly, above 0.7.",
        stability_figure,
    ),
    PaperFigure(
        "figure-9-similarity",
        "Similarity of variants",
        "all pairs of eight variants correlated highly, in energy and in power.",
        lambda material: similarity(_variants(material), material.device),
    ),
    PaperFigure(
        "figure-9-difference",
        "Mean difference of variants",
        "H768 drew more power than H512, and more layers drew more; energy rose with layers, but L6 H768 "
        "took less than L12 H512.",
        lambda material: difference(_variants(material), material.device),
    ),
    PaperFigure(
        "figure-10-albert-energy",
        "Top ten by energy of ALBERT, beside BERT",
        "all ten were Einstein sums; energies were much smaller than BERT's, almost half in some cases.",
        lambda material: top_energies(_models(material), material.device),
    ),
    PaperFigure(
        "figure-10-albert-power",
        "Top ten by power of ALBERT, beside BERT",
        "all drew at least 120 W, more than BERT's, with a larger standard deviation.",
        lambda material: top_powers(_models(material), material.device),
    ),
)
