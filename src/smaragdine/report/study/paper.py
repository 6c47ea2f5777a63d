"""The figures of the paper: what each is called here, and what the paper's showed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smaragdine.report.study import figures
from smaragdine.report.study.material import Material

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Wanted:
    """A figure of the paper: its file, what it is here, and what the paper's showed."""

    name: str
    title: str
    there: str
    draw: Callable[[Material], Figure]

    @property
    def number(self) -> int:
        return int(self.name.split("-")[1])


OF_BASE = range(2, 9)  # figures of one setting, the base

FIGURES = (
    Wanted(
        "figure-1-stages",
        "Energy of the stages",
        "pre-training took over 60 kJ, fine-tuning 45 kJ and prediction about 2 kJ, most of it in the "
        "backward pass. Its 500 epochs are steps: a stage here is the energy of a step × 500, of prediction "
        "as often as CoLA's 1,063 test sentences take.",
        figures.stages_figure,
    ),
    Wanted(
        "figure-2-transformers",
        "Transformer by transformer",
        "energy rose from the first transformer to the fifth and stayed level from there.",
        figures.transformers_figure,
    ),
    Wanted(
        "figure-2-program",
        "The program and its encoder, forward pass",
        "the encoder took more than 99 %, each transformer 8.25 ± 0.61 %, the first ones up to 2 % less.",
        figures.program_figure,
    ),
    Wanted(
        "figure-3-power",
        "Power during one step, and when the first transformer ran",
        "power was low while the first transformer ran and rose with the load.",
        figures.power_figure,
    ),
    Wanted(
        "figure-4-transformer",
        "The first transformer and its nested layers, forward pass",
        "attention took 40.68 % of it and self-attention 72.51 % of that; dense layers dominate the rest.",
        figures.transformer_figure,
    ),
    Wanted(
        "figure-5-top-energy",
        "Top ten by energy (STEF)",
        "all ten were matrix products, eight of them of the backward pass.",
        figures.top_energy_figure,
    ),
    Wanted(
        "figure-5-top-power",
        "Top ten by power (STPF)",
        "the power of all matrix products was about the same.",
        figures.top_power_figure,
    ),
    Wanted(
        "figure-6-similarity",
        "How accounting similarity is computed",
        "nine layers with all samples and with half of them: 0.9958.",
        figures.similarity_figure,
    ),
    Wanted(
        "figure-7-asss",
        "Similarity with fewer readings (ASSS)",
        "between 0.90 and 0.94 as the period grew.",
        figures.asss_figure,
    ),
    Wanted(
        "figure-7-assw",
        "Similarity with more experiments (ASSW)",
        "between 0.97 and 0.99 for 2 to 5 experiments of 5 runs each.",
        figures.assw_figure,
    ),
    Wanted(
        "figure-8-stability",
        "Similarity of repeated experiments",
        "all pairs of nine experiments correlated strongly, above 0.7.",
        figures.stability_figure,
    ),
    Wanted(
        "figure-9-similarity",
        "Similarity of variants",
        "all pairs of eight variants correlated highly, in energy and in power.",
        figures.variants_similarity_figure,
    ),
    Wanted(
        "figure-9-difference",
        "Mean difference of variants",
        "H768 drew more power than H512, and more layers drew more; energy rose with layers, but L6 H768 "
        "took less than L12 H512.",
        figures.variants_difference_figure,
    ),
    Wanted(
        "figure-10-albert-energy",
        "Top ten by energy of ALBERT, beside BERT",
        "all ten were Einstein sums; energies were much smaller than BERT's, almost half in some cases.",
        figures.albert_energy_figure,
    ),
    Wanted(
        "figure-10-albert-power",
        "Top ten by power of ALBERT, beside BERT",
        "all drew at least 120 W, more than BERT's, with a larger standard deviation.",
        figures.albert_power_figure,
    ),
)
