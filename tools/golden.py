"""Keeps what every verb says of a dozen recordings, and compares it after a change that may change no figure.

    python tools/golden.py make FOLDER      # records a dozen programs, and keeps what is said of each
    python tools/golden.py compare FOLDER   # asks the code as it is now; exit code 1 where an answer differs

The recordings are of all kinds: every framework, killed, damaged, without events, several ranks, a log of
another tool. What is kept: `show --json`, `report --json` and its text, `account --json` with its tree,
`compare --json`, every export, and the data of the HTML page.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMARAGDINE = [sys.executable, "-m", "smaragdine"]
QUIET = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "COLUMNS": "160"}

TORCH = """
import sys, time, torch
import smaragdine
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.DataLoader(torch.randn(640, 64), batch_size=32)
for epoch in range(int(sys.argv[1])):
    for batch in data:
        with smaragdine.region("load"):
            time.sleep(0.002)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if "die" in sys.argv and epoch == 1:
        raise SystemExit(3)
    if "wait" in sys.argv and epoch == 2:
        print("waiting", flush=True)
        time.sleep(600)
"""
KERAS = """
import os, keras, numpy as np
model = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(8)])
model.compile("adam", "mse")
model.fit(np.random.rand(640, 32), np.random.rand(640, 8), batch_size=32, epochs=3, verbose=0)
model.evaluate(np.random.rand(64, 32), np.random.rand(64, 8), verbose=0)
"""
JAX = """
import jax, jax.numpy as jnp, smaragdine
def loss(w, x):
    with jax.named_scope("layer"):
        return jnp.square(jnp.tanh(x @ w) @ w.T).mean()
step = jax.jit(jax.value_and_grad(loss))
w, x = jnp.ones((128, 128)), jnp.ones((64, 128))
for number in range(60):
    value, g = step(w, x)
    w = w - 0.01 * g
    value.block_until_ready()
    smaragdine.mark("step_end", number)
"""
TF1 = """
import tensorflow.compat.v1 as tf, numpy as np
tf.disable_eager_execution()
x = tf.placeholder(tf.float32, [None, 32]); w = tf.get_variable("dense/w", [32, 32])
loss = tf.reduce_mean(tf.square(tf.matmul(x, w)))
train = tf.train.AdamOptimizer().minimize(loss, global_step=tf.train.get_or_create_global_step())
with tf.train.MonitoredTrainingSession() as session:
    for _ in range(60):
        session.run(train, {x: np.ones((64, 32), np.float32)})
"""
RANKS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.set_num_threads(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(40):
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
dist.destroy_process_group()
"""
NO_FRAMEWORK = "import time\nend = time.time() + 1.5\nwhile time.time() < end: sum(range(1000))\n"


def _run(runs: Path, name: str, script: str, *words: str, options: tuple[str, ...] = (), **env: str) -> None:
    path = runs / f"{name}_program.py"  # torch.py would stand before torch
    path.write_text(script)
    command = [*SMARAGDINE, "run", "-o", str(runs / name), *options, str(path), *words]
    subprocess.run(command, env={**os.environ, **QUIET, **env}, capture_output=True, check=False)


def _killed(runs: Path) -> None:
    path = runs / "killed_program.py"
    path.write_text(TORCH)
    words = [*SMARAGDINE, "run", "-o", str(runs / "killed"), str(path), "9", "wait"]
    env = {**os.environ, **QUIET}
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, start_new_session=True) as run:
        assert run.stdout is not None
        run.stdout.readline()
        time.sleep(1)
        os.killpg(run.pid, signal.SIGKILL)


def _ranks(runs: Path) -> None:
    path = runs / "ranks_program.py"
    path.write_text(RANKS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = [*SMARAGDINE, "run", "-o", str(runs / "ranks"), "--", *torchrun]
    words += ["--master-port", "29611", str(path)]
    subprocess.run(words, env={**os.environ, **QUIET}, capture_output=True, check=False)


def _by_hand(runs: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    import recordings
    import simulated_runs
    import traced_recording

    recordings.make(runs / "by_hand")
    traced_recording.ten_and_three(runs / "ten_and_three")
    traced_recording.with_a_compilation(runs / "compilation")
    traced_recording.slow_input(runs / "slow_input")
    for number in range(3):
        model = simulated_runs.make_model(5, "gpu")
        simulated_runs.record_run(runs / f"gpu_{number}", model, number)
        wider = simulated_runs.wider(model, simulated_runs.layer_of(5))
        simulated_runs.record_run(runs / f"wider_{number}", wider, 9 + number)


def _damaged(runs: Path) -> None:
    shutil.copytree(runs / "torch", runs / "damaged")
    table = runs / "damaged" / "activity.arrows"
    table.write_bytes(table.read_bytes()[:5000])
    shutil.copytree(runs / "keras-jax", runs / "flipped")
    table = runs / "flipped" / "events.arrows"
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 16
    table.write_bytes(bytes(data))


def make(folder: Path) -> None:
    runs = folder / "recordings"
    runs.mkdir(parents=True)
    makers: list[Callable[[], None]] = [
        lambda: _run(runs, "torch", TORCH, "5"),
        lambda: _run(runs, "untraced", TORCH, "4", options=("--trace", "off")),
        lambda: _run(runs, "crashed", TORCH, "4", "die"),
        lambda: _run(runs, "keras-jax", KERAS, KERAS_BACKEND="jax"),
        lambda: _run(runs, "keras-torch", KERAS, KERAS_BACKEND="torch"),
        lambda: _run(runs, "keras-tensorflow", KERAS, KERAS_BACKEND="tensorflow"),
        lambda: _run(runs, "jax", JAX),
        lambda: _run(runs, "tf1", TF1),
        lambda: _run(runs, "plain", NO_FRAMEWORK),
        lambda: _killed(runs),
        lambda: _ranks(runs),
    ]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(each) for each in makers]:
            done.result()
    _by_hand(runs)
    _damaged(runs)
    said = say(runs)
    (folder / "golden.json").write_text(json.dumps(said, indent=1))
    print(f"{len(said)} answers on {len(list(_recordings(runs)))} recordings kept in {folder}")


def _recordings(runs: Path) -> Iterator[Path]:
    return (path for path in sorted(runs.iterdir()) if path.is_dir())


EXPORTS = ("csv", "parquet", "perfetto", "speedscope", "prometheus", "tensorboard", "latex", "markdown")


def say(runs: Path) -> dict[str, str]:
    """What is said, by recording and verb."""
    questions: dict[str, list[str]] = {}
    for run in _recordings(runs):
        name = run.name
        questions[f"{name}: show"] = ["show", name, "--json"]
        questions[f"{name}: shown"] = ["show", name]
        questions[f"{name}: report"] = ["report", name, "--json"]
        questions[f"{name}: reported"] = ["report", name, "--by", "layer"]
        questions[f"{name}: account"] = ["account", name, "--json"]
        questions[f"{name}: accounted"] = ["account", name, "--summary", "--tree"]
        questions[f"{name}: html"] = ["report", name, "--html", "{out}/page.html"]
        for to in EXPORTS:
            questions[f"{name}: export {to}"] = ["export", name, "--to", to, "-o", "{out}/exported"]
    sides = [f"gpu_{n}" for n in range(3)], [f"wider_{n}" for n in range(3)]
    questions["compare"] = ["compare", *sides[0], "--against", *sides[1], "--json"]
    questions["compared"] = ["compare", *sides[0], "--against", *sides[1], "--by", "layer"]
    questions["two pages"] = ["report", "gpu_0", "wider_0", "--html", "{out}/page.html"]
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(lambda words: _answer(runs, words), questions.values())
        return dict(zip(questions, answers, strict=True))


def _answer(runs: Path, words: list[str]) -> str:
    with tempfile.TemporaryDirectory() as out:
        asked = [word.replace("{out}", out) for word in words]
        env = {**os.environ, **QUIET}
        done = subprocess.run(
            [*SMARAGDINE, *asked], cwd=runs, env=env, capture_output=True, text=True, check=False
        )
        said = f"exit {done.returncode}\n{done.stdout}\n{done.stderr}".replace(out, "OUT")
        for path in sorted(Path(out).rglob("*")):
            if path.is_file():
                said += f"\n{re.sub('[0-9]{9,}.*', 'N', path.name)} {_content(path)}"
        # The time it took, and where the page's tool came from, differ from one answer to the next.
        return re.sub(r"in \d+(\.\d+)? ?m?s\b", "in TIME", said)


def _content(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix == ".html":
        # Of a page the data alone: its looks may change.
        found = re.findall(rb'<script[^>]*type="application/[^"]*"[^>]*>(.*?)</script>', data, re.S)
        assert found, "no data in the page"
        data = b"".join(found)
    if "tfevents" in path.name:
        return f"{len(data)} bytes"  # it holds the name of the machine and the time it was made
    return hashlib.sha256(data).hexdigest()


def compare(folder: Path) -> int:
    before = json.loads((folder / "golden.json").read_text())
    now = say(folder / "recordings")
    different = [key for key in before if before[key] != now.get(key)]
    for key in different:
        print(f"--- {key}")
        for old, new in zip(before[key].split("\n"), now.get(key, "").split("\n"), strict=False):
            if old != new:
                print(f"  before {old[:300]}\n  now    {new[:300]}")
                break
    print(f"{len(before)} answers compared, {len(different)} differ")
    return 1 if different else 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make", where]:
            make(Path(where).resolve())
        case ["compare", where]:
            sys.exit(compare(Path(where).resolve()))
        case _:
            sys.exit(__doc__)
