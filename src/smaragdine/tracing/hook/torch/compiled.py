"""What torch.compile made: which call of a generated function comes from which module, as inductor knows it,
and the source of each kernel, which may be gone when somebody wants to run the kernel alone. After the
profiler has stopped we read this from objects that compiled code keeps alive anyway, and change nothing.

While a window is open we also write down what inductor launches its kernels with. It tells PyTorch's
profiler, but a profiler of all threads keeps nothing of it (torch 2.11 and 2.13). So we keep each distinct
launch once, and put its number behind the name that the profiler records.
"""

import gc
import os
import re
import sys
import threading

import torch

from ..state import process

_state = process.torch

# The lines of a generated `call` that matter: what it calls, and the program's nodes behind that.
_LINE = re.compile(
    r"\s*(# Topologically Sorted Source Nodes: |# Source Nodes: |.*\w\.run\(|.*extern_kernels\.|.*torch\.ops)"
)
_ROOT = re.compile(r"[LG]\['[^']*'\](?:\.(.*))?$")
_MOST_BYTES = 4 << 20


def facts():
    """{"graphs": {key: lines}, "regions": {compile id: {node: path}}, "models": [class, …], "kernels": {hash:
    source}}; None where nothing was compiled.

    A path is below the module that was compiled; one that begins with "/" starts at a module's class.
    """
    compiled = frames()
    if not compiled:
        return None
    if _state.compiled_facts is None or _state.compiled_facts[0] != compiled:
        _state.compiled_facts = (compiled, _facts())
    return _state.compiled_facts[1]


def frames():
    """How many functions torch.compile has seen."""
    utils = sys.modules.get("torch._dynamo.utils")
    # It has none yet while it is being imported.
    return getattr(utils, "counters", {}).get("frames", {}).get("total", 0)


def used():
    """Whether torch.compile was called, or has compiled something."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(dynamo, "cached_backends", None) or {}
    return frames() > 0 or any(backend is not None for backend in list(backends.values()))


def around_calls(make):
    """Puts `make(original)` around calls of modules that were given to torch.compile; returns a function that
    takes it back. Unlike a hook it lies outside of what is compiled, and no guard sees it."""
    if not _state.compiled_around:
        _state.compiled_call = sys.modules["torch._dynamo.eval_frame"].OptimizedModule.__call__
    _state.compiled_around.append(make)
    _wrap()

    def take_back():
        if make in _state.compiled_around:
            _state.compiled_around.remove(make)
            _wrap()

    return take_back


def _wrap():
    call = _state.compiled_call
    for make in _state.compiled_around:
        call = make(call)
    sys.modules["torch._dynamo.eval_frame"].OptimizedModule.__call__ = call


def _facts():
    from torch.fx import GraphModule

    graphs, regions, models, files, size = {}, {}, set(), set(), 0
    for thing in gc.get_objects():
        # Not isinstance, which asks the object: a proxy of the program's might raise an error.
        kind = type(thing)
        if issubclass(kind, GraphModule):
            region = thing.__dict__.get("meta", {}).get("dynamo_compile_id")
            if region is not None:
                regions[str(region)] = _paths(thing.graph)
        elif kind.__name__ == "OptimizedModule":
            models.add(type(thing._orig_mod).__name__)
        elif kind.__name__ == "CompiledFxGraph" and kind.__module__.startswith("torch._inductor"):
            key, source = thing.__dict__.get("_fx_graph_cache_key"), thing.__dict__.get("source_code")
            if key and source and key not in graphs and size < _MOST_BYTES:
                _, _, body = source.partition("def call(")
                graphs[key] = [line.strip() for line in body.splitlines() if _LINE.match(line)]
                size += sum(map(len, graphs[key]))
        elif kind.__name__ == "CachingAutotuner" and kind.__module__.startswith("torch._inductor"):
            files.add(thing.__dict__.get("filename") or "")
    return {
        "graphs": graphs,
        "regions": regions,
        "models": sorted(models),
        "kernels": sources(files),
    }


def sources(paths):
    """{name of the file: what is in it}, as far as it is there and not too much."""
    found, left = {}, _MOST_BYTES
    for path in paths:
        name, extension = os.path.splitext(os.path.basename(path))
        try:
            if extension != ".py" or os.path.getsize(path) > left:
                continue
            with open(path, encoding="utf-8") as file:
                found[name] = file.read()
        except (OSError, UnicodeError):
            continue
        left -= len(found[name])
    return found


def _paths(graph):
    """{node: path of the module it comes from}."""
    found = {}
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if not stack:
            continue
        entries = list(stack.values())
        root, innermost = _ROOT.match(entries[0][0]), _ROOT.match(entries[-1][0])
        if root is None or innermost is None:
            continue
        below = (innermost.group(1) or "").replace(".", "/")
        if root.group(1) is None:  # what was compiled is a function that calls the model
            kind = entries[0][1]
            name = kind if isinstance(kind, str) else kind.__name__
            below = "/" + "/".join(filter(None, (name.rsplit(".", 1)[-1], below)))
        found[node.name] = below
    return found


SEPARATOR = " smaragdine-launch:"
_MOST_LAUNCHES = 10000

# As the profiler calls them.
_TYPES = {
    "torch.float32": "float",
    "torch.float64": "double",
    "torch.bfloat16": "c10::BFloat16",
    "torch.float16": "c10::Half",
    "torch.float8_e4m3fn": "c10::Float8_e4m3fn",
    "torch.int64": "long int",
    "torch.int32": "int",
    "torch.int16": "short int",
    "torch.int8": "signed char",
    "torch.uint8": "unsigned char",
    "torch.bool": "bool",
}
_ABOUT = ("kernel_hash", "kernel_kwargs", "num_warps", "num_stages")


class Launches:
    def __init__(self):
        self.said = []
        self._numbers = {}
        self._lock = threading.Lock()  # the backward pass has threads of its own
        self._original = self._ours = None

    def follow(self):
        original = getattr(torch._C._profiler, "_RecordFunctionFast", None)
        if original is None:
            return

        # PyTorch calls this with keywords, too. What we do not know we pass on as it is.
        def record(*args, **named):
            try:
                if len(args) == 3 and args[2].get("kernel_backend") == "triton":
                    args = ("%s%s%d" % (args[0], SEPARATOR, self._number(*args[1:])), *args[1:])
            except Exception:
                pass  # the profiler records it without
            return original(*args, **named)

        self._original, self._ours = original, record
        torch._C._profiler._RecordFunctionFast = record

    def let_go(self):
        if self._ours is not None and torch._C._profiler._RecordFunctionFast is self._ours:
            torch._C._profiler._RecordFunctionFast = self._original
        self._ours = None

    def _number(self, args, about):
        key = (*(about.get(name) for name in _ABOUT), *map(_seen, args))
        number = self._numbers.get(key)
        if number is not None:
            return number
        said = {name: about.get(name) for name in _ABOUT}
        dims, strides, types, values = zip(*map(_said, args))
        said.update(dims=dims, strides=strides, types=types, values=values)
        with self._lock:
            if len(self.said) >= _MOST_LAUNCHES:
                raise OverflowError
            self.said.append(said)
            return self._numbers.setdefault(key, len(self.said) - 1)


def _seen(arg):
    if isinstance(arg, torch.Tensor):
        return tuple(arg.shape), arg.stride(), arg.dtype
    return type(arg), arg if isinstance(arg, (bool, int, float, str)) else None  # keep nothing alive


def _said(arg):
    """Dimensions, strides, type and value, as the profiler writes them."""
    if isinstance(arg, torch.Tensor):
        return list(arg.shape), list(arg.stride()), _TYPES.get(str(arg.dtype), ""), ""
    known = isinstance(arg, (bool, int, float))
    return [], [], "Scalar" if known else "", repr(arg) if known else ""
