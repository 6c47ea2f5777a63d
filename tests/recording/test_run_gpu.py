"""`smaragdine run` on GPUs: the shipped binding on the fake library, against the exact energy."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

import smaragdine as package
from cli import alive, finish, info, show_json, smaragdine, start, wait_for
from nvml_fake import GpuSpec, energy_j, nvml_environment, write_spec

SQUARE = GpuSpec(low_w=60, high_w=300, period_ms=200, duty=0.25)
STEADY = GpuSpec(high_w=150)


def gpus(tmp_path: Path, *specs: GpuSpec, cuda: bool = False) -> dict[str, str]:
    env = nvml_environment(tmp_path, specs, cuda=cuda)
    return {name: env[name] for name in ("LD_LIBRARY_PATH", "FAKE_NVML")}


def record(tmp_path: Path, env: dict[str, str], seconds: float, *options: str) -> Path:
    out = tmp_path / "out"
    done = smaragdine("run", "-o", out, *options, "--", "sleep", str(seconds), env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return out


def test_energy_of_two_gpus_is_exact(tmp_path: Path) -> None:
    out = record(tmp_path, gpus(tmp_path, SQUARE, STEADY), 4.3)
    about = info(out)
    shown = show_json(out)
    for n, spec in enumerate((SQUARE, STEADY)):
        true_j = energy_j(spec, about["begin_ns"], about["end_ns"])
        device = shown["devices"][f"gpu:{n}"]
        assert device["energy_j"] == pytest.approx(true_j, rel=0.01)
        assert device["provenance"] == "measured"
        assert device["missing_s"] == 0
    assert shown["devices"]["gpu:1"]["peak_w"] == pytest.approx(150, rel=0.01)
    assert [gpu["uuid"] for gpu in about["host"]["gpus"]] == [SQUARE.at(0).uuid, STEADY.at(1).uuid]


def test_telemetry_has_what_the_table_of_a_wrapped_run_needs(tmp_path: Path) -> None:
    out = record(tmp_path, gpus(tmp_path, STEADY), 1.5, "--pcie")
    recorded = set(package.open(out).telemetry["quantity"].to_pylist())
    assert recorded >= {
        "gpu_utilisation",
        "memory_utilisation",
        "sm_clock",
        "memory_clock",
        "performance_state",
        "temperature",
        "power_limit",
        "pcie_tx",
        "pcie_rx",
    }


def test_pcie_is_off_unless_asked_for(tmp_path: Path) -> None:
    out = record(tmp_path, gpus(tmp_path, STEADY), 1.0)
    assert "pcie_tx" not in package.open(out).telemetry["quantity"].to_pylist()


def test_a_gpu_that_drops_off_the_bus_ends_its_channel_not_the_run(tmp_path: Path) -> None:
    env = gpus(tmp_path, STEADY, SQUARE)
    process = start("run", "-o", tmp_path / "out", "--", "sleep", "5", env=env, cwd=tmp_path)
    told = tmp_path / "out" / "run.json"
    wait_for(lambda: told.exists() and "begin_ns" in told.read_text())
    time.sleep(1.5)
    write_spec(Path(env["FAKE_NVML"]), [dataclasses.replace(STEADY, lost=True), SQUARE])
    code, _, stderr = finish(process)
    assert code == 0
    assert "gpu:0" in stderr
    shown = show_json(tmp_path / "out")
    assert "sensor_lost" in [mark["name"] for mark in shown["marks"]]
    assert shown["devices"]["gpu:0"]["missing_s"] > 1
    assert shown["devices"]["gpu:0"]["mean_w"] == pytest.approx(150, rel=0.02)
    assert shown["devices"]["gpu:1"]["missing_s"] == 0


def test_only_the_visible_gpu_is_recorded(tmp_path: Path) -> None:
    env = {**gpus(tmp_path, STEADY, SQUARE), "CUDA_VISIBLE_DEVICES": "1"}
    shown = show_json(record(tmp_path, env, 1.0))
    assert [name for name in shown["devices"] if name.startswith("gpu")] == ["gpu:1"]


def test_mig_is_said_clearly(tmp_path: Path) -> None:
    env = gpus(tmp_path, dataclasses.replace(STEADY, mig=True))
    said = " ".join(smaragdine("doctor", env=env, cwd=tmp_path).stdout.split())
    assert "MIG" in said
    assert "gpu:0 power" in said


def test_baseline_with_context_attaches_a_process_to_every_gpu(tmp_path: Path) -> None:
    env = gpus(tmp_path, STEADY, STEADY, cuda=True)
    done = smaragdine(
        "baseline", "--seconds", "1", "--with-context", "-o", tmp_path / "idle", env=env, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    held = [line.split() for line in Path(env["FAKE_NVML"] + ".contexts").read_text().splitlines()]
    assert sorted(device for _, device in held) == ["0", "1"]
    assert not any(alive(int(pid)) for pid, _ in held)
    assert show_json(tmp_path / "idle")["devices"]["gpu:0"]["mean_w"] == pytest.approx(150, rel=0.02)


def test_baseline_with_context_but_no_cuda_is_one_line(tmp_path: Path) -> None:
    done = smaragdine("baseline", "--seconds", "1", "--with-context", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "libcuda" in done.stderr
    assert not os.path.exists(tmp_path / "runs")
