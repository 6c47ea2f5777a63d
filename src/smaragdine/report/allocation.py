"""Allocations as tables for a terminal, or for a paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from smaragdine.allocate.methods import Answer, Tie
from smaragdine.allocate.objective import Objective, Share, step_time_s, unit
from smaragdine.allocate.pareto import Corner
from smaragdine.errors import visible
from smaragdine.units import joules, plain, seconds, watts


def allocation_tables(
    answers: Sequence[Answer],
    model: str,
    global_batch: int,
    front: Sequence[Corner] = (),
    remarks: Sequence[str] = (),
    skipped: Mapping[str, str] | None = None,
) -> RenderableType:
    objective = answers[0].objective
    parts: list[RenderableType] = [
        Text(f"{global_batch} samples a step, {model} model, {_formula(objective)}", style="bold"),
        Text(""),
        _answers_table(answers),
    ]
    parts += [Text(line, style="dim") for line in _notes(answers)]
    if front:
        parts += [Text(""), _front_table(front, objective)]
    parts += [Text.assemble((f"no {name}: ", "dim"), why) for name, why in (skipped or {}).items()]
    parts += [Text.assemble(("! ", "yellow"), visible(remark)) for remark in remarks]
    return Group(*parts)


def _formula(objective: Objective) -> str:
    eta = f"η = {objective.eta:g}"
    within = (
        "" if objective.slowdown is None else f" within {plain(objective.slowdown, 3)} of the fastest step"
    )
    return {
        "sum": f"Σ (η·P̄ + (1−η)·P_limit)·t, {eta}",
        "sync": f"η·E + (1−η)·T·ΣP_limit of a synchronous step, {eta}",
        "energy": f"energy of a synchronous step{within}",
        "time": "time of a synchronous step",
        "edp": "energy × time of a synchronous step",
    }[objective.kind]


def _answers_table(answers: Sequence[Answer]) -> Table:
    uncertain = any(each.standard_error is not None for each in answers)
    heads = [
        "cost",
        *(["±"] if uncertain else []),
        "found in",
        "batch",
        "limit",
        "time",
        "mean power",
        "step",
    ]
    table = _table("method", "GPU", *heads)
    for n, each in enumerate(answers):
        if n:
            table.add_row()
        cost = Text(f"{each.allocation.cost:.4f} {unit(each.objective)}", style="bold")
        error = [] if not uncertain else [_figure(each.standard_error)]
        step = seconds(step_time_s(each.allocation.shares, each.objective.all_reduce_s))
        for i, share in enumerate(each.allocation.shares):
            first = (each.method, cost, *error, seconds(each.seconds), step)
            method, *of_method, last = first if not i else ("",) * len(first)
            table.add_row(method, Text(visible(share.gpu)), *of_method, *_share(share), last)
    return table


def _share(share: Share) -> tuple[str, ...]:
    if not share.batch:
        return ("–", "left out", "–", "–")
    limit = f"{share.power_limit_w:g} W"
    return (str(share.batch), limit, seconds(share.time_s), watts(share.power_w))


def _notes(answers: Sequence[Answer]) -> list[str]:
    notes: list[str] = []
    for each in answers:
        found = each.allocation
        if each.too_slow:
            notes.append(f"{each.method}: longer steps than asked for; this is the fastest it finds")
        if not found.exact and each.method != "baseline":
            gap = (found.cost - found.lower_bound) / found.cost
            notes.append(
                f"{each.method}: not known to be the best; no allocation costs less than "
                f"{found.lower_bound:.4f} {unit(each.objective)} ({gap:.2%} less)"
            )
        if each.tie is not None:
            notes.append(f"{each.method}: {_tie_words(each, each.tie)}")
    if any(each.standard_error is not None for each in answers):
        notes.append("±: standard error from the profiles' repeats")
    return notes


def _tie_words(answer: Answer, tie: Tie) -> str:
    """What was cheaper, by how little, and what the answer has before it."""
    chosen, cheapest, of = answer.allocation, tie.cheapest, unit(answer.objective)
    split = " + ".join(str(share.batch) for share in cheapest.shares)
    steps_s = [step_time_s(each.shares, answer.objective.all_reduce_s) for each in (chosen, cheapest)]
    less = plain(max(chosen.cost - cheapest.cost, 0.0))
    error = f"the error of {plain(tie.margin)} {of}" if tie.margin else "rounding"
    return (
        f"a tie. {split} samples cost {less} {of} less, within {error}, with steps of {seconds(steps_s[1])} "
        f"instead of {seconds(steps_s[0])}; of such answers the fastest inside what was profiled is given"
    )


def _front_table(front: Sequence[Corner], objective: Objective) -> Table:
    energy, limits = ("Σ P̄·t", "Σ P_limit·t") if objective.kind == "sum" else ("E", "T·ΣP_limit")
    table = _table("best for η", "allocation", energy, limits, "step")
    for corner in front:
        shares = corner.allocation.shares
        split = " + ".join(f"{share.batch}@{share.power_limit_w:g}W" for share in shares)
        table.add_row(
            f"{corner.eta_low:.3f} … {corner.eta_high:.3f}",
            Text(split, overflow="fold"),
            joules(corner.energy),
            joules(corner.limit_energy),
            seconds(step_time_s(shares, objective.all_reduce_s)),
        )
    return table


def _figure(value: float | None) -> str:
    return "–" if value is None else plain(value)


def _table(*headers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i < 2 else "right", no_wrap=header != "allocation")
    return table
