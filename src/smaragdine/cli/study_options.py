"""The options of `smaragdine study`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from smaragdine.cli.parsing import Parser, count, counts, parameter, positive_count, positive_seconds
from smaragdine.errors import UserError
from smaragdine.study.catalogue import PRECISIONS, SIZES, Wanted
from smaragdine.study.folder import KEEPS
from smaragdine.study.machine import size_here
from smaragdine.study.programs import FRAMEWORKS
from smaragdine.study.settings import STAGES

_STUDIES = {
    "bert": (
        "What BERT uses in each stage.",
        "smaragdine study bert --stage pretrain,predict --runs 5 -o out",
    ),
    "variants": (
        "What BERT's pre-training uses with other numbers of layers and hidden sizes.",
        "smaragdine study variants --layers 6,8,10,12 --hidden 512,768 -o out",
    ),
    "albert": ("What ALBERT uses, beside BERT.", "smaragdine study albert --precision bf16,fp32 -o out"),
    "precision": (
        "How alike footprints stay with fewer readings (ASSS), more runs (ASSW) and between experiments,\n"
        "what sampling costs a program, and how the cost of it all grows.",
        "smaragdine study precision --experiments 9 -o out",
    ),
    "all": ("bert, variants, albert, precision and figures.", "smaragdine study all -o out"),
}


def study_parser(name: str) -> Parser:
    description, example = _STUDIES[name]
    parser = Parser(f"study {name}", description, f"  {example}")
    _add_common(parser)
    parser.add_argument(
        "--size", choices=tuple(SIZES), help="of it all (base where there is a GPU, else small)"
    )
    parser.add_argument("--runs", metavar="N", type=positive_count, help="of each setting (base 5, small 3)")
    if name in ("precision", "all"):
        parser.add_argument(
            "--experiments", metavar="N", type=positive_count, help="of so many runs each, for precision (9)"
        )
    model = parser.add_argument_group("what is run; several, separated by commas: all combinations")
    model.add_argument("--framework", metavar="F", help=f"{', '.join(FRAMEWORKS)} (torch)")
    model.add_argument("--stage", metavar="S", help=", ".join(STAGES))
    model.add_argument("--precision", metavar="P", help=f"{', '.join(PRECISIONS)} (fp32)")
    model.add_argument("--layers", metavar="N", type=counts, default=[], help="transformers in the encoder")
    model.add_argument("--hidden", metavar="N", type=counts, default=[], help="hidden size")
    model.add_argument("--batch", metavar="N", type=positive_count, help="sequences in a step")
    model.add_argument("--length", metavar="N", type=positive_count, help="tokens in a sequence")
    model.add_argument("--seconds", metavar="S", type=positive_seconds, help="of steps in a run, at least")
    model.add_argument("--data", metavar="DIR", help="CoLA's files or texts (default: generated)")
    parser.add_argument("--trace-steps", metavar="N", type=positive_count, help="how many steps are traced")
    return parser


def custom_parser() -> Parser:
    parser = Parser(
        "study custom",
        "Run a program of your own with every combination of values, and compare what its steps use.\n"
        "{NAME} in its arguments is replaced by the value; without it, --NAME VALUE is added.",
        "  smaragdine study custom train.py --vary layers=2,4,8 --runs 3\n"
        "  smaragdine study custom train.py --vary batch=16,32 -- --epochs 1 --batch-size {batch}",
    )
    parser.usage = "smaragdine study custom PROGRAM --vary NAME=V,… [options] [-- the program's arguments]"
    parser.add_argument("program", metavar="PROGRAM", nargs="?", help="as smaragdine run takes it")
    parser.add_argument(
        "--vary", metavar="NAME=V,…", type=parameter, action="append", default=[], help="what varies; again"
    )
    _add_common(parser)
    parser.add_argument("--runs", metavar="N", type=positive_count, default=3, help="of each setting (3)")
    parser.add_argument(
        "--trace-steps", metavar="N", type=positive_count, default=20, help="how many steps are traced (20)"
    )
    parser.add_argument(
        "--trace-skip", metavar="N", type=count, default=10, help="steps before the first traced one (10)"
    )
    return parser


def figures_parser() -> Parser:
    parser = Parser(
        "study figures",
        "Every figure and table of what has been run, and a page that compares it with the paper.",
        "  smaragdine study figures out",
    )
    parser.add_argument("folder", metavar="OUT", nargs="?", default="study", help="of the study (study)")
    parser.add_argument("--json", action="store_true", help="print the findings, for machines")
    return parser


def wanted_of(options: argparse.Namespace, machine: dict[str, Any]) -> Wanted:
    data = None if options.data is None else Path(options.data).absolute()
    if data is not None and not data.is_dir():
        raise UserError(f"--data {options.data} is no folder", remedy="Name one with CoLA's files or texts")
    if data is not None and not any(path.suffix in (".txt", ".tsv") for path in data.rglob("*")):
        raise UserError(
            f"--data {options.data} has no data",
            "there is no .txt and no .tsv file in it",
            "Name a folder with CoLA's files or texts",
        )
    return Wanted(
        SIZES[options.size or size_here(machine)],
        _listed(options.stage),
        _listed(options.framework) or FRAMEWORKS[:1],
        _listed(options.precision) or PRECISIONS[:1],
        tuple(options.layers),
        tuple(options.hidden),
        options.batch,
        options.length,
        options.runs,
        getattr(options, "experiments", None),
        options.seconds,
        options.trace_steps,
        data,
    )


def _add_common(parser: Parser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        default="study",
        help="the study's folder; commands share it (study)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and how long it takes")
    parser.add_argument(
        "--keep",
        choices=KEEPS,
        default="first",
        help="whose events stay: each setting's first run's (first)",
    )
    parser.add_argument("--timeout", metavar="S", type=positive_seconds, help="end a run after this")
    parser.add_argument("--seed", metavar="N", type=count, help="of the order (the study's, or a new one)")
    parser.add_argument("--json", action="store_true", help="print what was found, for machines")


def _listed(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(text.split(","))
