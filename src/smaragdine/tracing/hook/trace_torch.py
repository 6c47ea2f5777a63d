"""A window of PyTorch's own profiler, with the path of every module called in it.

Kineto records operators and kernels. What it does not know, the module, comes from hooks on all modules: each
call stands in the trace as an annotation `smaragdine:<path>`. Not where the program uses torch.compile: its
guards see the hooks, and it would compile everything anew.

Kineto has one session per process, and beginning a second one ends the first; the loser crashes when it stops
(torch 2.13). So we never begin beside the program's own profiler, and end ours the moment it begins one.
"""

import functools
import os
import re
import threading
import time
import warnings

import torch
import torch.autograd.profiler as profiler
from torch.nn.modules.module import _global_forward_hooks_with_kwargs as _with_kwargs
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from . import aside_torch, compiled_torch, edges_torch, forks, marks, paths_torch

FRAMEWORK, FORMAT, SUFFIX = "torch", "kineto", ".json"

PREFIX = "smaragdine:"
# What the program would have to do to begin a profiler of its own.
_BEGINNINGS = ("_prepare_profiler", "_enable_profiler")
# OptimizedModule warns when there are hooks like ours; with -W error the warning would end the program.
_FILTER = (
    "ignore",
    re.compile(r"Using `torch\.compile\(module\)` when there are global hooks"),
    UserWarning,
    None,
    0,
)

_DETACH = "TEARDOWN_CUPTI"

_session = None
_ending = None  # the aside_torch.Ending of the last session
_forks_watched = False
_edges_done = set()  # outermost modules whose dataflow is known in this process


def ready():
    """Whether a profiler may begin: the last one is over, and what it has heard of too."""
    if _ending is None:
        return True
    _ending.wait()
    return _ending.forgotten()


def start():
    """Begin profiling; raises, having changed nothing, where the program would notice."""
    global _session, _forks_watched
    if not ready():
        raise RuntimeError("another thread is in one operator since the last window")
    if [int(part) for part in torch.__version__.split(".")[:2]] < [2, 2]:
        raise NotImplementedError("PyTorch %s; operations are traced from 2.2 on" % torch.__version__)
    if _session is not None or torch.autograd._profiler_enabled() or _program_profiles():
        raise RuntimeError("a PyTorch profiler is already running, and there can be only one")
    if not _forks_watched:
        os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
        _forks_watched = True
        try:
            forks.watch()
        except Exception as exception:
            marks.error("torch", exception)
    session = _Session()
    session.begin()
    _session = session
    return session


def at_next_call(work):
    """Have `work` done by the program's main thread, when it calls a module next; a function to take it back.

    Begun by another thread than the one that imported PyTorch, Kineto complains on stderr.
    """
    if compiled_torch.used():
        raise NotImplementedError("programs that use torch.compile are traced by their steps alone")

    def once(module, args):
        if torch.compiler.is_compiling() or threading.current_thread() is not threading.main_thread():
            return
        handle.remove()
        work()

    handle = register_module_forward_pre_hook(once)
    return handle.remove


def still_safe():
    """Whether what waits for the next call may go on waiting: torch.compile would see it."""
    return not compiled_torch.used()


def stop(session, path):
    """End it and write Kineto's JSON to `path`; what else is known. Raises if there is nothing to write."""
    results = session.end()
    if results is None:
        raise RuntimeError(session.abandoned or "the trace was ended before")
    results.save(path)
    if not os.path.exists(path):  # Kineto only logs what went wrong
        raise OSError("the profiler could not write %s" % path)
    return _facts(session)


def stop_aside(session, path, then):
    """The same beside the program, where that can be: what to wait for, or None. Then `then` is called, by
    another thread, with what else is known (None: nothing was written) and when the program went on."""
    global _ending
    inside = session.silence()
    if inside is None or not session.let_go():
        return None
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        aside_torch.leave_gpu()
    facts = _facts(session)
    detaching = _detaching()
    if detaching:
        os.environ[_DETACH] = "1"
    getattr(profiler, "_run_on_profiler_stop", int)()
    resumed_ns = time.time_ns()

    def written():
        if detaching:
            os.environ.pop(_DETACH, None)
        session.forget()
        exists = os.path.exists(path)  # Kineto only logs what went wrong
        then(facts if exists else None, resumed_ns)
        if not exists:
            raise OSError("the profiler could not write %s" % path)

    _ending = aside_torch.Ending(inside, path, written)
    return _ending


def _facts(session):
    facts = {"edges": [list(edge) for edge in session.edges], "marked": bool(session.marked)}
    # A slice may have begun in the middle of a step, of which nobody can tell what belongs where. It counts
    # from the first whole call on.
    if session.whole_ns is not None:
        facts["begin_ns"] = session.whole_ns
    try:
        compiled = compiled_torch.facts()
        if compiled is not None:
            facts["compiled"] = compiled
    except Exception as exception:
        marks.error("torch", exception)
    return facts


def _detaching():
    """Kineto leaves CUPTI attached, and every launch after it slower (steps by 30 % on an H200), unless it is
    told otherwise. With CUDA before 12.6 programs with CUDA graphs might crash."""
    version = torch.version.cuda or "0"
    return [int(part) for part in version.split(".")[:2]] >= [12, 6] and _DETACH not in os.environ


def _program_profiles():
    # Unlike _profiler_enabled this sees the other threads too.
    return getattr(profiler, "_is_profiler_enabled", False)


class _Session:
    def __init__(self):
        self.abandoned = None  # why, where the program needed the profiler itself
        self.running = False
        self.marked = not compiled_torch.used()
        self.thread = threading.get_ident()
        self.threads = threading.local()
        self.callers = {}  # thread that calls modules -> its calls under way: (module, path, annotation)
        self.whole_ns = None  # when the first outermost call began
        self.paths = paths_torch.Paths()
        self.edges = {}
        self.handles = []
        self.replaced = {}
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
        if torch.cuda.is_initialized() and self.thread in threading._active:
            torch.cuda.synchronize()  # what was launched before would run into the window, for nobody
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
            for name in _BEGINNINGS:
                self._replace(name)
            if not self.marked:
                return
            warnings.filters.insert(0, _FILTER)  # filterwarnings would show again what was shown once
            self.handles.append(register_module_forward_pre_hook(_enter))
            self.handles.append(register_module_forward_hook(_leave, with_kwargs=True, always_call=True))
        except BaseException:
            self.end()
            raise

    def _replace(self, name):
        original = getattr(profiler, name)

        @functools.wraps(original)
        def begin(*args, **kwargs):
            if _ending is not None:
                _ending.wait()
            self.abandon("the program began a profiler of its own")
            return original(*args, **kwargs)

        self.replaced[name] = (original, begin)
        setattr(profiler, name, begin)

    def abandon(self, why):
        try:
            self.abandoned = self.abandoned or why
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
        if torch.cuda.is_initialized() and not self.abandoned:
            torch.cuda.synchronize()
        if inside:
            aside_torch.drain(inside)
        detaching = _detaching()
        if detaching:
            os.environ[_DETACH] = "1"
        try:
            results = torch.autograd._disable_profiler()
        finally:
            if detaching:
                os.environ.pop(_DETACH, None)
        getattr(profiler, "_run_on_profiler_stop", int)()
        return results

    def silence(self):
        """Threads that may be in an operator it has heard of; None where it has ended, or that cannot be."""
        if not (self.everywhere and aside_torch.possible()):
            return None
        with self.lock:
            # Where the program has begun a profiler of its own, that is the one that listens.
            return aside_torch.silence() if self.running else None

    def let_go(self):
        """Whether it ran. From now on nothing of the program's is marked any more."""
        global _session
        with self.lock:
            running, self.running = self.running, False
        if _session is self:
            _session = None
        while self.handles:
            handle = self.handles.pop()
            handle.remove()
            _with_kwargs.pop(handle.id, None)  # which the handle forgets (torch 2.13)
        if _FILTER in warnings.filters:
            warnings.filters.remove(_FILTER)
        # Also those of other threads, which nobody would end: they are recorded only when they are.
        for stack in list(self.callers.values()):
            _unwind(stack, 0)
        return running

    def forget(self):
        """The profiler has ended, or is about to: the program may begin one."""
        for name, (original, ours) in self.replaced.items():
            if getattr(profiler, name) is ours:
                setattr(profiler, name, original)
        self.replaced.clear()

    def thread_state(self):
        """The calls under way in this thread, and the dataflow between them."""
        try:
            return self.threads.state
        except AttributeError:
            stack = self.callers.setdefault(threading.get_ident(), [])
            self.threads.state = (stack, edges_torch.Edges(_edges_done, self.edges))
            return self.threads.state


def _annotation(name):
    fast = getattr(torch._C._profiler, "_RecordFunctionFast", None)
    return profiler.record_function(name) if fast is None else fast(name)


def _enter(module, args):
    # A constant under torch.compile, which then sees an empty function.
    if torch.compiler.is_compiling():
        return
    session = _session
    try:
        if session is not None and torch._C._get_tracing_state() is None:
            stack, edges = session.thread_state()
            if session.whole_ns is None and not stack and not paths_torch.calls_under_way():
                session.whole_ns = time.time_ns()
            path = session.paths.of(module, stack)
            edges.enter(path, args, len(stack))
            annotation = _annotation(PREFIX + path)
            annotation.__enter__()
            stack.append((module, path, annotation))
            if _session is not session:  # another thread has ended it meanwhile
                _unwind(stack, 0)
    except Exception as exception:
        if _session is session:  # or another thread has ended it meanwhile, and emptied the stack
            marks.error("torch", exception)


def _leave(module, args, *rest):
    if torch.compiler.is_compiling():
        return
    session = _session
    try:
        if session is not None:
            stack, edges = session.thread_state()
            # Calls above it were left without a word, by a KeyboardInterrupt for one.
            for depth in range(len(stack) - 1, -1, -1):
                if stack[depth][0] is module:
                    path = stack[depth][1]
                    _unwind(stack, depth)
                    # Keyword arguments and the output; after an error the output alone (torch 2.13).
                    edges.leave(path, rest[0] if len(rest) > 1 else None, rest[-1], depth)
                    break
    except Exception as exception:
        if _session is session:  # or another thread has ended it meanwhile, and emptied the stack
            marks.error("torch", exception)


def _unwind(stack, depth):
    while len(stack) > depth:
        try:
            annotation = stack.pop()[2]
        except IndexError:
            return  # another thread unwinds it too
        annotation.__exit__(None, None, None)


def _before_fork():
    # The child would find the profiler's locks held by a thread it does not have.
    if _ending is not None:
        _ending.wait()


def _after_fork():
    # A DataLoader's worker would go on recording for as long as it lives, for nobody.
    global _session
    session, _session = _session, None
    if session is None:
        return
    try:
        session.running = False
        session.abandoned = "the process forked"
        session.lock, session.threads = threading.Lock(), threading.local()
        session.callers = {}
        session.let_go()
        session.forget()
        torch._C._autograd._enable_record_function(False)
        getattr(profiler, "_run_on_profiler_stop", int)()
    except Exception:
        pass
