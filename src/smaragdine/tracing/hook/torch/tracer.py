"""A window of PyTorch's own profiler, Kineto, with the path of every module called in it.

Kineto records operators and kernels. It does not know modules: `modules.py` annotates their calls.

A process has one session of Kineto. Beginning a second one ends the first, and whoever loses its session
crashes on stopping it (torch 2.13). So we never begin beside the program's own profiler, and end ours the
moment the program begins one.
"""

import contextlib
import functools
import os
import threading
import time

import torch
import torch.autograd.profiler as profiler
from torch.nn.modules.module import register_module_forward_pre_hook

from .. import marks
from ..state import process
from ..tracers import ProfilerBusy
from . import background_stop, compiled, conflicts, detach, loop
from .modules import Calls

FRAMEWORK, FORMAT, SUFFIX = "torch", "kineto", ".json"

_state = process.torch

conflicts.patch_profiler(profiler)  # if it is not yet
conflicts.patch_graphs(torch.cuda.graphs)


def ready():
    """Whether a profiler may begin: the last one is over, and no operator that it saw begin still runs."""
    if conflicts.capturing():
        return False
    ending = _state.ending
    if ending is not None:
        ending.wait()
    return detach.has_left() and (ending is None or ending.forgotten())


def may_stop():
    return not conflicts.capturing()


def start():
    """Begin profiling; raises, having changed nothing, where the program would notice."""
    if not ready():
        raise RuntimeError("another thread is in one operator since the last window")
    if [int(part) for part in torch.__version__.split(".")[:2]] < [2, 2]:
        raise NotImplementedError("PyTorch %s; operations are traced from 2.2 on" % torch.__version__)
    if _state.session is not None or _program_profiles():
        raise ProfilerBusy("a PyTorch profiler is already running, and there can be only one")
    _watch_forks()
    session = TorchSession()
    session.begin()
    _state.session = session
    return session


def at_next_call(work):
    """Have the program's main thread do `work` when it next calls a module; returns a function that takes
    this back.

    Kineto complains on stderr when another thread begins it than the one that imported PyTorch.
    """

    def once(module, args):
        if torch.compiler.is_compiling() or threading.current_thread() is not threading.main_thread():
            return
        if conflicts.capturing():
            return  # at a later one
        take_back()
        work()

    def around(original):
        @functools.wraps(original)
        def __call__(self, *args, **kwargs):
            once(self, args)
            return original(self, *args, **kwargs)

        return __call__

    _state.hooked = not compiled.used()
    if _state.hooked:
        take_back = register_module_forward_pre_hook(once).remove
    else:
        take_back = compiled.around_calls(around)
    return take_back


def still_safe():
    """Whether what waits for the next call may go on waiting: torch.compile would see a hook."""
    return not (_state.hooked and compiled.used())


def stop(session, path):
    """End the session and write Kineto's JSON to `path`; returns what else is known. Raises if there is
    nothing to write."""
    results = session.end()
    if results is None:
        raise session.abandoned or RuntimeError("the trace was ended before")
    results.save(path)
    if not os.path.exists(path):  # Kineto only logs what went wrong
        raise OSError("the profiler could not write %s" % path)
    return _facts(session)


def stop_aside(session, path, then):
    """Like `stop`, on a background thread; returns the Ending to wait for, or None where that is not
    possible.

    The thread calls `then` with what else is known (None: nothing was written) and with the time at which the
    program went on.
    """
    inside = session.silence()
    if inside is None or not session.let_go():
        return None
    if torch.cuda.is_initialized():
        background_stop.leave_gpu()
    facts = _facts(session)
    _say_stopped()
    resumed_ns = time.time_ns()

    def written():
        session.forget()
        exists = os.path.exists(path)  # Kineto only logs what went wrong
        then(facts if exists else None, resumed_ns)
        if not exists:
            raise OSError("the profiler could not write %s" % path)

    _state.ending = background_stop.Ending(inside, path, written)
    return _state.ending


def _facts(session):
    calls = session.calls
    facts = {"edges": [list(edge) for edge in list(calls.edges)], "marked": bool(session.marked)}
    # A slice of time may begin in the middle of a step. Nobody can tell where the operators of that step
    # belong, so the slice counts from the first call that it saw whole.
    if calls.whole_ns is not None:
        facts["begin_ns"] = calls.whole_ns
    try:
        known = compiled.facts()
        if known is not None:
            facts["compiled"] = known
        if session.launches.said:
            facts["launches"] = session.launches.said
        if torch.cuda.is_initialized():
            facts["settings"] = _settings()
    except Exception as exception:
        marks.error("torch", exception)
    return facts


def _settings():
    """What chooses the kernels of a call beside its inputs, and the lists of tensors that optimizers work on:
    Kineto keeps no list that is long."""
    backends = torch.backends
    return {
        "tf32": bool(backends.cuda.matmul.allow_tf32),
        "cudnn_tf32": bool(backends.cudnn.allow_tf32),
        "cudnn_benchmark": bool(backends.cudnn.benchmark),
        "deterministic": bool(torch.are_deterministic_algorithms_enabled()),
        "lists": [
            [[list(each.shape), list(each.stride())] for each in group["params"] if each.requires_grad]
            for optimizer in loop.optimizers()
            for group in optimizer.param_groups
        ],
    }


def _say_stopped():
    getattr(profiler, "_run_on_profiler_stop", int)()


def _program_profiles():
    # torch.autograd._profiler_enabled answers for this thread only, what its module says is true of all.
    said = getattr(profiler, "_is_profiler_enabled", False)
    return said or torch.autograd._profiler_enabled() or _state.prepared


class TorchSession:
    """One session of Kineto, from its beginning to its end."""

    def __init__(self):
        self.abandoned = None  # the error that says why, where the program needed the profiler itself
        self.running = False
        self.marked = not compiled.used()
        self.thread = threading.get_ident()
        self.calls = Calls()
        self.launches = compiled.Launches()
        self.lock = threading.Lock()
        self.everywhere = True  # it profiles all threads, and any thread can end it
        self.profile = self._profile()

    def _profile(self):
        try:
            # DataParallel has a thread for each GPU.
            config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        except TypeError:
            config = None
            self.everywhere = False
            if self.thread not in threading._active:
                raise NotImplementedError(
                    "PyTorch %s profiles one thread only, and so nothing of a program without steps"
                    % torch.__version__
                )
        cuda = torch.autograd.ProfilerActivity.CUDA
        on_gpu = torch.cuda.is_initialized() and cuda in torch.autograd._supported_activities()
        # Shapes tell what rebuilds a call. Nobody replays a processor's calls: there they would only cost.
        profile = profiler.profile(use_kineto=True, record_shapes=on_gpu, experimental_config=config)
        if on_gpu:
            profile.kineto_activities.add(cuda)
        return profile

    def begin(self):
        if self.thread in threading._active:
            # Kernels that were launched before would run into the window, where nobody could name them.
            conflicts.wait_for_gpu()
        # Kineto reads its log level now. Unless told otherwise it says on stderr when profiling begins.
        quiet = "KINETO_LOG_LEVEL" not in os.environ
        if quiet:
            os.environ["KINETO_LOG_LEVEL"] = "99"
        try:
            self.profile._prepare_trace()
        finally:
            if quiet:
                os.environ.pop("KINETO_LOG_LEVEL", None)
        self.profile._start_trace()
        self.running = True
        try:
            _state.listening.append(self.program_begins)
            if self.marked:
                self.calls.follow()
            else:
                self.calls.follow_compiled()
            if self.profile.record_shapes:
                self.launches.follow()
        except BaseException:
            self.end()
            raise

    def program_begins(self, prepares):
        """The program begins a profiler of its own, or only prepares to."""
        if _state.ending is not None:
            _state.ending.wait()
        detach.has_left()
        self.abandon("the program began a profiler of its own")
        if not prepares:
            # The program has already told PyTorch that a profiler runs; ending ours has told it the contrary.
            getattr(profiler, "_run_on_profiler_start", int)()

    def abandon(self, why):
        try:
            self.abandoned = self.abandoned or ProfilerBusy(why)
            self.end()
        except Exception as exception:
            marks.error("torch", exception)

    def end(self):
        """Returns the results, or None where the session has ended before. Leaves nothing installed."""
        inside = self.silence()
        running = self.let_go()
        self.forget()
        if not running:
            return None
        if not self.everywhere and threading.get_ident() != self.thread:
            return None  # only the thread that began it can end it; here it would crash
        if not self.abandoned:
            conflicts.wait_for_gpu()
        if inside:
            background_stop.drain(inside)
        # The program's own session begins now: had CUPTI to be left for ours, it would be left for that one.
        with contextlib.nullcontext() if self.abandoned else detach.leaving():
            results = torch.autograd._disable_profiler()
        _say_stopped()
        return results

    def silence(self):
        """Has the profiler listen no more. Returns the threads that may be in an operator whose beginning it
        has recorded; None where the session has ended, or where this is not possible."""
        if not (self.everywhere and background_stop.possible()):
            return None
        with self.lock:
            # Where the program has begun a profiler of its own, that is the one that listens.
            return background_stop.silence() if self.running else None

    def let_go(self):
        """Annotates nothing of the program's from now on. Returns whether the session ran."""
        with self.lock:
            running, self.running = self.running, False
        if _state.session is self:
            _state.session = None
        self.calls.let_go()
        self.launches.let_go()
        return running

    def forget(self):
        """The profiler has ended, or is about to: the program may begin one."""
        try:
            _state.listening.remove(self.program_begins)
        except ValueError:
            pass  # another thread has removed it, or it was never there


def _watch_forks():
    if not _state.forks_watched:
        background_stop.possible()  # look now: a forked child may find the loader's lock held
        os.register_at_fork(
            before=_before_fork, after_in_parent=background_stop.after_fork, after_in_child=_after_fork
        )
        _state.forks_watched = True
        try:
            detach.watch_forks()
        except Exception as exception:
            marks.error("torch", exception)


def _before_fork():
    # The child would find the profiler's locks held by a thread that it does not have.
    if _state.ending is not None:
        _state.ending.wait()
    background_stop.before_fork()


def _after_fork():
    # In the child. A DataLoader's worker would go on recording for as long as it lives, for nobody.
    background_stop.after_fork()
    session, _state.session = _state.session, None
    if session is None:
        return
    try:
        session.running = False
        session.abandoned = RuntimeError("the process forked")
        session.lock = threading.Lock()
        session.calls.forget_threads()
        session.let_go()
        session.forget()
        if not (background_stop.possible() and background_stop.unhear()):
            torch._C._autograd._enable_record_function(False)
            _state.listening.append(_record_again)
        _say_stopped()
    except Exception:
        pass


def _record_again(prepares):
    # Else a profiler of the child's own would see nothing.
    _state.listening.remove(_record_again)
    torch._C._autograd._enable_record_function(True)
