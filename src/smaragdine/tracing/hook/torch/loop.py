"""Marks of plain PyTorch loops: steps, epochs and evaluations; and the calls of a model that only predicts.

Only its optimizer announces a step of a plain loop. We stamp the step from the batch that began it, so that
it spans forward, backward and optimizer like the steps of other frameworks. Without a DataLoader nobody knows
when it began, and only its end is marked.

An epoch is an iteration over a DataLoader during which an optimizer steps; evaluation makes no epoch.
Evaluation is the time from a module's `eval()` to its `train()`.
"""

import functools
import os
import sys
import time
import weakref
from _thread import get_ident

import torch

from .. import marks, training, wrapping
from ..state import process

_state = process.torch


def patch_optimizer(module):
    if not _supported():
        raise NotImplementedError("PyTorch %s; steps are seen from 2.1 on" % torch.__version__)
    module.register_optimizer_step_pre_hook(before_step)
    module.register_optimizer_step_post_hook(after_step)


def patch_dataloader(module):
    wrapping.replace(module.DataLoader, "__iter__", _iter)
    # A `for` calls this on the type: there is no public place that sees each batch.
    wrapping.replace(module._BaseDataLoaderIter, "__next__", _next)


def patch_module(module):
    if not _supported():
        return
    wrapping.replace(module.Module, "eval", _eval)
    wrapping.replace(module.Module, "train", _train)


def _supported():
    return [int(part) for part in torch.__version__.split(".")[:2]] >= [2, 1]


def before_step(optimizer, args, kwargs):
    # torch.compile takes the answer for a constant, and compiles an empty function. At the system calls below
    # it would have to break the graph.
    if torch.compiler.is_compiling():
        return
    try:
        if not training.active():
            _loop().step_begin(optimizer)
    except Exception as exception:
        marks.error("torch", exception)


def after_step(optimizer, args, kwargs):
    if torch.compiler.is_compiling():
        return
    try:
        _loop().step_end(optimizer)
    except Exception as exception:
        marks.error("torch", exception)


def announce(model):
    """Marks the end of every call without gradients; returns a function that stops this."""
    count = [0]

    def called(module, args, output):
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or training.active():
            return
        marks.soon(time.time_ns(), "step_end", count[0], training.FORWARD)
        count[0] += 1

    return model.register_forward_hook(called).remove


def finish():
    """The program ends, and so does its last epoch."""
    if _state.loop is not None and _state.loop.pid == os.getpid():
        _state.loop.close_epoch()


def _loop():
    # A forked child starts afresh: its parent's open step and epoch are not its own.
    if _state.loop is None or _state.loop.pid != os.getpid():
        _state.loop = _Loop()
    return _state.loop


def optimizers():
    """Those that have stepped in this process."""
    return list(_loop().optimizers)


def _iter(original):
    @functools.wraps(original)
    def __iter__(self):
        begin_ns = time.time_ns()
        iterator = original(self)
        try:
            if not training.active():
                _loop().iterations[iterator] = _Iteration(iterator, begin_ns)
        except Exception as exception:
            marks.error("torch", exception)
        return iterator

    return __iter__


def _next(original):
    @functools.wraps(original)
    def __next__(self):
        try:
            batch = original(self)
        except StopIteration:
            _delivered(self, exhausted=True)
            raise
        _delivered(self)
        return batch

    return __next__


def _delivered(iterator, exhausted=False):
    try:
        if not training.active():
            _loop().delivered(iterator, exhausted)
    except Exception as exception:
        marks.error("torch", exception)


def _eval(original):
    @functools.wraps(original)
    def eval(self):
        if not torch.compiler.is_compiling():
            _switched(self, False)
        return original(self)

    return eval


def _train(original):
    # `train` calls itself for every module inside, and mostly there is no evaluation to end.
    @functools.wraps(original)
    def train(self, mode=True):
        loop = None if torch.compiler.is_compiling() else _state.loop
        if loop is not None and loop.evaluation.switched and mode:
            _switched(self, True)
        return original(self, mode)

    return train


def _switched(module, trains):
    try:
        loop = _state.loop
        if loop is None or loop.latest is None or loop.pid != os.getpid() or training.active():
            return
        if trains:
            loop.evaluation.ends(module, [tuple(seen) for seen in loop.optimizers.values()])
        else:
            loop.evaluation.begins(module)
    except Exception as exception:
        marks.error("torch", exception)


def _below(frame, outer):
    # By address and code: a reference to the frame would keep alive all that a failed step had in its hands.
    frame = frame.f_back
    while frame is not None:
        if id(frame) == outer[1] and frame.f_code is outer[2]:
            return True
        frame = frame.f_back
    return False


class _Iteration:
    """One pass over a DataLoader."""

    def __init__(self, iterator, begin_ns):
        self.iterator = weakref.ref(iterator)
        self.begin_ns = begin_ns
        self.batch_ns = None  # when the first batch since the last step was there
        self.batches = 0
        self.exhausted = False
        self.stepped_ns = None  # its first step

    def alive(self):
        return self.iterator() is not None

    def evaluated(self):
        # It was read to its end before any step. A single batch may have been fetched ahead for training.
        return self.exhausted and self.batches > 1 and self.stepped_ns is None


class _Loop:
    """What this process has seen of a plain training loop."""

    def __init__(self):
        self.pid = os.getpid()
        self.optimizers = weakref.WeakKeyDictionary()  # optimizer -> [source, next index]
        self.sources = 0
        self.latest = None  # (weak reference to an optimizer, its entry)
        self.iterations = weakref.WeakKeyDictionary()  # iterator -> _Iteration
        self.iteration = None  # the one the last batch came from
        self.epoch = None  # the one that is the open epoch
        self.epochs = 0
        self.step_end_ns = None
        self.evaluation = Evaluation()
        # thread -> (optimizer, frame of its step, code of that frame, when it began, its source and index)
        self.stepping = {}

    def delivered(self, iterator, exhausted):
        iteration = self.iterations.get(iterator)
        if iteration is None:
            return
        if exhausted:
            iteration.exhausted = True
            return
        self.iteration = iteration
        iteration.batches += 1
        if iteration.batch_ns is None:
            iteration.batch_ns = time.time_ns()

    def step_begin(self, optimizer):
        now_ns = time.time_ns()
        thread = get_ident()
        frame = sys._getframe(2)
        outer = self.stepping.get(thread)
        # An optimizer may step another one inside its own step: that is one step. A look through the stack
        # tells this from a step that failed and never ended.
        if outer is not None and _below(frame, outer):
            return
        # Most programs have one optimizer, and looking into the dictionary costs as much as all the rest.
        latest = self.latest
        if latest is not None and latest[0]() is optimizer:
            seen = latest[1]
        else:
            seen = self.optimizers.get(optimizer)
            if seen is None:
                seen = self.optimizers[optimizer] = [
                    "torch:%d" % self.sources if self.sources else "torch",
                    0,
                ]
                self.sources += 1
                training.learn_rank()
            self.latest = (weakref.ref(optimizer), seen)
        self.stepping[thread] = (id(optimizer), id(frame), frame.f_code, self._begin(now_ns), seen)

    def step_end(self, optimizer):
        now_ns = time.time_ns()
        thread = get_ident()
        stepping = self.stepping.get(thread)
        if stepping is None or stepping[0] != id(optimizer):
            return
        del self.stepping[thread]
        seen = stepping[4]
        if stepping[3] is not None:
            marks.soon(stepping[3], "step_begin", seen[1], seen[0])
        marks.soon(now_ns, "step_end", seen[1], seen[0])
        seen[1] += 1
        self.step_end_ns = now_ns
        self.evaluation.switched.clear()

    def close_epoch(self):
        if self.epoch is not None:
            self.epoch = None
            marks.mark("epoch_end", self.epochs - 1, source="torch.dataloader", t_ns=self.step_end_ns)

    def _begin(self, now_ns):
        """When the step at hand began, or None where no DataLoader tells."""
        iteration = self.iteration
        if iteration is not None and iteration.evaluated():
            iteration = self.epoch
        if iteration is None or not iteration.alive():
            return None
        if iteration.stepped_ns is None:
            iteration.stepped_ns = now_ns
            self._enter_epoch(iteration)
        begin_ns, iteration.batch_ns = iteration.batch_ns, None
        # Without a new batch this is another step on the last one (of a second optimizer, say). A batch that
        # was fetched ahead begins no step before the last one ended.
        return max(begin_ns or 0, self.step_end_ns or 0, self.evaluation.end_ns) or now_ns

    def _enter_epoch(self, iteration):
        # Loaders that are read side by side, all opened before the first step, are one epoch.
        if self.epoch is not None and iteration.begin_ns < self.epoch.stepped_ns:
            return
        self.close_epoch()
        self.epoch = iteration
        marks.mark("epoch_begin", self.epochs, source="torch.dataloader", t_ns=iteration.begin_ns)
        self.epochs += 1


class Evaluation:
    """From a module's `eval()` to its `train()`; only then is it known to have been one.

    A step in between makes it none: the program trains the model, or parts of it, in that mode. And what a
    program does so in every step (an attack, its own labels, samples for a GAN) is part of the step. So an
    evaluation stands apart only where all optimizers have stepped more than once since the last one.
    """

    def __init__(self):
        self.switched = {}  # since the last step: id of a module -> (weak reference, when it went to eval)
        self.end_ns = 0
        self._counted = {}  # source -> its steps, when the last one was over
        self._apart = False  # whether the last one stood apart

    def begins(self, module):
        self.switched[id(module)] = (weakref.ref(module), time.time_ns())

    def ends(self, module, counts):
        """The module is trained again; `counts` are the optimizers' (source, steps) so far."""
        known, begin_ns = self.switched.get(id(module), (None, 0))
        if known is None or known() is not module:
            return
        self.switched.clear()
        since = [steps - self._counted.get(source, 0) for source, steps in counts]
        stepped = [steps for steps in since if steps]
        if stepped:  # else it goes on: with a second data set, say
            self._apart = min(stepped) > 1
            self._counted = dict(counts)
        if self._apart:
            self.end_ns = time.time_ns()
            marks.mark("evaluate_begin", source="torch", t_ns=begin_ns)
            marks.mark("evaluate_end", source="torch", t_ns=self.end_ns)
