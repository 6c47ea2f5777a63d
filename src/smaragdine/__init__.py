"""Smaragdine: the energy profiler for deep learning. Units: seconds, joules, watts, Unix nanoseconds."""

from __future__ import annotations

__version__ = "0.1.0"
