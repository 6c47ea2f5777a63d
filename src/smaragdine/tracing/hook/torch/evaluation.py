"""Evaluation in a plain loop: the time from a module's `eval()` to its `train()`.

That it was one is known only afterwards. A step in between makes it none: the model is trained in that mode,
or parts of it are. And what is done so in every step (an attack, its own labels, samples for a GAN) is part
of the step: only where all optimizers have stepped more than once since the last time it is something apart.
"""

import time
import weakref

from .. import marks


class Evaluation:
    def __init__(self):
        self.switched = {}  # since the last step: id of a module -> (weak reference, when it went to eval)
        self.end_ns = 0
        self._counted = {}  # source -> its steps, when the last one was over
        self._apart = False  # the last one was no part of a step

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
        if stepped:  # or it goes on: a second data set, say
            self._apart = min(stepped) > 1
            self._counted = dict(counts)
        if self._apart:
            self.end_ns = time.time_ns()
            marks.mark("evaluate_begin", source="torch", t_ns=begin_ns)
            marks.mark("evaluate_end", source="torch", t_ns=self.end_ns)
