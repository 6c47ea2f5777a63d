"""PyTorch traced from inside: names, phases and counts as the model is written; the program unchanged."""

import collections
import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

import warm_torch
from cli import TIMEOUT_S
from smaragdine.tracing.coverage import coverage_of
from smaragdine.tracing.hook import environment as hook_environment
from smaragdine.tracing.kineto.compiled import CallFollower, Compiled
from smaragdine.tracing.kineto.window import events_of
from smaragdine.tracing.table import events_table

pytest.importorskip("torch")

HOOK = pathlib.Path(hook_environment.__file__).parent
STEPS = 4

# Without a file to write, the same program bare: start and stop do nothing.
PRELUDE = """
import hashlib, json, sys, time, warnings
import torch, torch.nn as nn, torch.nn.functional as F
torch.set_num_threads(1)
torch.manual_seed(0)
RAW = sys.argv[1] if len(sys.argv) > 1 else None
if RAW:
    import importlib.util
    spec = importlib.util.spec_from_file_location(
        "_smaragdine_hook", HOOK + "/__init__.py", submodule_search_locations=[HOOK])
    sys.modules["_smaragdine_hook"] = importlib.util.module_from_spec(spec)
    from _smaragdine_hook.state import process
    from _smaragdine_hook.torch import tracer

class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        return self.out(torch.softmax(q @ k.transpose(1, 2), -1) @ v)

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
    def forward(self, x):
        x.argmax(-1)  # makes no backward node, and so shares its number with the norm, which does
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))

class Model(nn.Module):
    def __init__(self, width=16, checkpoint=False):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, 4)
        self.checkpoint = checkpoint
    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            if self.checkpoint:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.checkpoint == "reentrant")
            else:
                x = layer(x)
        return self.head(self.dropout(x).mean(1))

def train(model, steps=4, run=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    marks = []
    for index in range(steps):
        begin_ns = time.time_ns()
        x, y = torch.randn(3, 5, 8), torch.randint(4, (3,))
        loss = F.cross_entropy((model if run is None else run)(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        marks.append([index, begin_ns, time.time_ns()])
    return marks

def start():
    return tracer.start() if RAW else None

def stop(session, marks=()):
    if not RAW:
        return
    facts = tracer.stop(session, RAW)
    with open(RAW + ".meta", "w") as file:
        json.dump(dict({"steps": list(marks)}, **facts), file)

def result(model, **more):
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    noise = torch.rand(1).item()
    module = nn.modules.module
    left = [*module._global_forward_hooks, *module._global_forward_pre_hooks,
            *module._global_forward_hooks_with_kwargs, *module._global_forward_hooks_always_called]
    print(json.dumps(dict(more, weights=hashlib.sha256(weights).hexdigest(), noise=noise, left=left,
                          filters=len(warnings.filters), profiling=torch.autograd._profiler_enabled())))
"""

PLAIN = """
model = Model()
session = start()
stop(session, train(model))
result(model)
"""


def program(tmp_path, body, raw=None, options=()):
    script = tmp_path / "program.py"
    script.write_text(f"HOOK = {str(HOOK)!r}\n" + PRELUDE + textwrap.dedent(body))
    words = [str(raw)] if raw else []
    if options:
        command = [sys.executable, *options, str(script), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    else:
        done = warm_torch.run(script, words, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def traced(tmp_path, body):
    """The result, which must be the one of the bare program, the events and their coverage."""
    raw = tmp_path / "torch.json"
    bare, result = program(tmp_path, body), program(tmp_path, body, raw)
    assert result == bare
    assert result["left"] == []
    assert not result["profiling"]
    meta = json.loads((tmp_path / "torch.json.meta").read_text())
    return result, *events_of(raw, meta)


def counted(table, operations):
    rows = table.select(["name", "phase"]).to_pylist()
    return collections.Counter(
        (row["name"], row["phase"]) for row in rows if row["name"].rsplit("/", 1)[1] in operations
    )


def linears():
    layers = [
        f"Model/layers/{n}/{part}"
        for n in range(2)
        for part in (*(f"attention/{name}" for name in ("query", "key", "value", "out")), "mlp/0", "mlp/2")
    ]
    return ["Model/embed", *layers, "Model/head"]


def products(steps, recomputed=0):
    """Each Linear once forward and twice backward; of the first, the input needs no gradient."""
    expected = collections.Counter()
    for path in linears():
        expected[f"{path}/addmm", "forward"] = steps
        expected[f"{path}/mm", "backward"] = steps * (1 if path == "Model/embed" else 2)
        if "layers" in path:
            expected[f"{path}/addmm", "backward"] = steps * recomputed
    for n in range(2):
        expected[f"Model/layers/{n}/attention/bmm", "forward"] = steps * 2
        expected[f"Model/layers/{n}/attention/bmm", "backward"] = steps * (4 + 2 * recomputed)
    return +expected


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    _, table, coverage = traced(tmp_path_factory.mktemp("plain"), PLAIN)
    return table, coverage


def test_every_product_is_where_it_is_written(plain):
    table, coverage = plain
    assert counted(table, {"addmm", "mm", "bmm"}) == products(STEPS)
    norms = {f"Model/layers/{n}/norm{k}" for n in range(2) for k in (1, 2)}
    assert counted(table, {"native_layer_norm", "native_layer_norm_backward"}) == {
        **{(f"{path}/native_layer_norm", "forward"): STEPS for path in norms},
        **{(f"{path}/native_layer_norm_backward", "backward"): STEPS for path in norms},
    }
    assert counted(table, {"gelu", "gelu_backward"}) == {
        (f"Model/layers/{n}/mlp/1/{name}", phase): STEPS
        for n in range(2)
        for name, phase in (("gelu", "forward"), ("gelu_backward", "backward"))
    }
    # One gradient per parameter, where the parameter is.
    accumulated = {(f"{path}/AccumulateGrad", "backward"): 2 * STEPS for path in {*linears(), *norms}}
    assert counted(table, {"AccumulateGrad"}) == accumulated
    # The batch is made and the loss computed outside any module.
    assert counted(table, {"randn", "cross_entropy_loss"}) == {
        ("program/randn", "other"): STEPS,
        ("program/cross_entropy_loss", "forward"): STEPS,
    }
    assert coverage.busy_ns > 0
    assert coverage.placed_ns >= 0.99 * coverage.busy_ns
    assert (coverage.steps, coverage.counts_divide) == (STEPS, True)


def test_optimizer_is_a_phase_and_wrappers_are_no_events(plain):
    rows = plain[0].to_pylist()
    optimizer = {row["name"] for row in rows if row["phase"] == "optimizer"}
    assert "optimizer/AdamW/addcdiv_" in optimizer
    assert all(name.startswith("optimizer/AdamW/") for name in optimizer)
    assert all(row["phase"] == "optimizer" for row in rows if row["name"].startswith("optimizer/"))
    assert not [row for row in rows if "smaragdine:" in row["name"] or "evaluate_function" in row["name"]]
    assert {row["device"] for row in rows} == {"cpu:0"}
    assert {row["step"] for row in rows if row["phase"] != "other"} == set(range(STEPS))


@pytest.mark.parametrize("kind", ["reentrant", "saved"])
def test_what_is_recomputed_is_backward_work_of_its_own_layer(tmp_path, kind):
    # The reentrant kind asks for an input that needs a gradient: the embedding's output does.
    body = f"""
    import torch.utils.checkpoint
    model = Model(checkpoint={kind!r})
    session = start()
    stop(session, train(model))
    result(model)
    """
    _, table, coverage = traced(tmp_path, body)
    assert counted(table, {"addmm", "mm", "bmm"}) == products(STEPS, recomputed=1)
    assert coverage.placed_ns >= 0.99 * coverage.busy_ns
    assert coverage.counts_divide


def test_a_forward_that_raises_leaves_the_next_paths_right(tmp_path):
    body = """
    model = Model()
    session = start()
    raised = 0
    for _ in range(2):
        try:
            model(torch.randn(3, 5, 7))  # the embedding takes 8
        except RuntimeError:
            raised += 1
    stop(session, train(model))
    result(model, raised=raised)
    """
    result, table, _ = traced(tmp_path, body)
    assert result["raised"] == 2
    inside = table.filter(table["step"].is_valid())
    assert counted(inside, {"addmm", "mm", "bmm"}) == products(STEPS)
    assert counted(inside, {"cross_entropy_loss"}) == {("program/cross_entropy_loss", "forward"): STEPS}


def test_roots_wrappers_and_modules_made_on_the_way(tmp_path):
    body = """
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.known = nn.Linear(4, 4)
            self.loose = [nn.Linear(4, 4)]
        def forward(self, x):
            return nn.ReLU()(self.loose[0](self.known(x)))
    first, second, wrapped = Odd(), Odd(), nn.DataParallel(nn.Sequential(nn.Linear(4, 4)))
    session = start()
    for model in (first, second, wrapped, first):
        model(torch.ones(1, 4))
    nn.CrossEntropyLoss()(first(torch.ones(1, 4)), torch.zeros(1, dtype=torch.long))
    first.grown = nn.Linear(4, 4)
    first.loose = [first.grown]
    first(torch.ones(1, 4))
    stop(session)
    result(first)
    """
    _, table, _ = traced(tmp_path, body)
    assert counted(table, {"addmm", "relu", "cross_entropy_loss"}) == {
        ("Odd/known/addmm", "forward"): 4,
        ("Odd/Linear/addmm", "forward"): 3,
        ("Odd/grown/addmm", "forward"): 1,
        ("Odd/ReLU/relu", "forward"): 4,
        ("Odd_1/known/addmm", "forward"): 1,
        ("Odd_1/Linear/addmm", "forward"): 1,
        ("Odd_1/ReLU/relu", "forward"): 1,
        ("Sequential/0/addmm", "forward"): 1,
        ("CrossEntropyLoss/cross_entropy_loss", "forward"): 1,
    }


def test_threads_have_stacks_and_sequences_of_their_own(tmp_path):
    body = """
    import threading
    def work(model):
        model(torch.ones(2, 4)).sum().backward()
    deep = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    models = [deep, nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2))]
    session = start()
    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    stop(session)
    result(models[0])
    """
    _, table, _ = traced(tmp_path, body)
    names = {name.rsplit("/", 1)[0]: n for (name, phase), n in counted(table, {"mm"}).items()}
    singles = sorted(n for path, n in names.items() if path.count("/") == 0)
    assert singles == [1]
    # Which of two roots of one class is numbered depends on the threads.
    assert sorted(names.values()) == [1, 1, 1, 2]
    assert "unplaced" not in names


def test_beside_a_profiler_of_the_program_we_decline(tmp_path):
    body = """
    import threading
    said = []
    def attempt():
        if RAW:
            try:
                start()
            except RuntimeError as error:
                said.append(str(error))
    model = Model()
    with torch.profiler.profile() as own:
        attempt()
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        train(model)
    print(said, len(own.events()), file=open("said", "w"))
    result(model)
    """
    raw = tmp_path / "torch.json"
    bare = quiet(tmp_path, body)
    _, events = (tmp_path / "said").read_text().rsplit(" ", 1)
    assert quiet(tmp_path, body, raw) == bare
    said = (tmp_path / "said").read_text()
    assert said.count("a PyTorch profiler is already running") == 2
    assert said.rsplit(" ", 1)[1] == events
    assert not raw.exists()


@pytest.mark.parametrize("where", ["here", "in a thread"])
def test_a_profiler_the_program_begins_ends_ours(tmp_path, where):
    body = f"""
    import threading
    def own():
        with torch.profiler.profile() as profile:
            train(model, 1)
        counts.append(len(profile.events()))
    counts, said = [], ""
    with torch.profiler.profile():
        pass  # in a thread of its own the first one would complain on stderr
    model = Model()
    session = start()
    if {where == "here"}:
        own()
    else:
        thread = threading.Thread(target=own)
        thread.start()
        thread.join()
    train(model)
    if RAW:
        try:
            stop(session)
        except RuntimeError as error:
            said = str(error)
        again = start()
        again.abandon("enough")
    print(said, file=open("said", "w"))
    result(model, counts=counts)
    """
    raw = tmp_path / "torch.json"
    bare = quiet(tmp_path, body)
    assert quiet(tmp_path, body, raw) == bare
    assert (tmp_path / "said").read_text() == "the program began a profiler of its own\n"
    assert not raw.exists()


def quiet(tmp_path, body, raw=None):
    """A program that profiles on its own; Kineto says so on stderr."""
    return program(
        tmp_path, "import os; os.environ['KINETO_LOG_LEVEL'] = '99'\n" + textwrap.dedent(body), raw
    )


def test_a_forked_child_records_nothing(tmp_path):
    body = """
    import os
    model = Model()
    session = start()
    pid = os.fork()
    if not pid:
        model(torch.randn(3, 5, 8)).sum().backward()
        module = nn.modules.module
        left = [*module._global_forward_hooks, *module._global_forward_pre_hooks]
        os._exit(len(left))
    status = os.waitpid(pid, 0)[1]
    stop(session, train(model))
    result(model, status=status)
    """
    result, table, _ = traced(tmp_path, body)
    assert result["status"] == 0
    assert counted(table, {"addmm", "mm", "bmm"}) == products(STEPS)


@pytest.mark.parametrize("library", [True, False])
def test_a_forked_childs_own_profiler_records(tmp_path, library):
    body = f"""
    import os
    from torch.profiler import profile
    model, x = Model(), torch.randn(3, 5, 8)
    def own():
        with profile() as profiler:
            model(x)
        return sum(event.name.startswith("aten::") for event in profiler.events())
    expected = own()
    if RAW and not {library}:
        process.torch.functions = False  # the functions, as on other processors
    session = start()
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writer, b"%d %d" % (own(), own()))
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    seen = [int(word) for word in os.read(reader, 99).split()]
    stop(session)
    result(model, status=status, expected=expected, seen=seen)
    """
    found = quiet(tmp_path, body, tmp_path / "raw.json")
    assert found["status"] == 0
    assert found["seen"] == [found["expected"]] * 2


def test_the_fork_of_a_loaders_workers_does_not_disturb(tmp_path):
    body = """
    from torch.utils.data import DataLoader, TensorDataset
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randn(12, 5, 8), torch.randint(4, (12,))), 3, num_workers=2)
    session = start()
    marks = []
    for index, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        marks.append([index, None, time.time_ns()])
    stop(session, marks)
    result(model)
    """
    _, table, _ = traced(tmp_path, body)
    assert counted(table, {"addmm", "mm", "bmm"}) == products(STEPS)


def test_nobody_waits_for_the_gpu_while_a_graph_is_captured(tmp_path):
    """Which would break it, in any thread."""
    body = """
    import threading
    from _smaragdine_hook.torch import conflicts
    model, waited, here = Model(), [], []
    torch.cuda.is_initialized = lambda: True
    torch.cuda.is_current_stream_capturing = lambda: bool(here)
    torch.cuda.synchronize = lambda: waited.append(1)
    class Graphs:
        class CUDAGraph:
            def capture_begin(self, pool=None): pass
            def capture_end(self): raise RuntimeError
    conflicts.patch_graphs(Graphs)

    def asked():
        return [tracer.ready(), tracer.may_stop()]

    here.append(1)
    captured = [asked()]
    here.clear()
    graph = Graphs.CUDAGraph()
    thread = threading.Thread(target=graph.capture_begin)
    thread.start()
    thread.join()
    captured.append(asked())
    called = []
    take_back = tracer.at_next_call(lambda: called.append(1))
    model(torch.randn(3, 5, 8))
    captured.append(list(called))
    try:
        graph.capture_end()
    except RuntimeError:
        pass
    captured.append(asked())
    model(torch.randn(3, 5, 8))
    captured.append(list(called))
    session = start()
    captured.append(len(waited))
    here.append(1)
    session.end()
    captured.append(len(waited))
    result(model, captured=captured)
    """
    found = program(tmp_path, body, tmp_path / "raw.json")
    assert found["captured"] == [[False, False], [False, False], [], [True, True], [1], 1, 1]


def test_a_model_changed_and_a_step_that_fails_between_others(tmp_path):
    body = """
    model = Model()
    def fails(gradient):
        raise ValueError("in backward")
    session = start()
    marks = train(model, 1)
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]
    model.head = nn.Linear(16, 4)
    marks += train(model, 1)
    raised = 0
    out = model.layers[0](torch.randn(3, 5, 16))
    out.register_hook(fails)
    try:
        model.layers[1](out).sum().backward()
    except ValueError:
        raised += 1
    marks += train(model, 2)
    stop(session, [[n, *mark[1:]] for n, mark in enumerate(marks)])
    result(model, raised=raised)
    """
    result, table, coverage = traced(tmp_path, body)
    assert result["raised"] == 1
    inside = table.filter(table["step"].is_valid())
    assert counted(inside, {"addmm", "mm", "bmm"}) == products(STEPS)
    assert coverage.counts_divide


def test_casts_of_autocast_belong_to_the_module_that_needs_them(tmp_path):
    body = """
    model = Model()
    session = start()
    marks = train(model, run=torch.autocast("cpu", torch.bfloat16)(model))
    stop(session, marks)
    result(model)
    """
    _, table, coverage = traced(tmp_path, body)
    assert counted(table, {"addmm", "mm", "bmm"}) == products(STEPS)
    casts = counted(table, {"_to_copy"})
    # Weights, bias and input of the first; of the others the input is bfloat16 already, or cast for several.
    assert casts["Model/embed/_to_copy", "forward"] == 3 * STEPS
    for path in linears():
        assert casts[f"{path}/_to_copy", "forward"] >= 2 * STEPS
        assert casts[f"{path}/_to_copy", "backward"] >= 2 * STEPS
    assert not [name for name, _ in casts if name.startswith(("unplaced", "framework"))]
    assert coverage.placed_ns >= 0.99 * coverage.busy_ns


def test_a_slice_begun_and_ended_by_another_thread_in_the_middle_of_a_call(tmp_path):
    body = """
    import threading
    arrived, go = threading.Semaphore(0), threading.Semaphore(0)
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))
        def forward(self, x):
            x = self.first(x) * 2
            arrived.release()
            go.acquire()
            return self.second(x)
    model = Gated()
    def work():
        for _ in range(6):
            model(torch.ones(2, 4)).sum().backward()
    thread = threading.Thread(target=work)
    thread.start()
    for window in range(2):
        arrived.acquire()
        session = start()
        for _ in range(2):
            go.release()
            arrived.acquire()
        stop(session)  # in the third call; the second window is the one that is kept
        go.release()
    thread.join()
    result(model)
    """
    _, table, coverage = traced(tmp_path, body)
    assert counted(table, {"addmm", "mm", "mul"}) == {
        ("Gated/first/addmm", "forward"): 2,
        ("Gated/mul", "forward"): 2,  # in a call that the end of the slice cut off
        ("Gated/second/0/addmm", "forward"): 1,
        ("Gated/first/mm", "backward"): 1,
        ("Gated/second/0/mm", "backward"): 2,
        ("Gated/mul", "backward"): 1,
    }
    assert coverage.placed_ns == coverage.busy_ns


def test_a_profiler_that_cannot_begin_leaves_nothing(tmp_path):
    body = """
    said = []
    model = Model()
    if RAW:
        from torch.autograd import profiler
        original = profiler._prepare_profiler
        def taken(*args, **kwargs):
            raise RuntimeError("CUPTI is taken")
        profiler._prepare_profiler = taken
        try:
            start()
        except RuntimeError as error:
            said.append(str(error))
        assert profiler._prepare_profiler is taken
        profiler._prepare_profiler = original
    print(said, file=open("said", "w"))
    train(model, 1)
    session = start()
    stop(session, train(model))
    result(model)
    """
    _, table, _ = traced(tmp_path, body)
    assert (tmp_path / "said").read_text() == "['CUPTI is taken']\n"
    assert counted(table, {"addmm", "mm", "bmm"}) == products(STEPS)


def test_ranks_of_a_distributed_model_have_its_paths(tmp_path):
    body = """
    import os, torch.distributed as dist
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(Model())
    session = start() if rank == 0 else None
    marks = train(model)
    if rank == 0:
        stop(session, marks)
    result(model)
    dist.destroy_process_group()
    """
    script = tmp_path / "program.py"
    script.write_text(f"HOOK = {str(HOOK)!r}\n" + PRELUDE + textwrap.dedent(body))
    raw = tmp_path / "torch.json"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(raw)],
            env={**os.environ, "RANK": str(rank)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = [process.communicate(timeout=TIMEOUT_S) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], results
    table, coverage = events_of(raw, json.loads((tmp_path / "torch.json.meta").read_text()))
    assert counted(table, {"addmm", "mm", "bmm"}) == products(STEPS)
    exchanged = {row["name"] for row in table.to_pylist() if "allreduce" in row["name"]}
    assert exchanged
    assert all(name.startswith("framework/") for name in exchanged)
    assert coverage.placed_ns >= 0.99 * coverage.busy_ns


def test_calls_of_generated_code_go_by_the_modules_they_come_from(tmp_path):
    # Products only, which inductor leaves to libraries: nothing has to be compiled by a C++ compiler.
    body = """
    import os
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath("cache")
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        def forward(self, x):
            return self.down(self.up(x))
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([Part(), Part()])
            self.head = nn.Linear(8, 4, bias=False)
        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return self.head(x)
    def step():
        begin_ns = time.time_ns()
        x = torch.ones(2, 8, requires_grad=True)
        (compiled if module else function)(x).square().mean().backward()
        return [0, begin_ns, time.time_ns()]
    model = Net()
    module = WHOLE
    compiled = torch.compile(model)
    function = torch.compile(lambda x: model(x))
    step()
    session = start()
    stop(session, [step()])
    result(model)
    """
    expected = {}
    for path in (*(f"parts/{n}/{name}" for n in range(2) for name in ("up", "down")), "head"):
        expected[f"Net/{path}/mm", "forward"] = 1
        expected[f"Net/{path}/mm", "backward"] = 2
    for whole in ("True", "False"):
        folder = tmp_path / whole
        folder.mkdir()
        _, table, coverage = traced(folder, body.replace("WHOLE", whole))
        assert counted(table, {"mm"}) == expected
        assert any("compiled" in remark for remark in coverage.remarks)


def test_fused_kernels_go_by_what_their_nodes_share():
    nodes = {"linear": "a/up", "gelu": "a", "linear_1": "a/down", "norm": "b/norm", "mul": "b"}
    forward = [
        "# Topologically Sorted Source Nodes: [linear], Original ATen: [aten.addmm]",
        "extern_kernels.addmm(primals_2, x, reinterpret_tensor(primals_1, (4, 8), (1, 4), 0), out=buf0)",
        "# Topologically Sorted Source Nodes: [linear, gelu], Original ATen: [aten.gelu]",
        "triton_poi_fused_gelu_0.run(buf0, buf1, 480, stream=stream0)",
        "# Topologically Sorted Source Nodes: [gelu, linear_1], Original ATen: [aten.mm]",
        "extern_kernels.mm(buf1, reinterpret_tensor(primals_3, (8, 4), (1, 8), 0), out=buf2)",
        "# Topologically Sorted Source Nodes: [linear_1, norm], Original ATen: [aten.native_layer_norm]",
        "triton_per_fused_norm_1.run(buf2, buf3, 480, stream=stream0)",
        "buf4 = torch.ops.aten.topk.default(buf3, 2)",
    ]
    backward = [
        "# Topologically Sorted Source Nodes: [mul, norm], Original ATen: [aten.mul]",
        "triton_poi_fused_mul_0.run(tangents_1, buf0, 480, stream=stream0)",
        "extern_kernels.mm(buf0, primals_3, out=buf1)",
        "extern_kernels.mm(reinterpret_tensor(buf0, (4, 8), (1, 4), 0), saved, out=buf2)",
        "extern_kernels.bmm(buf8, buf9, out=buf10)",
    ]
    compiled = Compiled({"f": forward, "b": backward}, {"0/0": nodes})
    assert compiled.calls("f", "0/0", backward=False) == [
        ("aten::addmm", "a/up"),
        ("triton_poi_fused_gelu_0", "a"),
        ("aten::mm", "a/down"),
        ("triton_per_fused_norm_1", ""),
        ("aten::topk", None),
    ]
    assert compiled.calls("b", "0/0", backward=True) == [
        ("triton_poi_fused_mul_0", "b/norm"),
        ("aten::mm", "a/down"),
        ("aten::mm", "a/down"),
        ("aten::bmm", None),
    ]
    follower = CallFollower(compiled.calls("f", "0/0", backward=False))
    assert [follower.path_of(name) for name in ("aten::mm", "aten::addmm", "aten::topk")] == [
        "a/down",
        None,
        None,
    ]


@pytest.mark.parametrize("when", ["before", "inside"])
def test_compiled_code_is_neither_broken_nor_entered(tmp_path, when):
    body = f"""
    from torch._dynamo.utils import counters
    model = Model()
    compiled = torch.compile(model, backend="aot_eager")
    if {when == "before"}:
        train(model, 1, compiled)
    session = start()
    marks = train(model, 4, compiled)
    stop(session, marks)
    train(model, 1, compiled)
    result(model, graphs=counters["stats"]["unique_graphs"], breaks=dict(counters["graph_break"]),
           around=hasattr(type(compiled).__call__, "__wrapped__"))
    """
    raw = tmp_path / "torch.json"
    options = ["-W", "error:Using:UserWarning"]
    bare, result = program(tmp_path, body), program(tmp_path, body, raw, options)
    if when == "inside":
        # Compiled with hooks there, it is compiled once more when they are gone; the numbers are the same.
        bare.pop("graphs"), result.pop("graphs")
    assert result == {**bare, "filters": result["filters"]}
    assert result["breaks"] == {}
    table, coverage = events_of(raw, json.loads((tmp_path / "torch.json.meta").read_text()))
    names = {row["name"] for row in table.to_pylist() if row["phase"] == "forward"}
    assert "Model/addmm" in names  # under the module that was compiled
    assert not [name for name in names if name.startswith("Model/layers")]
    assert any("compiled" in remark for remark in coverage.remarks)


def test_coverage_counts_what_is_unplaced_and_uneven():
    table = events_table(
        {
            "name": ["m/outer", "m/inner", "unplaced/x", "m/outer", "unplaced/y", "m/late", "input/L/empty"],
            "device": ["cpu:0", "cpu:0", "cpu:0", "cpu:0", "gpu:0", "cpu:0", "cpu:0"],
            "start_ns": [0, 10, 200, 300, 0, 900, 20],
            "duration_ns": [100, 20, 50, 100, 7, 40, 1],
            "lane": [1, 1, 1, 1, None, 1, 1],
            "step": [0, 0, 0, 1, 1, None, 1],
        }
    )
    coverage = coverage_of(table, 2, ["said before"])
    assert (coverage.busy_ns, coverage.placed_ns, coverage.steps) == (257, 200, 2)
    assert not coverage.counts_divide
    assert coverage.remarks == ("said before",)
    # A loader fetches ahead, and what has no place may be anything.
    assert coverage.uneven == ("m/inner",)


def test_kernels_go_by_the_operator_that_launched_them(tmp_path):
    """A GPU's trace, written by hand: its kernels run after the step's end, on a stream."""

    def call(name, ts, dur, ident, tid=7, **args):
        return {"ph": "X", "cat": "cpu_op", "name": name, "tid": tid, "ts": ts, "dur": dur,
                "args": {"External id": ident, **args}}  # fmt: skip

    def kernel(name, ts, ident, cat="kernel", **args):
        return {"ph": "X", "cat": cat, "name": name, "tid": 20, "ts": ts, "dur": 5,
                "args": {"External id": ident, "device": 1, "stream": 20, **args}}  # fmt: skip

    def launch(name, ts, correlation):
        return {"ph": "X", "cat": "cuda_runtime", "name": name, "tid": 7, "ts": ts, "dur": 1,
                "args": {"correlation": correlation}}  # fmt: skip

    node = {"Sequence number": 0, "Fwd thread id": 1}
    engine = "autograd::engine::evaluate_function: AddmmBackward0"
    trace = {
        "schemaVersion": 1,
        "baseTimeNanoseconds": 1_000_000,
        "traceEvents": [
            call("smaragdine:Net", 0, 100, 1),
            call("smaragdine:Net/up", 10, 50, 2),
            call("aten::addmm", 20, 20, 3, **{"Sequence number": 0, "Fwd thread id": 0}),
            call(engine, 110, 30, 4, tid=8, **node),
            call("AddmmBackward0", 111, 28, 5, tid=8, **node),
            call("aten::mm", 112, 10, 6, tid=8),
            {"ph": "s", "id": 1, "cat": "fwdbwd", "name": "fwdbwd", "tid": 7, "ts": 20},
            {"ph": "f", "id": 1, "cat": "fwdbwd", "name": "fwdbwd", "tid": 8, "ts": 111},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 7, "ts": 25, "dur": 1},
            kernel("void cutlass::gemm<float>(Params)", 500, 3),
            kernel("void at::native::splitKreduce_kernel<32, 16>(Params)", 505, 3),
            kernel("gemm_bf16_nt", 510, 6),
            kernel("void mine::written_in_triton<1>(int)", 515, 2),
            kernel("Memset (Device)", 520, 99, "gpu_memset"),
            launch("cudaGraphLaunch", 70, 41),
            kernel("void in_a_graph(int)", 525, None, correlation=41),
            launch("cudaLaunchKernel", 105, 42),
            kernel("void of_the_program(int)", 530, None, correlation=42),
        ],
    }
    raw = tmp_path / "gpu.json"
    raw.write_text(json.dumps(trace))
    table, coverage = events_of(raw, {"steps": [[40, 1_000_000, 1_200_000]]})
    rows = [row for row in table.to_pylist() if row["device"] == "gpu:1"]
    assert [(row["name"], row["phase"], row["step"], row["lane"]) for row in rows] == [
        ("Net/up/addmm", "forward", 40, 20),
        ("Net/up/addmm", "forward", 40, 20),
        ("Net/up/mm", "backward", 40, 20),
        ("Net/up/written_in_triton", "forward", 40, 20),
        ("unplaced/Memset", "other", None, 20),
        ("Net/in_a_graph", "forward", 40, 20),
        ("program/of_the_program", "other", 40, 20),
    ]
    assert rows[0]["start_ns"] == 1_500_000
    assert rows[0]["duration_ns"] == 5000
    cpu = [(row["name"], row["phase"]) for row in table.to_pylist() if row["device"] == "cpu:0"]
    assert cpu == [
        ("Net/up/addmm", "forward"),
        ("Net/up/AddmmBackward0", "backward"),
        ("Net/up/mm", "backward"),
    ]
    assert "1 of 7 kernels were launched by nothing the profiler saw" in coverage.remarks
    assert any("1 of 7 kernels ran from CUDA graphs" in remark for remark in coverage.remarks)
