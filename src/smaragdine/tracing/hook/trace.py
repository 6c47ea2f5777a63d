"""When a process traces itself: some steps, once, and then never again.

The framework's own profiler runs over the steps asked for and writes its raw file beside the recording; names
and phases are found from it after the program has ended, in another process.
"""

import json
import os
import sys
import time

from . import marks

FOLDER = "SMARAGDINE_TRACE_FOLDER"
STEPS = "SMARAGDINE_TRACE_STEPS"
SKIP = "SMARAGDINE_TRACE_SKIP"

_plan = None  # the _Plan of this process


def install():
    """Follow the steps of this process."""
    if _number(STEPS) > 0:
        marks.on_step_end = step_ended


def step_ended(source, index, t_ns):
    global _plan
    plan = _plan
    if plan is None or plan.pid != os.getpid():
        # A forked child traces nothing: its parent's profiler is not its own.
        plan = _plan = _Plan(source, inherited=plan is not None)
    if not plan.done and source == plan.source:
        try:
            plan.step_ended(index, t_ns)
        except Exception as exception:
            plan.give_up(exception)


def finish():
    """The program ends: what has been traced is kept."""
    plan = _plan
    if plan is not None and plan.session is not None and plan.pid == os.getpid():
        try:
            plan.stop()
        except Exception as exception:
            plan.give_up(exception)


def _number(name):
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else 0


class _Plan:
    def __init__(self, source, inherited):
        self.pid = os.getpid()
        self.source = source  # the first to announce a step; a second optimizer's steps are inside its own
        self.done = inherited
        self.seen = 0
        self.session = None
        self.tracer = None
        self.steps = []  # (index, begin, end)
        self.begin_ns = None

    def step_ended(self, index, t_ns):
        self.seen += 1
        if self.session is not None:
            if len(self.steps) < _number(STEPS):
                self.steps.append((index, self.steps[-1][2] if self.steps else self.begin_ns, t_ns))
            else:
                # One step more than asked for: the mark comes inside the optimizer's step, whose own
                # record would be lost if the profiler stopped there.
                self.stop()
        elif self.seen >= max(1, _number(SKIP)):
            self.tracer = _tracer(self.source)
            self.session = self.tracer.start()
            self.begin_ns = time.time_ns()

    def stop(self):
        session, self.session, self.done = self.session, None, True
        end_ns = time.time_ns()
        base = os.path.join(os.environ[FOLDER], "%s-%d" % (self.tracer.framework, self.pid))
        try:
            os.makedirs(os.environ[FOLDER], exist_ok=True)
        finally:
            # Also where nothing can be written: the profiler must not go on.
            self.tracer.stop(session, base + self.tracer.suffix)
        facts = {
            "framework": self.tracer.framework,
            "format": self.tracer.format,
            "rank": marks.rank_of(os.environ),
            "pid": self.pid,
            "begin_ns": self.begin_ns,
            "end_ns": end_ns,
            "steps": self.steps,
        }
        with open(base + ".meta.json", "w") as file:
            json.dump(facts, file)

    def give_up(self, exception):
        self.session, self.done = None, True
        marks.error("trace", exception)


class _Tracer:
    def __init__(self, framework, format, suffix, start, stop):
        self.framework, self.format, self.suffix = framework, format, suffix
        self.start, self.stop = start, stop


def _tracer(source):
    framework = _framework(source)
    if framework == "torch":
        from . import trace_torch

        return _Tracer("torch", "kineto", ".json", trace_torch.start, trace_torch.stop)
    if framework in ("jax", "tensorflow"):
        from . import trace_xplane

        return _Tracer(
            framework, "xplane", ".xplane.pb", lambda: trace_xplane.start(framework), trace_xplane.stop
        )
    raise NotImplementedError("steps of %s cannot be traced yet" % source)


def _framework(source):
    if source == "keras":
        return sys.modules["keras"].backend.backend()
    if source == "tf_keras":
        return "tensorflow"
    return "torch" if source.partition(":")[0] in ("torch", "transformers", "lightning") else None
