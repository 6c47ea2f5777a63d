"""Runs instructions of JAX's programs alone on one GPU: `python jax_card.py`, a process of its own.

It runs in the program's interpreter, which may not have our package: JAX, NumPy and the files beside this one
alone, and Python 3.8. It answers what `torch_card.py` answers (check, prepare, load, stop, pause), of calls
{"id", "op", "hlo", "kernels"}: a program of one instruction, and the kernels that it launched.

XLA's plugin compiles such a program without the passes that would fuse it anew, several times in a row with
inputs of its own each time. There are no events of CUDA here: time is the host's, over a queue that never
runs dry. In a rest the card works at a spacer, one thread that counts, which draws what the idle card does at
the clock of the calls; how long that takes is measured alone.
"""

import base64
import collections
import contextlib
import glob
import itertools
import json
import math
import os
import random
import re
import sys
import threading
import time
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import hlo_wire
import pjrt
from card_requests import answer_all, said
from xla_inputs import CannotBeMade, Pool, Values

TURN_S = 0.002  # long beside what a turn costs the host, short beside a sensor's window
COLD_BYTES = 200 << 20  # more than any second-level cache holds
MOST_BYTES = 4 << 30  # of what a program reads and writes
MOST_TIMES = 64  # that a program has its instruction
MOST_AHEAD = 24  # programs that wait for the card; the plugin takes 32
TOGETHER = 32  # calls looked at together
COMPILERS = 8
SPACERS = 64  # that tell how long one takes
SEEN_S = 0.05  # long enough to tell how long a turn takes
SURE = 0.1  # of a turn's time, what the spacers beside it may be off


# Which kernels an instruction launches.

GRID = re.compile(r"\bgrid:(\d+),(\d+),(\d+)")
NUMBERS = re.compile(r"(?:_\d+)+$")
COPIED = re.compile(r"Mem(?:set|cpy\w*)")
IN_PLACE = "it writes in place, and alone it copies first"


def profiler():
    import jax._src.profiler as module
    from jax._src.lib import xla_client

    return getattr(module, "_profiler", None) or xla_client.profiler


def launched(work):
    """The kernels that each of these programs launches, by its name, in order: name, grid and duration."""
    import jax.profiler

    module = profiler()
    options = module.ProfileOptions()
    options.python_tracer_level = 0
    session = module.ProfilerSession(options)
    try:
        for each in work:
            with each.filled():
                each.once()
    finally:
        seen = jax.profiler.ProfileData.from_serialized_xspace(session.stop())
    found = {each.name: [] for each in work}
    for plane in seen.planes:
        if plane.name != "/device:GPU:0":
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue  # made from the streams: the same kernels again
            for event in line.events:
                stats = dict(event.stats)
                grid = GRID.search(str(stats.get("kernel_details", "")))
                sizes = [int(size) for size in grid.groups()] if grid else None
                whose = found.get(stats.get("hlo_module"))
                if whose is not None:
                    whose.append((event.start_ns, event.name, sizes, event.duration_ns * 1e-9))
    return {
        name: [each[1:] for each in sorted(kernels, key=lambda each: each[0])]
        for name, kernels in found.items()
    }


def plain(name):
    """XLA's own kernels have numbers, which tell nothing."""
    copied = COPIED.match(name)
    return copied.group() if copied else NUMBERS.sub("", name)


def differs(kernels, recorded):
    """Why these are not the same kernels; empty where they are."""

    def known(listed):
        return collections.Counter((plain(name), tuple(grid or ())) for name, grid, *_ in listed)

    more, less = known(kernels) - known(recorded), known(recorded) - known(kernels)
    if more and not less and all(COPIED.match(name) for name, _ in more):
        return IN_PLACE
    return "it launches other kernels here" if more or less else ""


class Replayed:
    """An instruction some times in a row, with what it reads. `pairs` of results and parameters share their
    memory: such a result is read the next time."""

    def __init__(self, card, module, name, times=1, copies=1, pairs=()):
        single, result = hlo_wire.program_shape(module)
        leaves = len(result.parts or [result])
        self.pairs = [
            (at + turn * leaves, of + turn * len(single)) for turn in range(times) for at, of in pairs
        ]
        module = hlo_wire.named(hlo_wire.repeated(module, times), name)
        if pairs:
            module = hlo_wire.sharing(module, self.pairs)
        self.plugin, self.pool, self.times, self.name = card.plugin, card.pool, times, name
        self.program = self.plugin.compile(module, hlo_wire.compile_options(module))
        self.shapes, _ = hlo_wire.program_shape(module)
        self.below = hlo_wire.most_index(module)
        self.copies = times if pairs else min(copies, times)
        self.buffers = []
        self.run = self.arguments = None

    def fill(self):
        """Inputs for so many copies; then they come again."""
        try:
            for shape in self.shapes[: len(self.shapes) // self.times * self.copies]:
                self.buffers.append(self.pool.take(shape, self.below))
        except Exception:
            self.empty()
            raise
        own = self.buffers
        given = [own[at % len(own)] for at in range(len(self.shapes))]
        self.run, self.arguments = self.program.prepare(given, [of for _, of in self.pairs])

    def empty(self):
        for shape, each in zip(self.shapes, self.buffers):
            if self.pairs:
                self.plugin.free(each)  # who knows what is in it by now
            else:
                self.pool.give(shape, self.below, each)
        self.buffers = []
        self.run = None

    @contextlib.contextmanager
    def filled(self):
        """For as long as it takes."""
        if self.run is not None:
            yield
            return
        self.fill()
        try:
            yield
        finally:
            self.empty()

    def start(self):
        """Hand it to the card once; what comes back tells when it is done. The results are let go at once:
        the card writes them before anybody else gets their memory."""
        results, event = self.run()
        kept = set()
        for at, of in self.pairs:
            self.plugin.free(self.buffers[of])
            self.buffers[of] = self.arguments[of] = results[at]
            kept.add(at)
        for at in range(self.program.outputs):
            if at not in kept:
                self.plugin.free(results[at])
        return event

    def once(self):
        self.plugin.wait(self.start())

    def in_a_row(self, rounds):
        """How long one of so many takes."""
        self.once()
        began_s = time.perf_counter()
        queue = InFlight()
        for _ in range(rounds):
            queue.start(self)
        queue.empty()
        return (time.perf_counter() - began_s) / rounds

    def close(self):
        self.empty()
        self.program.close()


class InFlight:
    """Programs that the card has been given, in their order."""

    def __init__(self):
        self.waiting = collections.deque()

    def start(self, program):
        self.waiting.append((program.plugin, program.start()))
        if len(self.waiting) > MOST_AHEAD:
            self._next()

    def empty(self):
        while self.waiting:
            self._next()

    def _next(self):
        plugin, event = self.waiting.popleft()
        plugin.wait(event)


class XlaCard:
    def __init__(self, plugin):
        self.plugin = plugin
        self.values = Values()
        self.pool = Pool(plugin, self.values)
        self.workers = ThreadPoolExecutor(2)
        self.ahead = {}  # id of a call → its program, compiled while others are measured
        self.modules = {}  # id of a call → its program
        self.kernel_s = {}  # of one call
        self.pairs = {}  # of calls that write in place
        self.ready = None
        self.load = None
        self.spacer = Replayed(self, spacer_module(), "spacer")
        self.spacer.fill()
        self.spacer_s = self.spacer.in_a_row(SPACERS)  # the clock may be low yet: `stop` knows better

    def check(self, calls, lists=()):
        """For each call: whether it launches the kernels of the program, or why not."""
        answers = {}
        for at in range(0, len(calls), TOGETHER):
            some = calls[at : at + TOGETHER]
            answers.update(self._check(some))
            copied = [call for call in some if answers[call["id"]].get("why") == IN_PLACE]
            for call in copied:
                self.pairs[call["id"]] = hlo_wire.in_place(unpacked(call))
            answers.update(self._check([call for call in copied if self.pairs[call["id"]]]))
        for call in calls:
            if call["id"] in self.modules:
                self.ahead[call["id"]] = self.workers.submit(self._first, call["id"])
        return {"checked": [dict(answers[call["id"]], id=call["id"]) for call in calls]}

    def _check(self, calls):
        answers, compiled = {}, {}
        with ThreadPoolExecutor(COMPILERS) as workers:
            for call, (found, why) in zip(calls, workers.map(self._compiled, calls)):
                try:
                    if found is None:
                        raise CannotBeMade(why)
                    self._try(found)
                    compiled[call["id"]] = found
                except Exception as error:
                    answers[call["id"]] = {"why": said(error)}
        kernels = launched(list(compiled.values())) if compiled else {}
        for call in calls:
            id_ = call["id"]
            if id_ not in compiled:
                continue
            compiled[id_].close()
            seen = kernels[compiled[id_].name]
            why = differs(seen, call["kernels"])
            if not why:
                self.modules[id_] = unpacked(call)
                self.kernel_s[id_] = sum(each[2] for each in seen)
                answers[id_] = {"kernel_s": self.kernel_s[id_]}
            else:
                others = [list(each[:2]) for each in seen]
                answers[id_] = {"why": why, "kernels": others}
        return answers

    def _try(self, program):
        for last in (False, True):
            try:
                with program.filled():
                    program.once()
                return
            except Exception:
                if last:
                    program.close()
                    raise
                self.pool.empty()  # most likely there is no memory left

    def _compiled(self, call):
        name, pairs = "alone_%d" % call["id"], self.pairs.get(call["id"], ())
        try:
            return Replayed(self, unpacked(call), name, pairs=pairs), ""
        except Exception as error:
            return None, said(error)

    def prepare(self, id_, cold):
        if self.ready is not None:
            self.ready.close()
            self.ready = None
        ready = self.ready = self._filled(id_, cold)
        about_s = ready.in_a_row(2)
        self.rounds = max(1, round(TURN_S / about_s))
        self.turn_s = ready.in_a_row(math.ceil(SEEN_S / about_s) + 1) * self.rounds
        self.calls = ready.times * self.rounds
        # As a trace has it: between short kernels the card waits, and one may begin before the last ends.
        busy_s = sum(each[2] for each in launched([ready])[ready.name]) / ready.times * self.calls
        self.busy = busy_s / self.turn_s if busy_s else 1.0
        about = {"calls": self.calls, "copies": ready.copies, "bytes": self._bytes(id_), "busy": self.busy}
        return dict(about, prepared=id_, call_s=self.turn_s * self.busy / self.calls)

    def _bytes(self, id_):
        """What a call reads and writes."""
        shapes, result = hlo_wire.program_shape(self.modules[id_])
        whole = [*shapes, *(result.parts or [result])]
        return max(1, sum(self.values.count_and_bytes(each)[1] for each in whole))

    def _plan(self, id_, cold):
        """How often the program has its instruction, and of how many inputs."""
        bytes_ = self._bytes(id_)
        copies = min(MOST_TIMES, 1 + COLD_BYTES // bytes_) if cold else 1
        enough = max(copies, math.ceil(TURN_S / max(self.kernel_s[id_], 1e-6)))
        if self.pairs.get(id_):
            enough = copies  # each has memory of its own
        return max(1, min(MOST_TIMES, MOST_BYTES // bytes_, enough) // copies * copies), copies

    def _built(self, id_, times, copies):
        return Replayed(self, self.modules[id_], "replay", times, copies, self.pairs.get(id_, ()))

    def _first(self, id_):
        return self._built(id_, *self._plan(id_, True))

    def _filled(self, id_, cold):
        """As many as memory and compiler stand."""
        times, copies = self._plan(id_, cold)
        ahead = self.ahead.pop(id_, None) if cold else None
        while True:
            found = None
            try:
                found = ahead.result() if ahead else self._built(id_, times, copies)
                found.fill()
                found.once()
                return found
            except Exception:
                if found is not None:
                    found.close()
                self.pool.empty()
                if times == 1:
                    raise
                times, ahead = times // 2, None

    def begin(self, rest):
        self.load = Turns([self.ready] * self.rounds, self.calls, self.busy, self.spacer, self.turn_s)
        self.load.rests(rest * self.turn_s / self.spacer_s, self.spacer_s)
        self.load.start()
        return {"running": True}

    def pause(self):
        self.load = Turns([self.spacer], 0, 0.0, self.spacer)
        self.load.start()
        return {"running": True}

    def stop(self):
        load, self.load = self.load, None
        ended = load.end()
        if load.turn == [self.spacer]:
            self.spacer_s = load.whole_s / max(load.turns, 1)
        return ended

    def lost(self):
        """Whether an error has ended all work on the card."""
        try:
            self.spacer.once()
        except Exception:
            return True
        return False


class Turns(threading.Thread):
    """Keeps the card at a turn, again and again until it is ended, some programs ahead of it. Rests between
    turns are of spacers."""

    def __init__(self, turn, calls, busy, spacer, turn_s=0.0):
        super().__init__(daemon=True)
        self.turn, self.calls, self.busy, self.spacer, self.turn_s = turn, calls, busy, spacer, turn_s
        self.going = True
        self.turns = 0
        self.whole_s = self.spacers = self.spacer_s = 0.0
        self.spaced_s = 0.0
        self.error = None

    def rests(self, spacers, spacer_s):
        """After each turn, so many in the mean."""
        self.spacers, self.spacer_s = spacers, spacer_s

    def run(self):
        try:
            self._run()
        except Exception as error:
            self.error = said(error)

    def _run(self):
        queue = InFlight()
        began_s = time.perf_counter()
        while self.going:
            for each in self.turn:
                queue.start(each)
            # Never in step with the sensor: it takes a sample every 20 ms, and would see turns alone.
            for _ in range(round(self.spacers * random.uniform(0.2, 1.8))):
                queue.start(self.spacer)
                self.spaced_s += self.spacer_s
            self.turns += 1
        queue.empty()
        self.whole_s = time.perf_counter() - began_s

    def end(self):
        self.going = False
        self.join()
        if self.error:
            raise RuntimeError(self.error)
        on_s = max(self.whole_s - self.spaced_s, 0.0)
        usual_s = self.turns * self.turn_s
        if self.spaced_s and abs(on_s - usual_s) < SURE * usual_s:
            on_s = usual_s  # a small error of the spacers is a large one of what is left
        on_s *= self.busy
        about = {"turns": self.turns, "calls": self.turns * self.calls}
        # Kernels that overlap run longer, together, than the time that passed: then the rest is below zero.
        return dict(about, on_s=on_s, rest_s=self.whole_s - on_s)


# One thread that counts, half a millisecond or so: a reduction inside a loop fusion of one element is a loop.
SPACER = """HloModule spacer, entry_computation_layout={(u32[])->u32[]}

mixed {
  sum = u32[] parameter(0)
  each = u32[] parameter(1)
  factor = u32[] constant(1664525)
  product = u32[] multiply(sum, factor)
  ROOT next = u32[] xor(product, each)
}

counted {
  begin = u32[] parameter(0)
  all = u32[65536]{0} iota(), iota_dimension=0
  whole = u32[] reduce(all, begin), dimensions={0}, to_apply=mixed
  ROOT last = u32[] add(whole, begin)
}

ENTRY main {
  begin = u32[] parameter(0)
  ROOT spacer_fusion = u32[] fusion(begin), kind=kLoop, calls=counted
}
"""


def spacer_module():
    from jax._src.lib import xla_client

    named = getattr(xla_client, "hlo", None) or xla_client._xla
    read = getattr(named, "hlo_module_from_text", None) or xla_client._xla.hlo_module_from_text
    return read(SPACER).as_serialized_hlo_module_proto()


def unpacked(call):
    if "hlo" not in call:
        raise CannotBeMade(call.get("why") or "its program was not kept")
    return zlib.decompress(base64.b64decode(call["hlo"]))


def plugin_path():
    """XLA's plugin for CUDA, wherever JAX finds its plugins."""
    folders = []
    with contextlib.suppress(ImportError):
        import jax_plugins

        folders += list(jax_plugins.__path__)
    folders += [os.path.join(folder, "jax_plugins") for folder in sys.path]
    found = itertools.chain.from_iterable(
        glob.glob(os.path.join(folder, "*", "xla_cuda_plugin.so")) for folder in folders
    )
    return next(found, None)


def open_plugin():
    import jax
    import jaxlib
    from jax._src import xla_bridge

    # It loads NVIDIA's libraries, and registers what JAX's own custom calls do and the plugin's profiler.
    xla_bridge.discover_pjrt_plugins()
    path = plugin_path()
    if path is None:
        raise CannotBeMade("JAX has no plugin for CUDA here: pip install jax[cuda12]")
    plugin = pjrt.Plugin(path)
    plugin.initialize()
    plugin.open()
    return plugin, {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "platform": plugin.platform()}


def main():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what XLA prints is no answer
    json.loads(sys.stdin.readline())
    warnings.simplefilter("ignore")  # JAX's own, which would be taken for ours
    try:
        plugin, facts = open_plugin()
        card = XlaCard(plugin)
    except Exception as error:
        answers.write(json.dumps({"why": said(error)}) + "\n")
        return
    answers.write(json.dumps({"ready": facts}) + "\n")
    answer_all(card, card.lost, answers)
    os._exit(0)  # whatever is still compiled


if __name__ == "__main__":
    main()
