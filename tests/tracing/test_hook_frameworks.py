"""The marks that real training programs leave, each in a process of its own."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

import smaragdine
from smaragdine.tracing.hook.environment import environment

QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def needs(*names):
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def train(tmp_path, program, command=(), hooked=True, **variables):
    """Run a program under the hook: its marks in order of time, hook_error excluded by assertion."""
    spool, script = tmp_path / "spool", tmp_path / "train.py"
    spool.mkdir(parents=True)
    script.write_text(textwrap.dedent(program))
    base = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environ = {**base, **QUIET, **variables}
    if hooked:
        environ.update(environment(str(spool), "test", environ))
    done = subprocess.run(
        [sys.executable, *command, str(script)],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for file in sorted(spool.iterdir()) for line in file.read_text().splitlines()]
    marks = sorted(map(json.loads, lines), key=lambda mark: mark["t_ns"])
    assert [mark["detail"] for mark in marks if mark["name"] == "hook_error"] == []
    return marks


def words(marks, source=None):
    """Marks as short words: `step_begin 3`."""
    return [
        mark["name"] + ("" if mark["index"] is None else f" {mark['index']}")
        for mark in marks
        if mark["source"] != "hook" and (source is None or mark["source"] == source)
    ]


def sources(marks):
    return {mark["source"] for mark in marks} - {"hook"}


def steps(*indices):
    return [word for index in indices for word in (f"step_begin {index}", f"step_end {index}")]


EVALUATE, PREDICT = ["evaluate_begin", "evaluate_end"], ["predict_begin", "predict_end"]


def fitted(evaluation=EVALUATE):
    """Two epochs of two steps, evaluation after each."""
    return [
        "train_begin",
        *("epoch_begin 0", *steps(0, 1), *evaluation, "epoch_end 0"),
        *("epoch_begin 1", *steps(2, 3), *evaluation, "epoch_end 1"),
        "train_end",
    ]


KERAS = """
    import numpy, {keras} as keras

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            assert "val_loss" in logs

    x, y = numpy.zeros((8, 3), "float32"), numpy.zeros((8, 1), "float32")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callbacks = {callbacks}
    model.fit(x, y, 4, 2, 0, callbacks, validation_data=(x, y))
    assert type(callbacks) is not list or [type(callback) for callback in callbacks] == [Watch]
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
"""


@pytest.mark.parametrize(
    ("backend", "callbacks"), [("tensorflow", "[Watch()]"), ("torch", "Watch()"), ("jax", "(Watch(),)")]
)
@needs("keras")
def test_keras_3(tmp_path, backend, callbacks):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"not installed: {backend}")
    marks = train(tmp_path, KERAS.format(keras="keras", callbacks=callbacks), KERAS_BACKEND=backend)
    assert words(marks) == [*fitted(), *EVALUATE, *PREDICT]
    assert sources(marks) == {"keras"}
    assert marks[0]["total"] == 2
    libraries = marks[-1]
    assert libraries["name"] == "libraries"
    assert {"python", "numpy", "keras", backend} <= set(libraries["detail"])


@needs("keras", "jax")
def test_keras_3_edges(tmp_path):
    program = """
        import numpy, keras

        x, y = numpy.zeros((8, 3), "float32"), numpy.zeros((8, 1), "float32")
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=2)

        seen = {}
        class Watch(keras.callbacks.Callback):
            async_safe = True
            def on_train_batch_end(self, batch, logs=None):
                seen["batches"] = seen.get("batches", 0) + 1

        lists = []
        configure = keras.callbacks.CallbackList._configure_async_dispatch
        def spy(self, callbacks):
            configure(self, callbacks)
            lists.append(self)
        keras.callbacks.CallbackList._configure_async_dispatch = spy

        watch = Watch()
        mine = keras.callbacks.CallbackList([watch], add_history=True, model=model, epochs=1)
        model.fit(x, y, batch_size=2, epochs=1, verbose=0, callbacks=mine)
        assert mine.callbacks[0] is watch and len(mine.callbacks) == 2
        assert mine._async_train is True

        class Fail(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                raise KeyError("mine")

        try:
            model.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[Fail()])
        except KeyError:
            pass
        else:
            raise AssertionError

        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=4, epochs=1, verbose=0)
        assert lists[-1]._async_train is True
        assert [type(callback).__name__ for callback in lists[-1].callbacks] == ["History"]

        import copy, pickle
        copy.deepcopy(model); pickle.dumps(model)
    """
    marks = train(tmp_path, program, KERAS_BACKEND="jax")
    first = ["train_begin", "epoch_begin 0", "step_begin 0", "step_end 1", "step_begin 2", "step_end 3"]
    failed = ["train_begin", "epoch_begin 0", "step_begin 0", "step_end 1", "train_end"]
    again = ["train_begin", "epoch_begin 0", *steps(0, 1), "epoch_end 0", "train_end"]
    assert words(marks) == [*first, "epoch_end 0", "train_end", *failed, *again]
    ends = [mark for mark in marks if mark["name"] == "train_end"]
    assert [end.get("detail") for end in ends] == [None, {"error": "KeyError"}, None]


@needs("tf_keras")
def test_tf_keras(tmp_path):
    more = """
    import warnings
    warnings.simplefilter("ignore")
    def batches():
        while True:
            yield x[:4], y[:4]
    model.fit_generator(batches(), steps_per_epoch=2, epochs=1, verbose=0)

    import tensorflow
    with tensorflow.Graph().as_default():
        model = keras.Sequential([keras.layers.Dense(1, input_shape=(3,))])
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=4, epochs=1, verbose=0)
    """
    marks = train(tmp_path, KERAS.format(keras="tf_keras", callbacks="[Watch()]") + more)
    again = ["train_begin", "epoch_begin 0", *steps(0, 1), "epoch_end 0", "train_end"]
    assert words(marks, "tf_keras") == [*fitted(), *EVALUATE, *PREDICT, *again, *again]
    assert sources(marks) == {"tf_keras"}


TORCH = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
    loader, held_out = DataLoader(data, batch_size=4), DataLoader(data, batch_size=4)
    model = torch.nn.Linear(3, 1)

    def backward(x, y):
        model.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
"""


@needs("torch")
def test_torch_loop(tmp_path):
    program = """
    import time
    one, two = torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam(model.parameters())
    for epoch in range(2):
        for x, y in loader:
            backward(x, y)
            time.sleep(0.02)
            one.step()
            two.step()
            with torch.no_grad():
                for x, y in held_out:
                    model(x)
    """
    marks = train(tmp_path, TORCH + program)
    assert words(marks, "torch") == steps(0, 1, 2, 3)
    assert words(marks, "torch:1") == steps(0, 1, 2, 3)
    epochs = [mark for mark in marks if mark["source"] == "torch.dataloader"]
    assert words(epochs) == ["epoch_begin 0", "epoch_end 0", "epoch_begin 1", "epoch_end 1"]
    assert sources(marks) == {"torch", "torch:1", "torch.dataloader"}
    spans = [mark["t_ns"] for mark in marks if mark["source"] == "torch"]
    assert all(end - begin >= 20e6 for begin, end in zip(spans[::2], spans[1::2], strict=True))
    ends = [mark["t_ns"] for mark in marks if mark["name"] == "step_end"]
    assert [epochs[1]["t_ns"], epochs[3]["t_ns"]] == [ends[3], ends[7]]
    assert epochs[0]["t_ns"] <= spans[0]
    assert epochs[2]["t_ns"] <= spans[4]


@needs("torch")
def test_torch_edges(tmp_path):
    program = """
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.randn(4, 3), torch.randn(4, 1)
    backward(x, y)
    optimizer.step()

    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            optimizer.step()
            raise ArithmeticError

    outer = Outer(model.parameters(), 0.1)
    try:
        outer.step()
    except ArithmeticError:
        pass
    optimizer.step()

    ahead = DataLoader(data, batch_size=2, num_workers=2, persistent_workers=True)
    for epoch in range(2):
        for number, ((x, y), (z, _)) in enumerate(zip(loader, ahead)):
            backward(x, y)
            optimizer.step()
            if number == 1:
                break

    def fetched_ahead(batches):
        iterator = iter(batches)
        ahead = next(iterator)
        for batch in iterator:
            yield ahead
            ahead = batch
        yield ahead

    first, second = iter(loader), iter(held_out)
    for batches in (first, second, first, second):
        backward(*next(batches))
        optimizer.step()

    kept = DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True)
    for x, y in fetched_ahead(loader):
        backward(x, y)
        optimizer.step()
        for _ in kept:
            pass

    import copy, pickle
    copy.deepcopy(optimizer); pickle.dumps(optimizer); pickle.dumps(loader)
    assert type(iter(loader)).__name__ == "_SingleProcessDataLoaderIter"
    """
    marks = train(tmp_path, TORCH + program)
    # Before there is a DataLoader nobody knows when a step began; one that fails has no end.
    assert words(marks, "torch") == ["step_end 0", "step_end 1", *steps(*range(2, 12))]
    assert words(marks, "torch:1") == []
    epochs = [word for number in range(4) for word in (f"epoch_begin {number}", f"epoch_end {number}")]
    assert words(marks, "torch.dataloader") == epochs


@needs("torch")
def test_torch_evaluation(tmp_path):
    program = """
    import itertools
    from _smaragdine_hook import marks
    sgd = lambda: torch.optim.SGD(model.parameters(), 0.1)
    def case(name):
        marks.mark(name, source="test")
    def away():
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
    def step(*optimizers):
        for optimizer in optimizers:
            backward(x, y)
            optimizer.step()
    x, y = torch.randn(4, 3), torch.randn(4, 1)
    one = sgd()

    case("every third step, two data sets")
    for number in range(6):
        step(one)
        if number % 3 == 2:
            away()
            away()

    case("in every step")
    for _ in range(3):
        step(one)
        away()

    case("in every part of a step")
    for _ in range(3):
        step(one)
        for _ in range(2):
            away()
            backward(x, y)

    case("two optimizers")
    critic, generator = sgd(), sgd()
    for _ in range(2):
        step(critic, generator)
    away()

    case("two optimizers, samples for both")
    for _ in range(3):
        step(critic, critic, critic, generator)
        away()

    case("no way back before the next step")
    for _ in range(3):
        step(one)
    model.eval()
    step(one)
    model.train()

    case("parts")
    whole = torch.nn.ModuleList([model, torch.nn.BatchNorm1d(3)])
    for _ in range(3):
        whole.train()
        whole[1].eval()
        step(one)
    model.eval()
    whole.train()

    case("epochs")
    for epoch in range(2):
        model.train()
        for x, y in loader:
            step(one)
        model.eval()
        for x, y in held_out:
            model(x)
    """
    found, name = {}, None
    for mark in train(tmp_path, TORCH + program):
        if mark["source"] == "test":
            name = mark["name"]
        elif name is not None and mark["name"] not in ("step_begin", "libraries"):
            found.setdefault(name, []).append(mark["name"])
    ends = ["step_end"]
    assert found == {
        "every third step, two data sets": (ends * 3 + EVALUATE * 2) * 2,
        "in every step": ends * 3,
        "in every part of a step": ends * 3,
        "two optimizers": ends * 4 + EVALUATE,
        "two optimizers, samples for both": ends * 12,
        "no way back before the next step": ends * 4,
        "parts": ends * 3 + EVALUATE,
        "epochs": [
            *("epoch_begin", *ends * 2, "epoch_end", *EVALUATE),
            *("epoch_begin", *ends * 2, "epoch_end"),
        ],
    }


@needs("torch")
def test_torch_compile_sees_nothing_of_it(tmp_path):
    program = """
    import torch._dynamo.utils
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = next(iter(loader))
    graphs = []
    def backend(graph, inputs):
        graphs.append(len(list(graph.graph.nodes)))
        return graph.forward
    @torch.compile(backend=backend)
    def step():
        model.train()
        backward(x, y)
        optimizer.step()
    step()
    model.eval()
    step()
    breaks = dict(torch._dynamo.utils.counters["graph_break"])
    open("compiled.txt", "w").write(repr((graphs, breaks)))
    """
    for folder, hooked in (("with", True), ("without", False)):
        train(tmp_path / folder, TORCH + program, hooked=hooked)
    assert (tmp_path / "with/compiled.txt").read_text() == (tmp_path / "without/compiled.txt").read_text()


@needs("torch")
def test_framework_imported_before_the_hook(tmp_path):
    program = """
    from smaragdine.tracing.hook import install, marks
    marks.set_spool("spool")
    install.install_all()
    install.install_all()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in loader:
        backward(x, y)
        optimizer.step()
    """
    paths = [str(pathlib.Path(smaragdine.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    marks = train(tmp_path, TORCH + program, hooked=False, PYTHONPATH=os.pathsep.join(filter(None, paths)))
    assert words(marks) == ["epoch_begin 0", *steps(0, 1), "epoch_end 0"]
    assert marks[-1]["name"] == "libraries"


@needs("torch")
def test_torchrun(tmp_path):
    program = """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(parallel(x), y).backward()
        optimizer.step()
    dist.destroy_process_group()
    """
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        "2",
    ]
    marks = train(tmp_path, TORCH + program, command, GLOO_SOCKET_IFNAME="lo")
    for rank in (0, 1):
        mine = [mark for mark in marks if mark["rank"] == rank and mark["source"] == "torch"]
        assert words(mine) == steps(0, 1)
        assert len({mark["pid"] for mark in mine}) == 1


@needs("torch")
def test_rank_of_the_process_group(tmp_path):
    program = """
    import sys
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[0]}.store", rank=0, world_size=1)
    dist.get_rank = lambda: 3
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step()
    dist.destroy_process_group()
    """
    marks = train(tmp_path, TORCH + program)
    assert {mark["rank"] for mark in marks} == {3}


@needs("torch", "transformers", "accelerate")
def test_transformers(tmp_path):
    program = """
        import json, pathlib, torch
        from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

        config = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
                            intermediate_size=8, max_position_embeddings=8)
        data = [{"input_ids": torch.arange(4), "labels": torch.tensor(0)} for _ in range(8)]
        arguments = TrainingArguments("out", num_train_epochs=2, per_device_train_batch_size=2,
                                      gradient_accumulation_steps=2, eval_strategy="epoch",
                                      save_strategy="epoch", report_to=[], disable_tqdm=True, use_cpu=True)
        model = BertForSequenceClassification(config)
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
        before = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
        trainer.train()
        trainer.evaluate()
        trainer.predict(data)
        assert before == [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
        saved = [file.read_text() for file in pathlib.Path("out").rglob("trainer_state.json")]
        assert saved and not any("maragdine" in text for text in saved)

        class Fail(Trainer):
            def training_step(self, *args, **kwargs):
                raise ArithmeticError
        try:
            Fail(model, arguments, train_dataset=data, eval_dataset=data).train()
        except ArithmeticError:
            pass
    """
    marks = train(tmp_path, program)
    epochs = [word for word in fitted([]) if not word.startswith("train")]
    first, second = epochs[:6], epochs[6:]
    run = ["train_begin", *first, *EVALUATE, *second, *EVALUATE, "train_end"]
    failed = ["train_begin", "epoch_begin 0", "step_begin 0", "train_end"]
    assert words(marks) == [*run, *EVALUATE, *PREDICT, *failed]
    assert sources(marks) == {"transformers"}
    assert marks[0]["total"] == 2


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning(tmp_path, package):
    if importlib.util.find_spec(package.split(".")[0]) is None:
        pytest.skip(f"not installed: {package}")
    program = f"""
    import {package} as lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = model
        def training_step(self, batch, index):
            return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        def validation_step(self, batch, index):
            self.layer(batch[0])
        test_step = predict_step = validation_step
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    mine = [lightning.callbacks.Callback()]
    quiet = dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = lightning.Trainer(max_epochs=2, callbacks=mine, num_sanity_val_steps=0, **quiet)
    trainer.fit(Module(), loader, held_out)
    trainer.test(dataloaders=held_out, verbose=False)
    trainer.predict(dataloaders=held_out)
    assert not any("maragdine" in type(callback).__module__ for callback in (*mine, *trainer.callbacks))
    import pathlib
    saved = [path.read_bytes() for path in pathlib.Path("checkpoints").glob("*.ckpt")]
    assert saved and not any(b"maragdine" in content for content in saved)

    class Fail(Module):
        def training_step(self, batch, index):
            raise ArithmeticError
    try:
        lightning.Trainer(max_epochs=1, enable_checkpointing=False, **quiet).fit(Fail(), loader)
    except ArithmeticError:
        pass
    backward(*data[:4])
    torch.optim.SGD(model.parameters(), 0.1).step()
    """
    marks = train(tmp_path, TORCH + program)
    failed = ["train_begin", "epoch_begin 0", "step_begin 0", "train_end"]
    assert words(marks, "lightning") == [*fitted(), *EVALUATE, *PREDICT, *failed]
    assert words(marks, "torch") == ["step_end 0"]
    assert sources(marks) == {"lightning", "torch"}
    assert marks[0]["total"] == 2


@needs("tensorflow")
def test_tensorflow_sessions(tmp_path):
    program = """
        import tensorflow.compat.v1 as tf
        tf.disable_eager_execution()
        tf.logging.set_verbosity(tf.logging.ERROR)

        weight = tf.get_variable("weight", initializer=1.0)
        train_op = tf.train.GradientDescentOptimizer(0.1).minimize(
            weight * weight, global_step=tf.train.get_or_create_global_step())
        end = tf.data.make_one_shot_iterator(tf.data.Dataset.range(1)).get_next()
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run([train_op, weight])
            session.run({"train": train_op})
            session.run("weight:0")
            saver.save(session, "./model")
            session.run(end)
            try:
                session.run(end)
            except tf.errors.OutOfRangeError:
                pass
        with tf.train.MonitoredTrainingSession(checkpoint_dir="out", save_checkpoint_steps=1) as session:
            for _ in range(2):
                session.run(train_op)
            session.run_step_fn(lambda step_context: step_context.run_with_hooks(train_op))
    """
    marks = train(tmp_path, program)
    assert words(marks) == steps(*range(7))
    assert sources(marks) == {"tensorflow"}
