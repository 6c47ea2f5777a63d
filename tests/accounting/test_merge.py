"""Self-similar siblings become one, and nothing else does."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
from hypothesis import given

from footprints import assert_conserved, energies, footprint, footprints, row
from smaragdine.accounting.footprint import ROWS, Footprint
from smaragdine.accounting.merge import merge, merge_all, merge_edges, parse_rule, renaming
from smaragdine.errors import UserError


def made(*names: str) -> Footprint:
    """Energies 1, 2, 4, …: every sum tells what is in it."""
    return footprint([{"name": name, "energy_j": float(2**i)} for i, name in enumerate(names)])


def test_the_papers_example() -> None:
    made_of = footprint(
        [
            {"name": "bert/encoder/layer_0/output/dense/MatMul", "energy_j": 5.0},
            {"name": "bert/encoder/layer_1/output/dense/MatMul", "energy_j": 3.0},
        ]
    )
    assert energies(merge(made_of)) == {"bert/encoder/layer_*/output/dense/MatMul": 8.0}
    rule = parse_rule(r"layer_(\d+)=transformer")
    assert energies(merge(made_of, [rule])) == {"bert/encoder/transformer/output/dense/MatMul": 8.0}


def test_footprints_that_are_compared_merge_alike() -> None:
    """The one lacks an operation of a layer: that layer's others stay where the other one has them."""
    names = [f"net/layer_{n}/{op}" for n in range(4) for op in ("mm", "add")]
    whole = footprint([{"name": name, "energy_j": 1.0} for name in names])
    lacking = footprint([{"name": name, "energy_j": 1.0} for name in names if name != "net/layer_2/add"])
    both = merge_all([whole, lacking])
    assert [energies(each) for each in both] == [
        {"net/layer_*/mm": 4.0, "net/layer_*/add": 4.0},
        {"net/layer_*/mm": 4.0, "net/layer_*/add": 3.0},
    ]
    assert energies(merge(lacking)) != energies(both[1])


@pytest.mark.parametrize(
    ("names", "merged"),
    [
        (["layer/0/a", "layer/1/a"], {"layer/*/a": 3}),
        (["h.0/a", "h.11/a"], {"h.*/a": 3}),
        (["block3a/x", "block12a/x"], {"block*a/x": 3}),
        (["block3a/x", "block3b/x"], {"block3a/x": 1, "block3b/x": 2}),  # no index differs
        (["l_0/x", "l_1/y"], {"l_0/x": 1, "l_1/y": 2}),  # other operations
        (["MatMul_0", "MatMul_1"], {"MatMul_0": 1, "MatMul_1": 2}),  # operations, not layers
        (["a/MatMul_0", "a/MatMul_1"], {"a/MatMul_0": 1, "a/MatMul_1": 2}),
        (["dense/x", "dense_1/x"], {"dense/x": 1, "dense_1/x": 2}),  # one has no index
        (["a/l_0/x", "b/l_1/x"], {"a/l_0/x": 1, "b/l_1/x": 2}),  # no siblings
        (["l_0/x", "l_1/x", "l_2/x", "l_2/y"], {"l_*/x": 3, "l_2/x": 4, "l_2/y": 8}),  # the odd one stays
        (["s_0/b_0/x", "s_0/b_1/x", "s_1/b_0/x", "s_1/b_1/x"], {"s_*/b_*/x": 15}),
        (["s_0/b_0/x", "s_0/b_1/x", "s_1/b_0/x", "s_1/b_1/x", "s_1/b_2/x"], {"s_*/b_*/x": 31}),
        (["s1b1/x", "s1b2/x", "s2b1/x", "s2b2/x"], {"s*b*/x": 15}),  # two indices in one segment
        (["s1b1/x", "s2b2/x"], {"s1b1/x": 1, "s2b2/x": 2}),  # both indices differ
        (["l_0", "l_0/x", "l_1", "l_1/x"], {"l_*": 5, "l_*/x": 10}),  # an operation and a layer at once
        (["l_0", "l_0/x", "l_1/x"], {"l_0": 1, "l_0/x": 2, "l_1/x": 4}),
        (["l_0/x", "l_2/x", "l_1/y", "l_3/y"], {"l_*/x": 3, "l_*~2/y": 12}),  # two kinds take turns
        (["l_*/x", "l_0/x", "l_1/x"], {"l_*/x": 1, "l_*~2/x": 6}),  # the name is taken
        (["l_²/x", "l_³/x"], {"l_²/x": 1, "l_³/x": 2}),  # no decimal numbers
    ],
)
def test_what_merges_and_what_does_not(names: list[str], merged: dict[str, float]) -> None:
    found = merge(made(*names))
    assert energies(found) == merged
    assert_conserved(found)


def test_phases_are_part_of_what_is_alike() -> None:
    rows = [
        {"name": "l_0/x", "energy_j": 1.0, "phase": "forward"},
        {"name": "l_1/x", "energy_j": 2.0, "phase": "forward"},
        {"name": "l_1/x", "energy_j": 4.0, "phase": "backward"},
    ]
    assert set(energies(merge(footprint(rows)))) == {"l_0/x", "l_1/x"}
    alike = merge(footprint([*rows, {"name": "l_0/x", "energy_j": 8.0, "phase": "backward"}]))
    assert {(r["name"], r["phase"]): r["energy_j"] for r in alike.rows.to_pylist()} == {
        ("l_*/x", "forward"): 3.0,
        ("l_*/x", "backward"): 12.0,
    }


def test_layers_on_two_devices_merge_but_their_energies_stay_apart() -> None:
    rows = [
        {"name": "l_0/x", "energy_j": 1.0},
        {"name": "l_1/x", "energy_j": 2.0, "device": "gpu:1"},
    ]
    assert [(r["device"], r["name"], r["energy_j"]) for r in merge(footprint(rows)).rows.to_pylist()] == [
        ("gpu:0", "l_*/x", 1.0),
        ("gpu:1", "l_*/x", 2.0),
    ]


def test_figures_of_merged_rows() -> None:
    one = {"energy_j": 4.0, "busy_s": 2.0, "count": 3.0, "step_mean_j": 1.0, "step_std_j": 0.5}
    run = footprint(
        [
            {"name": "l_0/x", "uncertainty_j": 1.0, "basis": "repetition", **one},
            {"name": "l_1/x", "uncertainty_j": 2.0, "basis": "prior", **one},
            {"name": "alone", "uncertainty_j": 2.0, "basis": "prior", **one},
        ],
        idle_j=1.0,
        steps=4,
    )
    found = merge(run)
    assert row(found, "l_*/x") == {
        "device": "gpu:0",
        "name": "l_*/x",
        "phase": None,
        "energy_j": 8.0,
        "busy_s": 4.0,
        "count": 6.0,
        "uncertainty_j": 3.0,
        "basis": "prior",
        "step_mean_j": 2.0,
        "step_std_j": None,  # how the two vary together is not known
    }
    assert row(found, "alone") == row(run, "alone")
    assert found.devices == run.devices


def test_rules_come_first_and_reach_operations() -> None:
    run = made("l_0/x_1", "l_1/x_2", "m_0/y", "m_1/y")
    assert energies(merge(run, [parse_rule(r"x_\d+=x")])) == {"l_*/x": 3, "m_*/y": 12}
    by_stage = merge(run, [parse_rule(r"([lm])_\d=\1-1")])  # what a rule has named is not merged again
    assert energies(by_stage) == {"l-1/x_1": 1, "l-1/x_2": 2, "m-1/y": 12}


def test_the_first_rule_that_matches_in_full_wins() -> None:
    run = made("layer_0/x", "my_layer_1/x")
    rules = [parse_rule(r"layer_\d=a"), parse_rule(r".*layer_\d=b")]
    assert energies(merge(run, rules)) == {"a/x": 1, "b/x": 2}


@pytest.mark.parametrize("text", ["layer", "=x", "x=", "(=x", "a=b/c", r"a=\1", r"(a)=\2", r"a=\g<n>", ""])
def test_bad_rules_are_one_line(text: str) -> None:
    with pytest.raises(UserError) as error:
        parse_rule(text)
    assert "merge rule" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_pattern_may_have_an_equals_sign() -> None:
    assert energies(merge(made("k=1/x", "k=2/x"), [parse_rule(r"k=\d=k")])) == {"k/x": 3}


def test_edges_follow_the_names() -> None:
    run = made("emb/x", "l_0/x", "l_1/x")
    edges = pa.table({"source": ["emb/x", "l_0/x", "l_1/quiet"], "target": ["l_0/quiet", "l_1/x", "other"]})
    assert merge_edges(edges, renaming([run])).to_pylist() == [
        {"source": "emb/x", "target": "l_*/quiet"},
        {"source": "l_*/x", "target": "l_*/x"},
        {"source": "l_*/quiet", "target": "other"},
    ]


def test_deep_names_and_no_names() -> None:
    deep = "/".join(["a"] * 5000)
    assert energies(merge(made(f"l_0/{deep}", f"l_1/{deep}"))) == {f"l_*/{deep}": 3}
    assert merge(footprint([])).rows.equals(ROWS.empty_table())


@given(footprints())
def test_merging_keeps_totals_and_is_done_at_once(run: Footprint) -> None:
    found = merge(run)
    assert found.devices == run.devices
    assert_conserved(found)
    for quantity in ("energy_j", "busy_s", "count"):
        before, after = (math.fsum(table[quantity].to_pylist()) for table in (run.rows, found.rows))
        assert after == pytest.approx(before)
    assert set(energies(merge(found))) == set(energies(found))
