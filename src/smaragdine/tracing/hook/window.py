"""One window of a plan: what it saw, and the files it leaves."""

import json
import os
import shutil
import tempfile

from . import marks


class Window:
    def __init__(self, tracer, session, base, asked_ns, begin_ns):
        self.tracer, self.session = tracer, session
        self.path, self.noted = base + tracer.SUFFIX, base + ".meta.json"
        self.asked_ns = asked_ns
        self.begin_ns = self.last_ns = begin_ns
        self.steps = []  # (index, begin, end)
        self.complete = False

    def add(self, index, t_ns):
        """A step; its length."""
        begin_ns, self.last_ns = self.last_ns, t_ns
        self.steps.append((index, begin_ns, t_ns))
        return (t_ns - begin_ns) * 1e-9

    def note(self, source, end_ns, resumed_ns, stopped_ns, facts):
        """What its file is of."""
        meta = {
            "framework": self.tracer.FRAMEWORK,
            "format": self.tracer.FORMAT,
            "suffix": self.tracer.SUFFIX,
            "rank": marks.rank(),
            "pid": os.getpid(),
            "begin_ns": self.begin_ns,
            "end_ns": end_ns,
            "asked_ns": self.asked_ns,
            "resumed_ns": resumed_ns,
            "stopped_ns": stopped_ns,
            "source": source,
            "steps": self.steps,
        }
        meta.update(facts)
        with open(self.noted, "w") as file:
            json.dump(meta, file)

    def remove(self):
        """What it may have written: a disk that is full has better use for it."""
        _remove(self.path, self.path + ".tmp", self.noted)

    def discard(self):
        """End it, and keep nothing."""
        # Kineto says on stderr what it cannot write: it gets a folder that is there.
        path = self.path
        try:
            folder = tempfile.mkdtemp()  # ours alone: nobody has put a link there
            path = os.path.join(folder, os.path.basename(path))
        except OSError:
            folder = ""
        try:
            self.tracer.stop(self.session, path)
        except Exception:
            pass
        _remove(path)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _remove(*paths):
    for path in paths:
        try:
            os.remove(path)
        except OSError:
            pass
