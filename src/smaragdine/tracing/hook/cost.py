"""How much longer the program takes because it is traced."""

_KEPT = 51
_GUESSED_PAUSE_S = 0.5  # to start and stop a profiler that has not run yet


class WindowCost:
    def __init__(self):
        self.first_ns = None
        self.last_ns = None
        self.lengths_s = []  # of untraced steps, the latest ones
        self.longest_s = 0.0
        self.spent_s = 0.0
        self.slower_s = None  # a traced step, than an untraced one
        self.start_s = None  # how long the profiler took to start, the last time
        self.stop_s = None

    def untraced(self, t_ns):
        """A step ended."""
        if self.first_ns is None:
            self.first_ns = t_ns
        elif self.last_ns is not None:
            length_s = (t_ns - self.last_ns) * 1e-9
            self._saw(length_s)
            self.lengths_s.append(length_s)
            del self.lengths_s[:-_KEPT]
        self.last_ns = t_ns

    def traced(self, length_s):
        self._saw(length_s)
        self.slower_s = max(0.0, length_s - self.typical_s())
        self.spent_s += self.slower_s

    def started(self, length_s):
        self.start_s = length_s
        self._paused(length_s)

    def stopped(self, length_s):
        self.stop_s = length_s
        self._paused(length_s)

    def sliced(self, length_s):
        """Nobody knows how much of it the program would have needed: it counts whole."""
        self.spent_s += length_s

    def of_other_steps(self):
        """From now on steps are others, as long as they may be."""
        self.last_ns, self.lengths_s, self.slower_s = None, [], None

    def typical_s(self):
        return sorted(self.lengths_s)[len(self.lengths_s) // 2] if self.lengths_s else 0.0

    def elapsed_s(self, now_ns):
        return 0.0 if self.first_ns is None else (now_ns - self.first_ns) * 1e-9

    def forecast_s(self, steps, opening):
        """What will have been spent after so many more steps and the window's end."""
        slower_s = self.typical_s() if self.slower_s is None else self.slower_s
        pause_s = _GUESSED_PAUSE_S if self.stop_s is None else self.stop_s
        if opening and self.stop_s is not None:
            pause_s += self.start_s
        return self.spent_s + steps * slower_s + pause_s

    def _paused(self, length_s):
        self.spent_s += length_s
        self.last_ns = None  # the step it happened in says nothing

    def _saw(self, length_s):
        self.longest_s = max(self.longest_s, length_s)
