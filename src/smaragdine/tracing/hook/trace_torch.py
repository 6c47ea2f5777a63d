"""A window of PyTorch's own profiler, with the path of every module called in it.

Kineto records operators and kernels. What it does not know, the module, comes from hooks on all modules: each
call stands in the trace as an annotation `smaragdine:<path>`. Nothing of this happens inside compiled code.

Kineto has one session per process, and beginning a second one ends the first; the loser crashes when it stops
(torch 2.13). So we never begin beside the program's own profiler, and end ours the moment it begins one.
"""

import functools
import os
import re
import threading
import warnings
import weakref

import torch
import torch.autograd.profiler as profiler
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from . import marks

PREFIX = "smaragdine:"
# Modules that only stand around the user's own, and what they call it.
_WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
_WRAPPED = frozenset(name for name in _WRAPPERS.values() if name != "module")
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

_session = None
_forks_watched = False


def start():
    """Begin profiling; raises, having changed nothing, where the program would notice."""
    global _session, _forks_watched
    if [int(part) for part in torch.__version__.split(".")[:2]] < [2, 2]:
        raise NotImplementedError("PyTorch %s; operations are traced from 2.2 on" % torch.__version__)
    if _session is not None or torch.autograd._profiler_enabled() or _program_profiles():
        raise RuntimeError("a PyTorch profiler is already running, and there can be only one")
    if not _forks_watched:
        os.register_at_fork(after_in_child=_after_fork)
        _forks_watched = True
    session = _Session()
    session.begin()
    _session = session
    return session


def stop(session, path):
    """End it and write Kineto's JSON to `path`; raises where there is nothing to write."""
    results = session.end()
    if results is None:
        raise RuntimeError(session.abandoned or "the trace was ended before")
    results.save(path)
    if not os.path.exists(path):  # Kineto only logs what went wrong
        raise OSError("the profiler could not write %s" % path)


def _program_profiles():
    # Unlike _profiler_enabled this sees the other threads too.
    return getattr(profiler, "_is_profiler_enabled", False)


class _Session:
    def __init__(self):
        self.abandoned = None  # why, where the program needed the profiler itself
        self.running = False
        self.thread = threading.get_ident()
        self.threads = threading.local()
        self.paths = {}  # id of a module -> (weak reference to it, its path)
        self.roots = {}  # name -> weak reference to the outermost module of that name
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
        profile = profiler.profile(use_kineto=True, experimental_config=config)
        cuda = torch.autograd.ProfilerActivity.CUDA
        if torch.cuda.is_initialized() and cuda in torch.autograd._supported_activities():
            profile.kineto_activities.add(cuda)
        return profile

    def begin(self):
        # Kineto reads its log level here; as it is, it would say on stderr that profiling begins and ends.
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
            warnings.filters.insert(0, _FILTER)  # filterwarnings would show again what was shown once
            self.handles.append(register_module_forward_pre_hook(_enter))
            self.handles.append(register_module_forward_hook(_leave, always_call=True))
        except BaseException:
            self.end()
            raise

    def _replace(self, name):
        original = getattr(profiler, name)

        @functools.wraps(original)
        def begin(*args, **kwargs):
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
        global _session
        with self.lock:
            running, self.running = self.running, False
        if _session is self:
            _session = None
        self._uninstall()
        if not running:
            return None
        if not self.everywhere and threading.get_ident() != self.thread:
            return None  # only its own thread could; here it would crash
        if torch.cuda.is_initialized() and not self.abandoned:
            torch.cuda.synchronize()
        results = torch.autograd._disable_profiler()
        getattr(profiler, "_run_on_profiler_stop", int)()
        return results

    def _uninstall(self):
        while self.handles:
            self.handles.pop().remove()
        for name, (original, ours) in self.replaced.items():
            if getattr(profiler, name) is ours:
                setattr(profiler, name, original)
        self.replaced.clear()
        if _FILTER in warnings.filters:
            warnings.filters.remove(_FILTER)
        _unwind(self.stack(), 0)

    def stack(self):
        """The calls under way in this thread: (module, path, annotation)."""
        try:
            return self.threads.stack
        except AttributeError:
            self.threads.stack = []
            return self.threads.stack

    def path_of(self, module, stack):
        path = self._known(module)
        if path is not None:
            return path
        if stack and type(module).__name__ == "GraphModule":
            return stack[-1][1]  # made by a compiler, where the program has the module it was made from
        if not stack:
            # A part called by itself later (recomputed in backward, say) is known by its place in this one.
            self._register(module, self._root_name(module))
        else:
            self._register(stack[0][0], stack[0][1])  # a model may have grown since
            if self._known(module) is None:
                self._register(module, "%s/%s" % (stack[-1][1], _own_name(module)))
        return self._known(module)

    def _known(self, module):
        entry = self.paths.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None

    def _register(self, root, path):
        self.paths[id(root)] = (weakref.ref(root), path)
        wrapped = _wrapped(root)
        if wrapped is not None:
            self._register(wrapped, path)
            return
        for name, module in root.named_modules():
            if name and _is_keras(module):
                continue  # a Keras layer has a name of its own, the same on all backends
            parts = [part for part in name.split(".") if part not in _WRAPPED]
            self.paths[id(module)] = (weakref.ref(module), "/".join([path, *parts]) if name else path)

    def _root_name(self, module):
        wrapped = module
        while wrapped is not None:
            module, wrapped = wrapped, _wrapped(wrapped)
        name = base = _own_name(module)
        if getattr(module, "_is_replica", False):
            return name  # DataParallel's copies are one model
        number = 0
        while self.roots.get(name, _nobody)() not in (None, module):
            number += 1
            name = "%s_%d" % (base, number)
        self.roots[name] = weakref.ref(module)
        return name


def _own_name(module):
    return str(module.name) if _is_keras(module) else type(module).__name__


def _is_keras(module):
    return any(kind.__module__ == "keras.src.layers.layer" for kind in type(module).__mro__)


def _wrapped(module):
    name = _WRAPPERS.get(type(module).__name__)
    wrapped = None if name is None else getattr(module, name, None)
    return wrapped if isinstance(wrapped, torch.nn.Module) else None


def _nobody():
    return None


def _annotation(name):
    fast = getattr(torch._C._profiler, "_RecordFunctionFast", None)
    return profiler.record_function(name) if fast is None else fast(name)


def _enter(module, args):
    # A constant under torch.compile, which then sees an empty function.
    if torch.compiler.is_compiling():
        return
    try:
        session = _session
        if session is not None and torch._C._get_tracing_state() is None:
            stack = session.stack()
            path = session.path_of(module, stack)
            annotation = _annotation(PREFIX + path)
            annotation.__enter__()
            stack.append((module, path, annotation))
    except Exception as exception:
        marks.error("torch", exception)


def _leave(module, args, output):
    if torch.compiler.is_compiling():
        return
    try:
        session = _session
        if session is not None:
            stack = session.stack()
            # Calls above it were left without a word, by a KeyboardInterrupt for one.
            for depth in range(len(stack) - 1, -1, -1):
                if stack[depth][0] is module:
                    _unwind(stack, depth)
                    break
    except Exception as exception:
        marks.error("torch", exception)


def _unwind(stack, depth):
    while len(stack) > depth:
        stack.pop()[2].__exit__(None, None, None)


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
        session._uninstall()
        torch._C._autograd._enable_record_function(False)
        getattr(profiler, "_run_on_profiler_stop", int)()
    except Exception:
        pass
