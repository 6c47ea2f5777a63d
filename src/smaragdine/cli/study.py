"""`smaragdine study`: repeats the paper's evaluation on this machine, or makes one of a program of your
own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from smaragdine.cli.parsing import (
    Parser,
    count,
    counts,
    parameter,
    positive_count,
    positive_seconds,
    print_json,
)
from smaragdine.errors import UserError
from smaragdine.jobs.job import Stop
from smaragdine.jobs.lender import Say
from smaragdine.study.folder import (
    KEEPS,
    LOGS,
    Study,
    check_script,
    check_words,
    expected_s,
    left_of,
    read_made,
)
from smaragdine.study.plan import (
    FRAMEWORKS,
    PRECISIONS,
    SIZES,
    STAGES,
    STUDIES,
    Planned,
    StudyRequest,
    StudyRun,
    check_packages,
    machine_here,
    runs_of,
    size_here,
)

_STUDIES = {
    "bert": (
        "Measure what BERT uses in each stage.",
        "smaragdine study bert --stage pretrain,predict --runs 5 -o out",
    ),
    "variants": (
        "Measure what BERT's pre-training uses with other numbers of layers and hidden sizes.",
        "smaragdine study variants --layers 6,8,10,12 --hidden 512,768 -o out",
    ),
    "albert": (
        "Measure what ALBERT uses, beside BERT.",
        "smaragdine study albert --precision bf16,fp32 -o out",
    ),
    "precision": (
        "Measure how alike footprints stay with fewer readings (ASSS), more runs (ASSW) and between\n"
        "experiments, what sampling costs a program, and how all these costs grow.",
        "smaragdine study precision --experiments 9 -o out",
    ),
    "all": ("Do bert, variants, albert, precision and figures.", "smaragdine study all -o out"),
}


def study_parser(name: str) -> Parser:
    description, example = _STUDIES[name]
    parser = Parser(f"study {name}", description, f"  {example}")
    _add_common(parser)
    parser.add_argument(
        "--size", choices=tuple(SIZES), help="size of the whole study (base with a GPU, else small)"
    )
    parser.add_argument(
        "--runs", metavar="N", type=positive_count, help="runs of each setting (base 5, small 3)"
    )
    if name in ("precision", "all"):
        parser.add_argument(
            "--experiments",
            metavar="N",
            type=positive_count,
            help="experiments of so many runs each, for precision (9)",
        )
    model = parser.add_argument_group("what to run; of several, separated by commas, all combinations")
    model.add_argument("--framework", metavar="F", help=f"{', '.join(FRAMEWORKS)} (torch)")
    model.add_argument("--stage", metavar="S", help=", ".join(STAGES))
    model.add_argument("--precision", metavar="P", help=f"{', '.join(PRECISIONS)} (fp32)")
    model.add_argument("--layers", metavar="N", type=counts, default=[], help="transformers in the encoder")
    model.add_argument("--hidden", metavar="N", type=counts, default=[], help="hidden size")
    model.add_argument("--batch", metavar="N", type=positive_count, help="sequences in a step")
    model.add_argument("--length", metavar="N", type=positive_count, help="tokens in a sequence")
    model.add_argument(
        "--seconds", metavar="S", type=positive_seconds, help="least time for the steps of a run"
    )
    model.add_argument("--data", metavar="DIR", help="CoLA's files or texts (default: generated)")
    parser.add_argument("--trace-steps", metavar="N", type=positive_count, help="trace so many steps")
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
    parser.add_argument("program", metavar="PROGRAM", nargs="?", help="the program, as for smaragdine run")
    parser.add_argument(
        "--vary",
        metavar="NAME=V,…",
        type=parameter,
        action="append",
        default=[],
        help="values to try; repeat it for more names",
    )
    _add_common(parser)
    parser.add_argument(
        "--runs", metavar="N", type=positive_count, default=3, help="runs of each setting (3)"
    )
    parser.add_argument(
        "--trace-steps", metavar="N", type=positive_count, default=20, help="trace so many steps (20)"
    )
    parser.add_argument(
        "--trace-skip", metavar="N", type=count, default=10, help="steps before the first traced one (10)"
    )
    return parser


def figures_parser() -> Parser:
    parser = Parser(
        "study figures",
        "Make every figure and table of what has been run, and a page that compares it with the paper.",
        "  smaragdine study figures out",
    )
    parser.add_argument(
        "folder", metavar="OUT", nargs="?", default="study", help="the study's folder (study)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def wanted_of(options: argparse.Namespace, machine: dict[str, Any]) -> StudyRequest:
    data = None if options.data is None else Path(options.data).absolute()
    if data is not None and not data.is_dir():
        raise UserError(f"--data {options.data} is no folder", remedy="Name one with CoLA's files or texts")
    if data is not None and not any(path.suffix in (".txt", ".tsv") for path in data.rglob("*")):
        raise UserError(
            f"--data {options.data} has no data",
            "there is no .txt and no .tsv file in it",
            "Name a folder with CoLA's files or texts",
        )
    return StudyRequest(
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
        help="the study's folder, which commands share (study)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and how long it takes")
    parser.add_argument(
        "--keep",
        choices=KEEPS,
        default="first",
        help="keep the events of these runs: each setting's first (first)",
    )
    parser.add_argument("--timeout", metavar="S", type=positive_seconds, help="end a run that takes longer")
    parser.add_argument(
        "--seed", metavar="N", type=count, help="seed of the order of runs (the study's, or a new one)"
    )
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")


def _listed(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(text.split(","))


_HELP = """\
usage: smaragdine study bert | variants | albert | precision | all | custom | figures  [options]

Repeat the paper's evaluation on this machine: run it, compare it with what was published, draw it.

  bert        BERT's pre-training, fine-tuning and prediction
  variants    other numbers of layers and hidden sizes
  albert      ALBERT beside BERT
  precision   how alike footprints stay with fewer readings and more runs; what measuring costs
  all         all of these, and the figures
  custom      the same for a program of your own
  figures     every figure and table of what has been run, and a page that compares it with the paper

Commands that share a folder share their runs, and go on where they stopped.

  smaragdine study bert --help    the options of each, with an example
"""


def main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    if words[0] == "figures":
        return _figures(words[1:])
    if words[0] == "custom":
        return _custom(words[1:])
    if words[0] not in (*STUDIES, "all"):
        known = ", ".join([*STUDIES, "all", "custom", "figures"])
        raise UserError(f"unknown study {words[0]}", remedy=f"There are: {known}")
    return _study(words[0], words[1:])


def _study(name: str, words: list[str]) -> int:
    options = study_parser(name).parse_args(words)
    names = list(STUDIES) if name == "all" else [name]
    machine = machine_here()
    wanted = wanted_of(options, machine)
    planned = [each for study in names for each in STUDIES[study](wanted)]
    repeated = STUDIES["precision"](wanted) if "precision" in names else []
    if repeated:
        from smaragdine.study.scaling import scaling_settings

        grown = scaling_settings(repeated[0].setting)[: wanted.size.grown]
        planned += [Planned(setting, 1) for setting in grown]
    runs, folder = runs_of(planned), Path(options.output)
    if options.dry_run:
        return _dry_run(folder, runs, options.json, _overhead_left(folder, repeated, wanted.size.pairs))
    check_packages(wanted.frameworks)
    if name == "all":
        from smaragdine.report.figures.style import look

        look()  # says so if matplotlib is missing

    def then(say: Say, stop: Stop) -> bool:
        from smaragdine.study.overhead import measure_overhead

        try:
            for each in repeated:
                measure_overhead(each.setting, folder, say, stop, wanted.size.pairs)
        except UserError as error:
            say(f"overhead: {error}")
            return False
        return True

    size = (wanted.runs or wanted.size.runs) if repeated else None
    code = _run(folder, runs, options, ["study", name, *words], machine, then, size)
    if code > 1:
        return code
    if name == "all":
        _draw(folder)
    _print_findings(folder, names, options.json)
    return code


def _custom(words: list[str]) -> int:
    from smaragdine.report.terminal import console
    from smaragdine.study.custom import custom_settings, customs_of
    from smaragdine.study.plan import PROGRAM
    from smaragdine.study.results import load_results
    from smaragdine.study.tables import customs_json, customs_tables

    cut = words.index("--") if "--" in words else len(words)
    options = custom_parser().parse_args(words[:cut])
    program = [*([options.program] if options.program else []), *words[cut + 1 :]]
    if not program:
        raise UserError(
            "no program to run", remedy="Example: smaragdine study custom train.py --vary layers=2,4,8"
        )
    names = [name for name, _ in options.vary]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"--vary {twice} is there twice", remedy=f"Example: --vary {twice}=V,…, all in one")
    settings = custom_settings(program, dict(options.vary), options.trace_steps, options.trace_skip)
    runs, folder = runs_of([Planned(setting, options.runs) for setting in settings]), Path(options.output)
    check_script(folder, settings[0])
    if options.dry_run:
        return _dry_run(folder, runs, options.json)
    code = _run(folder, runs, options, ["study", "custom", *words], machine_here())
    if code > 1:
        return code
    found = customs_of(load_results(folder), str(settings[0].facts[PROGRAM]))
    if options.json:
        print_json(customs_json(found))
    elif found.settings:
        console().print(customs_tables(found))
    return code


def _figures(words: list[str]) -> int:
    options = figures_parser().parse_args(words)
    folder = Path(options.folder)
    if not any(folder.glob("results/*.json")):
        made = read_made(folder)
        if made is None:
            remedy = f"Run: smaragdine study bert -o {folder}"
            raise UserError(f"{folder} has no results", "nothing has been run", remedy)
        raise UserError(f"{folder} has no results", "no run has ended well", f"See {folder / LOGS}")
    _draw(folder)
    _print_findings(folder, [], options.json)
    return 0


def _run(
    folder: Path,
    runs: Sequence[StudyRun],
    options: argparse.Namespace,
    command: Sequence[str],
    machine: dict[str, Any],
    then: Callable[[Say, Stop], bool] | None = None,
    experiment_runs: int | None = None,
) -> int:
    """0: all runs have a result; 1: some have none; more: it was stopped."""
    from smaragdine.report.terminal import shortest_path
    from smaragdine.study.page import StudyDisplay
    from smaragdine.study.results import hardware_named, machines_of
    from smaragdine.study.runner import run_missing

    check_words(folder, runs)
    study = Study(folder, ["smaragdine", *command], machine, options.seed, experiment_runs)
    where, left = shortest_path(folder), left_of(folder, runs)
    try:
        with StudyDisplay(study.note, len(runs)) as display, Stop() as stop:
            there = len(runs) - len(left)
            display.say(f"study: {where}" + (f", {there} of {len(runs)} runs are there" if there else ""))
            here = hardware_named(machine["gpus"], machine["cpu"])
            kinds, cards = machines_of(folder) if left else (set[str](), set[str]())
            if kinds - {here}:
                others = "; ".join(sorted(kinds - {here}))
                display.say(f"beware: {where} has runs of {others}, and this is {here}")
            elif cards and cards.isdisjoint(machine["cards"]):
                display.say(f"beware: {where} has runs of another such card, which need not draw the same")
            outcome = run_missing(study, runs, options.keep, display, stop, timeout_s=options.timeout)
            done = then is None or bool(stop) or then(display.say, stop)
    finally:
        study.close()
    if stop:
        print(f"smaragdine: stopped. The same command again goes on in {where}", file=sys.stderr)
        return 128 + stop.number
    missing = [*outcome.failed, *outcome.left_out]
    if missing:
        words = f"{len(missing)} of {len(runs)} runs have no result, such as {missing[0]}"
        print(f"smaragdine: {words}. The same command again retries them", file=sys.stderr)
    return 1 if missing or not done else 0


def _dry_run(folder: Path, runs: Sequence[StudyRun], as_json: bool, overhead: bool = False) -> int:
    """`overhead`: sampling's overhead will be measured too."""
    from smaragdine.report.terminal import console
    from smaragdine.study.page import runs_table
    from smaragdine.units import seconds

    made = read_made(folder)
    check_words(folder, runs)
    left, took_s = left_of(folder, runs), {} if made is None else made.took_s
    total_s = expected_s(left, took_s)
    if as_json:
        names = [run.name for run in left]
        print_json({"runs": len(runs), "left": names, "expected_s": total_s, "overhead_left": overhead})
        return 0
    out = console()
    if left:
        out.print(runs_table(left, took_s))
    time_words = "unknown until the first run has ended" if total_s is None else f"about {seconds(total_s)}"
    line = f"{len(left)} of {len(runs)} runs are left; time: {time_words}"
    line += "; then sampling's overhead, one or two minutes" if overhead else ""
    out.print(line, markup=False, soft_wrap=True)
    return 0


def _overhead_left(folder: Path, repeated: Sequence[Planned], pairs: int) -> bool:
    from smaragdine.study.overhead import load_overhead

    known = {each.setting: each.pairs for each in load_overhead(folder)} if repeated else {}
    return any(known.get(each.setting.name, 0) < pairs for each in repeated)


def _draw(folder: Path) -> None:
    from smaragdine.report.terminal import shortest_path
    from smaragdine.study.page import FIGURES_FOLDER, TABLES_FOLDER, write_study

    files = write_study(folder)
    for path in files:
        if path.parent == folder:
            print(shortest_path(path), file=sys.stderr)
    for name in (FIGURES_FOLDER, TABLES_FOLDER):
        count = sum(path.parent.name == name for path in files)
        print(f"{shortest_path(folder / name)}: {count} files", file=sys.stderr)


def _print_findings(folder: Path, names: Sequence[str], as_json: bool) -> None:
    """Findings of these studies, or of all."""
    from smaragdine.report.terminal import console
    from smaragdine.study.findings import findings
    from smaragdine.study.results import load_results
    from smaragdine.study.tables import findings_table

    results = load_results(folder)
    found = (
        [each for each in findings(results, folder) if not names or each.study in names] if results else []
    )
    if as_json:
        print_json([asdict(each) for each in found])
    elif found:
        console().print(findings_table(found))
