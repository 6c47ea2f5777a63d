"""Runs calls of PyTorch alone on one GPU: `python torch_card.py`, a process of its own.

It runs in the program's interpreter, which may not have our package: standard library and torch alone, and
Python 3.8. It reads settings, then requests, from stdin, a line of JSON each, and answers each on stdout:

    {"do": "check", "calls": [call, ...]}       rebuild each call and see which kernels it launches
    {"do": "prepare", "call": 3, "cold": true}  make its inputs, and a CUDA graph that lasts some milliseconds
    {"do": "load", "rest": 1.0}                 run the graph again and again, with a rest after each
    {"do": "stop"}                              end that; how long the calls ran, and how long they rested
    {"do": "pause"}                             the same as load, of the rest alone

A call is {"id", "op", "dims", "strides", "types", "values", "kernels"} as Kineto recorded it, and "generated"
where it is a kernel of torch.compile. Power is not
measured here. Whoever asks reads the card's energy counter, and needs to know from here for how much of the
time the call ran.
"""

import collections
import itertools
import json
import math
import os
import random
import sys
import tempfile
import threading

import torch

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
import card_requests
import inductor_kernels

DEVICE = "cuda"
GRAPH_S = 0.002  # a graph's length: long beside its launch, short beside a sensor's window
AHEAD = 6  # turns that wait for the card
COLD_BYTES = 200 << 20  # more than any second-level cache holds
MOST_COPIES = 64
MOST_VARIANTS = 12

DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::BFloat16": torch.bfloat16,
    "c10::Half": torch.float16,
    "long int": torch.int64,
    "long": torch.int64,
    "int": torch.int32,
    "short int": torch.int16,
    "signed char": torch.int8,
    "unsigned char": torch.uint8,
    "bool": torch.bool,
    "c10::complex<float>": torch.complex64,
    "unsigned long": getattr(torch, "uint64", torch.int64),
    "c10::Float8_e4m3fn": getattr(torch, "float8_e4m3fn", None),
}


class CannotBeRebuilt(Exception):
    """Why, in words for a person."""


# Arguments.


def parsed(text):
    """A scalar, or a list of them, as Kineto writes it."""
    text = text.strip()
    if text.startswith("["):
        inner = text[1:-1].strip()
        return [parsed(part) for part in inner.split(",")] if inner else []
    if text in ("True", "False"):
        return text == "True"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    raise CannotBeRebuilt("a value is %r" % text)


def schemas(op, count):
    """Overloads of an operation that take so many arguments, functional ones first."""
    found = [each for each in torch._C._jit_get_schemas_for_operator(op) if len(each.arguments) == count]
    return sorted(found, key=lambda each: "out" in each.overload_name)


def overload(schema):
    namespace, _, name = schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    return getattr(packet, schema.overload_name or "default")


def fits(argument, recorded, text):
    """Whether an argument may be what was recorded."""
    kind = str(argument.type)
    if recorded in DTYPES:
        return "Tensor" in kind and "List" not in kind
    if recorded in ("TensorList", "GenericList"):
        return "List" in kind and "Tensor" in kind
    if recorded == "ScalarList":
        return "List" in kind and "Tensor" not in kind
    if recorded == "Scalar":
        if "Tensor" in kind or "List" in kind or "str" in kind:
            return False
        value = parsed(text)
        if isinstance(value, bool):
            return "bool" in kind or "number" in kind
        return "bool" not in kind and not (isinstance(value, float) and kind in ("int", "Optional[int]"))
    if "Tensor" in kind:
        return True  # None, or a tensor that is not defined
    usual = ("Optional", "str", "Generator", "Device", "bool", "List[number]", "List[Scalar]")
    return any(word in kind for word in usual)


def choices(argument, recorded, text):
    """What an argument may have been, the most likely first."""
    kind = str(argument.type)
    if recorded in ("Scalar", "ScalarList"):
        return [parsed(text)]
    if "str" in kind:
        usual = argument.default_value if argument.has_default_value() else "none"
        return list(dict.fromkeys([usual, "tanh", "none", "reflect", "bilinear"]))
    if "Device" in kind:
        return [DEVICE]
    if "bool" in kind and "List" in kind:
        return [[True] * 3, [True, True, False], [False, True, True], [False, True, False]]
    if "List" in kind and "Optional" not in kind and "Tensor" not in kind:
        return [NUMBERS]  # as many as there are tensors; Kineto keeps no long lists
    return [None]


NUMBERS = object()
POSITIVE = ("sqrt", "rsqrt", "log", "addcdiv", "pow", "_foreach_div", "var")
LOG_PROBABILITIES = {"aten::_log_softmax_backward_data": 1}
PROBABILITIES = {"aten::_softmax_backward_data": 1}


ALONG_A_DIMENSION = tuple(
    "aten::" + name
    for name in ("index_select", "gather", "scatter_", "scatter", "index_add_", "scatter_add_")
)


def classes(call, position):
    """Integers of an index are below this."""
    op, dims, values = call["op"], call["dims"], call["values"]
    if "bounds" in call:
        return call["bounds"].get(position, 1)
    try:
        if op == "aten::embedding_dense_backward":
            return int(values[2])
        if op in ("aten::embedding", "aten::embedding_renorm_"):
            return dims[0][0]
        if op.startswith(("aten::nll_loss", "aten::nll_loss2d")):
            return dims[1][1] if "backward" in op else dims[0][1]
        if op in ALONG_A_DIMENSION:
            return dims[0][int(values[1])]
    except (IndexError, ValueError, TypeError):
        pass
    return 1  # an index out of range ends the process: zero is always inside


def tensor(call, position, dims, strides, dtype, device):
    """Made-up values in the same places: random normal numbers, indices in range, nine true of ten."""
    if dtype is None:
        raise CannotBeRebuilt("its type is not known here")
    size = 1 + sum((length - 1) * stride for length, stride in zip(dims, strides))
    if any(length == 0 for length in dims):
        return torch.empty(dims, dtype=dtype, device=device)
    if dtype == torch.bool:
        flat = torch.rand(size, device=device) < 0.9
    elif dtype.is_floating_point or dtype.is_complex:
        wide = torch.float32 if dtype.itemsize < 2 else dtype
        flat = torch.randn(size, dtype=wide, device=device).to(dtype)
        if any(word in call["op"] for word in POSITIVE):
            flat = flat.abs_().add_(0.01)
    else:
        most = max(1, classes(call, position))
        flat = torch.randint(0, most, (size,), device=device).to(dtype)
    made = torch.as_strided(flat, dims, strides)
    if LOG_PROBABILITIES.get(call["op"]) == position:
        made.copy_(torch.log_softmax(made.float(), -1))
    if PROBABILITIES.get(call["op"]) == position:
        made.copy_(torch.softmax(made.float(), -1))
    return made


LIST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def variants(call, lists):
    """Ways to rebuild a call, the most likely first. `lists` are those of the program's optimizers: of a long
    list of tensors Kineto keeps nothing but that it was one."""
    if "generated" in call:
        # As it is, if inductor's code is not as we know it.
        return (GeneratedKernel(call, steady) for steady in (True, False))
    types = call["types"]
    found = schemas(call["op"], len(types))
    found = [each for each in found if all(map(fits, each.arguments, types, call["values"]))]
    if not found:
        raise CannotBeRebuilt("no overload takes what was recorded")
    cut = [i for i, each in enumerate(types) if each == "TensorList" and not call["dims"][i]]
    if not cut:
        return _variants(call, found)
    if not lists:
        raise CannotBeRebuilt("Kineto keeps no long lists of tensors")
    return itertools.chain.from_iterable(_variants(with_list(call, cut, each), found) for each in lists)


def with_list(call, cut, tensors):
    """The same call with a list of an optimizer's where its own is not known."""
    dims, strides = list(call["dims"]), list(call["strides"])
    for i in cut:
        dims[i], strides[i] = [each[0] for each in tensors], [each[1] for each in tensors]
    return dict(call, dims=dims, strides=strides)


def _variants(call, found):
    types = call["types"]
    for schema in found[:4]:
        options = [choices(*both) for both in zip(schema.arguments, types, call["values"])]
        small = [
            i for i, each in enumerate(types) if each in DTYPES and not call["dims"][i]
        ]  # of no dimension: a number may be on the processor
        for fixed in itertools.product(*options):
            for where in (DEVICE, "cpu") if small else (DEVICE,):
                for of_lists in LIST_DTYPES if "TensorList" in types else (None,):
                    yield Variant(call, schema, fixed, where, of_lists)


class Variant:
    def __init__(self, call, schema, fixed, small_on, of_lists):
        self.call = call
        self.schema = schema
        self.fixed = fixed
        self.small_on = small_on
        self.of_lists = of_lists
        self.function = overload(schema)

    def inputs(self):
        call, made = self.call, []
        for i, recorded in enumerate(call["types"]):
            dims, strides = call["dims"][i], call["strides"][i]
            if recorded in DTYPES:
                on = DEVICE if dims else self.small_on
                made.append(tensor(call, i, dims, strides, DTYPES[recorded], on))
            elif recorded == "TensorList":
                each = zip(dims, strides)
                made.append([tensor(call, i, d, s, self.of_lists, DEVICE) for d, s in each])
            elif self.fixed[i] is NUMBERS:
                lengths = [
                    len(each) for each, kind in zip(call["dims"], call["types"]) if kind == "TensorList"
                ]
                made.append([0.001] * max(lengths, default=1))
            else:
                made.append(self.fixed[i])
        names = [argument.name for argument in self.schema.arguments]
        keyed = [argument.kwarg_only for argument in self.schema.arguments]
        args = [value for value, key in zip(made, keyed) if not key]
        return args, {name: value for name, value, key in zip(names, made, keyed) if key}

    def run(self, inputs):
        args, named = inputs
        return self.function(*args, **named)


class GeneratedKernel:
    """A kernel of torch.compile: what it was called with is all there is to know."""

    def __init__(self, call, steady):
        self.call = dict(call, bounds=inductor_kernels.bounds(call["generated"]["source"]))
        self.steady = steady
        self.launcher = None

    def inputs(self):
        call, made = self.call, []
        if self.launcher is None:
            self.launcher = inductor_kernels.load(call["generated"], self.steady)
        for i, recorded in enumerate(call["types"]):
            if recorded in DTYPES:
                made.append(tensor(call, i, call["dims"][i], call["strides"][i], DTYPES[recorded], DEVICE))
            elif recorded == "Scalar":
                made.append(parsed(call["values"][i]))
            else:
                raise CannotBeRebuilt("the profiler does not say what argument %d was" % i)
        return made, {}

    def run(self, inputs):
        inductor_kernels.run(self.launcher, inputs[0])


def size_bytes(inputs):
    args, named = inputs
    found = 0
    for value in itertools.chain(args, named.values()):
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, torch.Tensor):
                found += each.untyped_storage().nbytes()
    return found


# Which kernels a call launches.


def launched(work):
    """The kernels that each function of `work` launches: name, grid and duration, in the order of launch."""
    from torch.profiler import ProfilerActivity, profile, record_function

    for each in work:
        each()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for i, each in enumerate(work):
            with record_function("call %d" % i):
                each()
        torch.cuda.synchronize()
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        seen.export_chrome_trace(path)
        with open(path) as file:
            events = json.load(file)["traceEvents"]
    finally:
        os.unlink(path)
    spans, launches, kernels = [], {}, []
    for event in events:
        category = event.get("cat")
        if category == "user_annotation" and event["name"].startswith("call "):
            spans.append((event["ts"], event["ts"] + event["dur"], int(event["name"][5:])))
        elif category in ("cuda_runtime", "cuda_driver") and event["args"].get("correlation"):
            launches[event["args"]["correlation"]] = event["ts"]
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append(event)
    spans.sort()
    found = [[] for _ in work]
    for kernel in sorted(kernels, key=lambda event: event["ts"]):
        at = launches.get(kernel["args"].get("correlation"))
        for begin, end, i in spans:
            if at is not None and begin <= at < end:
                found[i].append([kernel["name"], kernel["args"].get("grid"), kernel["dur"] * 1e-6])
    return found


def same(kernels, recorded):
    def known(listed):
        return collections.Counter((name, tuple(grid or ())) for name, grid, *_ in listed)

    return known(kernels) == known(recorded)


class Card:
    def __init__(self):
        self.rebuilt = {}  # id of a call → Variant
        self.graph = None
        self.load = None

    def check(self, calls, lists):
        """For each call: rebuilt with the kernels of the program, or why not."""
        answers, waiting = {}, {}
        for call in calls:
            try:
                waiting[call["id"]] = itertools.islice(variants(call, lists), MOST_VARIANTS)
            except Exception as error:
                answers[call["id"]] = {"why": str(error) or repr(error)}
        recorded = {call["id"]: call["kernels"] for call in calls}
        while waiting:
            tried = {}
            for id_, left in list(waiting.items()):
                variant = self._next(left, answers, id_)
                if variant is None:
                    del waiting[id_]
                    answers.setdefault(id_, {"why": "it cannot be rebuilt"})
                else:
                    tried[id_] = variant
            if not tried:
                break
            ids = list(tried)
            for id_, kernels in zip(ids, launched([tried[id_][1] for id_ in ids])):
                variant = tried[id_][0]
                if same(kernels, recorded[id_]):
                    self.rebuilt[id_] = variant
                    answers[id_] = {"kernel_s": sum(each[2] for each in kernels)}
                    del waiting[id_]
                else:
                    others = [kernel[:2] for kernel in kernels]
                    answers[id_] = {"why": "it launches other kernels here", "kernels": others}
            torch.cuda.empty_cache()
        return {"checked": [dict(answers[call["id"]], id=call["id"]) for call in calls]}

    def _next(self, left, answers, id_):
        """The next way to rebuild it that runs at all, with its inputs."""
        for variant in left:
            try:
                inputs = variant.inputs()
                variant.run(inputs)
                torch.cuda.synchronize()
            except torch.cuda.OutOfMemoryError:
                answers[id_] = {"why": "out of memory"}
                torch.cuda.empty_cache()
                return None
            except Exception as error:
                if lost():
                    raise
                answers[id_] = {"why": card_requests.said(error, 200)}
                continue
            return variant, lambda variant=variant, inputs=inputs: variant.run(inputs)
        return None

    def prepare(self, id_, cold):
        variant = self.rebuilt[id_]
        self.graph = None
        torch.cuda.empty_cache()
        first = variant.inputs()
        bytes_ = max(1, size_bytes(first))
        copies = min(MOST_COPIES, 1 + COLD_BYTES // bytes_) if cold else 1
        inputs = [first] + [variant.inputs() for _ in range(copies - 1)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())  # which still fills the inputs
        with torch.cuda.stream(side):
            for each in inputs[:3]:
                variant.run(each)
        torch.cuda.synchronize()
        once = torch.cuda.CUDAGraph()
        with torch.cuda.graph(once):
            for each in inputs:
                variant.run(each)
        length_s = self._length_s(once) / len(inputs)
        count = max(1, math.ceil(GRAPH_S / max(length_s, 1e-7)))
        count = min(count, 4000)
        if count > len(inputs):
            count = math.ceil(count / len(inputs)) * len(inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(count):
                variant.run(inputs[i % len(inputs)])
        self.graph, self.inputs, self.calls = graph, inputs, count
        self.graph_s = self._length_s(graph)
        about = {"calls": count, "copies": copies, "bytes": bytes_}
        return dict(about, prepared=id_, call_s=self.graph_s / count)

    def _length_s(self, graph):
        graph.replay()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3

    def begin(self, rest):
        self.load = Load(self.graph, self.calls, self.graph_s, rest)
        return {"running": True}

    def pause(self):
        self.load = Load(None, 0, GRAPH_S, 1.0)
        return {"running": True}

    def stop(self):
        load, self.load = self.load, None
        return load.end()


class Load(threading.Thread):
    """Keeps the card at a call until it is ended, a few turns ahead of it."""

    def __init__(self, graph, calls, length_s, rest):
        super().__init__(daemon=True)
        self.graph, self.calls = graph, calls
        self.cycles = int(length_s * rest * CYCLES_A_S[0])
        self.going = True
        self.turns = 0
        self.on_s = self.rest_s = 0.0
        self.error = None
        self.start()

    def run(self):
        try:
            self._run()
        except Exception as error:
            self.error = str(error)

    def _run(self):
        waiting = collections.deque()
        while self.going:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            events[0].record()
            if self.graph is not None:
                self.graph.replay()
            events[1].record()
            if self.cycles:
                # Never in step with the sensor: it takes a sample every 20 ms, and would see turns alone.
                torch.cuda._sleep(int(self.cycles * random.uniform(0.2, 1.8)))
            events[2].record()
            waiting.append(events)
            if len(waiting) > AHEAD:
                self._take(waiting.popleft())
        while waiting:
            self._take(waiting.popleft())

    def _take(self, events):
        events[2].synchronize()
        self.turns += 1
        self.on_s += events[0].elapsed_time(events[1]) * 1e-3
        self.rest_s += events[1].elapsed_time(events[2]) * 1e-3

    def end(self):
        self.going = False
        self.join()
        if self.error:
            raise RuntimeError(self.error)
        return {
            "turns": self.turns,
            "calls": self.turns * self.calls,
            "on_s": self.on_s,
            "rest_s": self.rest_s,
        }


CYCLES_A_S = [1.7e9]


def measure_spacer():
    torch.cuda._sleep(10_000_000)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.cuda._sleep(200_000_000)
    end.record()
    end.synchronize()
    CYCLES_A_S[0] = 200_000_000 / (begin.elapsed_time(end) * 1e-3)


def lost():
    """Whether an error has ended all work on the card, as an index out of range does."""
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def main():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what torch prints is no answer
    settings = json.loads(sys.stdin.readline())
    torch.backends.cuda.matmul.allow_tf32 = settings.get("tf32", False)
    torch.backends.cudnn.allow_tf32 = settings.get("cudnn_tf32", True)
    torch.backends.cudnn.benchmark = settings.get("cudnn_benchmark", False)
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    torch.set_grad_enabled(False)
    measure_spacer()
    properties = torch.cuda.get_device_properties(0)
    card = Card()
    facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "card": properties.name}
    facts["uuid"] = str(getattr(properties, "uuid", ""))
    answers.write(json.dumps({"ready": facts}) + "\n")
    card_requests.answer_all(card, lost, answers)


if __name__ == "__main__":
    main()
