"""Smaragdine: the energy profiler for deep learning. Units: seconds, joules, watts, Unix nanoseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smaragdine.display import show_with
from smaragdine.version import __version__

if TYPE_CHECKING:
    from smaragdine.accounting.footprint import Footprint as Footprint
    from smaragdine.accounting.run import Run as Run
    from smaragdine.api import Region as region
    from smaragdine.api import Trace as trace
    from smaragdine.api import account as account
    from smaragdine.api import mark as mark
    from smaragdine.api import record as record
    from smaragdine.api import summarise as summarise
    from smaragdine.callbacks.keras import KerasCallback as KerasCallback
    from smaragdine.callbacks.keras import KerasTuneCallback as KerasTuneCallback
    from smaragdine.callbacks.lightning import LightningCallback as LightningCallback
    from smaragdine.callbacks.tensorflow import SessionRunHook as SessionRunHook
    from smaragdine.callbacks.training import Tune as tune
    from smaragdine.callbacks.transformers import TrainerCallback as TrainerCallback
    from smaragdine.callbacks.transformers import TrainerTuneCallback as TrainerTuneCallback
    from smaragdine.recording.reader import Recording as Recording
    from smaragdine.recording.reader import open_recording as open

__all__ = [
    "Footprint",
    "KerasCallback",
    "KerasTuneCallback",
    "LightningCallback",
    "Recording",
    "Run",
    "SessionRunHook",
    "TrainerCallback",
    "TrainerTuneCallback",
    "__version__",
    "account",
    "mark",
    "open",
    "record",
    "region",
    "summarise",
    "trace",
    "tune",
]

# Imported when first used: a training script that only places marks must not pay for pyarrow.
_WHERE = {
    "account": ("smaragdine.api", "account"),
    "mark": ("smaragdine.api", "mark"),
    "record": ("smaragdine.api", "record"),
    "region": ("smaragdine.api", "Region"),
    "summarise": ("smaragdine.api", "summarise"),
    "trace": ("smaragdine.api", "Trace"),
    "tune": ("smaragdine.callbacks.training", "Tune"),
    "KerasCallback": ("smaragdine.callbacks.keras", "KerasCallback"),
    "LightningCallback": ("smaragdine.callbacks.lightning", "LightningCallback"),
    "SessionRunHook": ("smaragdine.callbacks.tensorflow", "SessionRunHook"),
    "TrainerCallback": ("smaragdine.callbacks.transformers", "TrainerCallback"),
    "KerasTuneCallback": ("smaragdine.callbacks.keras", "KerasTuneCallback"),
    "TrainerTuneCallback": ("smaragdine.callbacks.transformers", "TrainerTuneCallback"),
    "open": ("smaragdine.recording.reader", "open_recording"),
    "Footprint": ("smaragdine.accounting.footprint", "Footprint"),
    "Recording": ("smaragdine.recording.reader", "Recording"),
    "Run": ("smaragdine.accounting.run", "Run"),
    "load_ipython_extension": ("smaragdine.notebook", "load_ipython_extension"),
}


def __getattr__(name: str) -> Any:
    if name != "hetero" and name not in _WHERE:
        raise AttributeError(f"module 'smaragdine' has no attribute {name!r}")
    import importlib

    if name == "hetero":
        return importlib.import_module("smaragdine.hetero")
    module, attribute = _WHERE[name]
    return getattr(importlib.import_module(module), attribute)


def _html(shown: Any) -> str:
    from smaragdine.report.notebook import html

    return html(shown)


show_with(_html)
