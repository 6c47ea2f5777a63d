"""Exports a recording as Prometheus text, for the node exporter's textfile collector or a push gateway."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from smaragdine.accounting.footprint import Footprint
from smaragdine.errors import visible
from smaragdine.report.export.selection import Selection
from smaragdine.version import __version__

Labels = Mapping[str, str]


def prometheus_text(chosen: Selection, depth: int = 2) -> str:
    """Energy, power and time per device, and the energy of its layers, which are `depth` segments of a path.

    A device's layers and its `(idle)` add up to its energy in `chosen.footprint`.
    """
    summary, name = chosen.run.summary, {"run": chosen.run.name}
    devices = [device for device in summary.devices.values() if chosen.wants(device.device)]

    def each(figure: str) -> Iterable[tuple[Labels, float]]:
        for device in devices:
            value = getattr(device, figure)
            if value is not None:
                labels = {"device": device.device, "provenance": device.provenance, "scope": device.scope}
                yield {**name, **labels}, value

    about = {"status": summary.status, "version": __version__}
    lines = [
        *_family(
            "run_info", "gauge", "A recording: how it ended, and who measured it.", [({**name, **about}, 1)]
        ),
        *_family(
            "run_duration_seconds",
            "gauge",
            "From the program's first to its last instant.",
            [(name, summary.duration_s)],
        ),
        *_family(
            "run_program_energy_joules",
            "gauge",
            "What the program used: its part of sockets and memory, and GPUs.",
            [] if summary.program_j is None or chosen.devices else [(name, summary.program_j)],
        ),
        *_family(
            "device_program_energy_joules",
            "gauge",
            "The program's part of a device's energy, where it is known.",
            each("program_j"),
        ),
        *_family(
            "device_energy_joules_total",
            "counter",
            "Energy of a device during the run, whoever used it. Only those of scope device add up.",
            each("energy_j"),
        ),
        *_family("device_mean_power_watts", "gauge", "Energy over the time that is known.", each("mean_w")),
        *_family("device_peak_power_watts", "gauge", "The highest mean over 100 ms.", each("peak_w")),
        *_family("device_missing_seconds", "gauge", "Time without readings.", each("missing_s")),
    ]
    if chosen.footprint is not None:
        of_step = any(total.per_step for total in chosen.footprint.devices.values())
        lines += _family(
            "step_energy_joules" if of_step else "traced_energy_joules",
            "gauge",
            f"Energy of a layer: {chosen.what}. With (idle), it adds up to the device's.",
            [({**name, **labels}, value) for labels, value in _layers(chosen.footprint, depth)],
        )
    return "\n".join(lines) + "\n"


def _layers(footprint: Footprint, depth: int) -> Iterable[tuple[Labels, float]]:
    columns = (footprint.rows[name].to_pylist() for name in ("device", "phase", "name", "energy_j"))
    sums: dict[tuple[str, str, str], float] = {}
    for device, phase, name, energy_j in zip(*columns, strict=True):
        key = (device, phase or "not known", "/".join(name.split("/")[: max(depth, 1)]))
        sums[key] = sums.get(key, 0.0) + energy_j
    for device, total in footprint.devices.items():
        sums[device, "", "(idle)"] = total.idle_j
    for (device, phase, layer), energy_j in sums.items():
        # To Prometheus an empty label is the same as none.
        yield {"device": device, **({"phase": phase} if phase else {}), "layer": layer}, energy_j


def _family(name: str, kind: str, text: str, values: Iterable[tuple[Labels, float]]) -> list[str]:
    """One metric, or nothing if it has no value."""
    metric = f"smaragdine_{name}"
    lines = [f"{metric}{{{_labels(labels)}}} {value!r}" for labels, value in values]
    return [f"# HELP {metric} {text}", f"# TYPE {metric} {kind}", *lines] if lines else []


def _labels(labels: Labels) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(text: str) -> str:
    """Escapes line breaks as the format wants, and makes everything else printable."""
    lines = (visible(line).replace("\\", "\\\\").replace('"', '\\"') for line in text.split("\n"))
    return "\\n".join(lines)
