"""Launchers: hooks reach every Python child, and each rank's marks carry its rank."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

from cli import show_json, smaragdine, write_script

BIN = Path(sys.executable).parent

RANKS = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=torch.utils.data.DistributedSampler(data))
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
# When the model outlives its group PyTorch now and then aborts ("terminate called without …").
del model, optimizer
dist.barrier()
dist.destroy_process_group()
"""

ACCELERATED = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), 0.1), torch.utils.data.DataLoader(data, batch_size=4)
)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
"""

MARKS = """
import os, sys
with open(os.path.join(os.environ["SMARAGDINE_SPOOL"], "marks-%d.jsonl" % os.getpid()), "a") as spool:
    spool.write("")
print(sys.version_info[:2], "_smaragdine_hook" in sys.modules)
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
@pytest.mark.parametrize(
    "launcher",
    [
        ["torchrun", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", "29517"],
        ["python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29521"],
    ],
    ids=["torchrun", "python -m"],
)  # fmt: skip
def test_each_rank_marks_its_own_epochs(tmp_path: Path, launcher: list[str]) -> None:
    write_script(tmp_path / "train.py", RANKS)
    env = {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}:/usr/bin:/bin"}
    done = smaragdine("run", "-o", "out", *launcher, "train.py", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = show_json(tmp_path / "out")
    ends = Counter(mark["rank"] for mark in shown["marks"] if mark["name"] == "epoch_end")
    assert ends == {0: 2, 1: 2}
    steps = Counter(mark["rank"] for mark in shown["marks"] if mark["name"] == "step_end")
    assert steps == {0: 4, 1: 4}
    # Both ranks train the same epochs at the same time: two epochs, not four.
    assert [epoch["index"] for epoch in shown["epochs"]] == [0, 1]


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
def test_accelerate_launch(tmp_path: Path) -> None:
    write_script(tmp_path / "train.py", ACCELERATED)
    words = ["launch", "--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"]
    env = {"PATH": f"{BIN}:/usr/bin:/bin", "HF_HOME": str(tmp_path / "hf")}
    done = smaragdine(
        "run", "-o", "out", "accelerate", *words, "--dynamo_backend", "no", "train.py", env=env, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    shown = show_json(tmp_path / "out")
    assert [epoch["index"] for epoch in shown["epochs"]] == [0, 1]
    assert [mark["index"] for mark in shown["marks"] if mark["name"] == "step_end"] == list(range(8))


@pytest.mark.skipif(not (BIN / "uv").exists() and shutil.which("uv") is None, reason="needs uv")
def test_uv_run_needs_nothing_of_ours_in_its_environment(tmp_path: Path) -> None:
    write_script(tmp_path / "train.py", MARKS)
    uv = str(BIN / "uv") if (BIN / "uv").exists() else "uv"
    interpreter = Path(sys.executable).resolve()
    words = ["run", "--no-project", "--offline", "--no-config", "--isolated", "--python", str(interpreter)]
    env = {"UV_CACHE_DIR": str(tmp_path / "cache"), "UV_PYTHON_DOWNLOADS": "never"}
    done = smaragdine("run", "-o", "out", uv, *words, "train.py", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "True" in done.stdout
    assert show_json(tmp_path / "out")["status"] == "complete"
