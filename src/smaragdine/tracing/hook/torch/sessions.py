"""One session of Kineto, from its beginning to its end.

Kineto has one session per process, and beginning a second one ends the first; the loser crashes when it stops
(torch 2.13). So we never begin beside the program's own profiler, and end ours the moment it begins one.
"""

import contextlib
import os
import threading

import torch
import torch.autograd.profiler as profiler

from .. import marks
from ..state import process
from . import background_stop, compiled, detach, forks, graphs, program_profiler
from .calls import Calls
from ..tracers import ProfilerBusy

_state = process.torch

program_profiler.patch_profiler(profiler)  # if it is not yet
graphs.patch_graphs(torch.cuda.graphs)


def begun():
    """A session that runs; raises, having changed nothing, where the program would notice."""
    if _state.session is not None or _program_profiles():
        raise ProfilerBusy("a PyTorch profiler is already running, and there can be only one")
    _watch_forks()
    session = TorchSession()
    session.begin()
    _state.session = session
    return session


def say_stopped():
    getattr(profiler, "_run_on_profiler_stop", int)()


def _program_profiles():
    # Unlike _profiler_enabled, what its module says is true of the other threads too.
    said = getattr(profiler, "_is_profiler_enabled", False)
    return said or torch.autograd._profiler_enabled() or _state.prepared


class TorchSession:
    def __init__(self):
        self.abandoned = None  # the error that says why, where the program needed the profiler itself
        self.running = False
        self.marked = not compiled.used()
        self.thread = threading.get_ident()
        self.calls = Calls()
        self.lock = threading.Lock()
        self.everywhere = True
        self.profile = self._profile()

    def _profile(self):
        try:
            # All threads (DataParallel has one per GPU), and any thread can end it.
            config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        except TypeError:
            config = None
            self.everywhere = False
            if self.thread not in threading._active:
                raise NotImplementedError(
                    "PyTorch %s profiles one thread only, and so nothing of a program without steps"
                    % torch.__version__
                )
        profile = profiler.profile(use_kineto=True, experimental_config=config)
        cuda = torch.autograd.ProfilerActivity.CUDA
        if torch.cuda.is_initialized() and cuda in torch.autograd._supported_activities():
            profile.kineto_activities.add(cuda)
        return profile

    def begin(self):
        # Kineto reads its log level here; as it is, it would say on stderr that profiling begins and ends.
        if self.thread in threading._active:
            graphs.wait_for_gpu()  # what was launched before would run into the window, for nobody
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
        except BaseException:
            self.end()
            raise

    def program_begins(self, prepares):
        """A profiler of its own, or prepares to."""
        if _state.ending is not None:
            _state.ending.wait()
        detach.has_left()
        self.abandon("the program began a profiler of its own")
        if not prepares:
            # It has said so before; to end ours says the contrary.
            getattr(profiler, "_run_on_profiler_start", int)()

    def abandon(self, why):
        try:
            self.abandoned = self.abandoned or ProfilerBusy(why)
            self.end()
        except Exception as exception:
            marks.error("torch", exception)

    def end(self):
        """The results, or None where it was ended before. Leaves nothing installed."""
        inside = self.silence()
        running = self.let_go()
        self.forget()
        if not running:
            return None
        if not self.everywhere and threading.get_ident() != self.thread:
            return None  # only its own thread could; here it would crash
        if not self.abandoned:
            graphs.wait_for_gpu()
        if inside:
            background_stop.drain(inside)
        # With ours the program's own session would be left, which begins now.
        with contextlib.nullcontext() if self.abandoned else detach.leaving():
            results = torch.autograd._disable_profiler()
        say_stopped()
        return results

    def silence(self):
        """Threads that may be in an operator it has heard of; None where it has ended, or that cannot be."""
        if not (self.everywhere and background_stop.possible()):
            return None
        with self.lock:
            # Where the program has begun a profiler of its own, that is the one that listens.
            return background_stop.silence() if self.running else None

    def let_go(self):
        """Whether it ran. From now on nothing of the program's is marked any more."""
        with self.lock:
            running, self.running = self.running, False
        if _state.session is self:
            _state.session = None
        self.calls.let_go()
        return running

    def forget(self):
        """The profiler has ended, or is about to: the program may begin one."""
        try:
            _state.listening.remove(self.program_begins)
        except ValueError:
            pass  # by another thread, or it never was


def _watch_forks():
    if not _state.forks_watched:
        background_stop.possible()  # looked for here: a child may find the loader's lock held
        os.register_at_fork(
            before=_before_fork, after_in_parent=background_stop.after_fork, after_in_child=_after_fork
        )
        _state.forks_watched = True
        try:
            forks.watch()
        except Exception as exception:
            marks.error("torch", exception)


def _before_fork():
    # The child would find the profiler's locks held by a thread it does not have.
    if _state.ending is not None:
        _state.ending.wait()
    background_stop.before_fork()


def _after_fork():
    # A DataLoader's worker would go on recording for as long as it lives, for nobody.
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
        say_stopped()
    except Exception:
        pass


def _record_again(prepares):
    # A profiler of the child's own would see nothing.
    _state.listening.remove(_record_again)
    torch._C._autograd._enable_record_function(True)
