"""Does what is done once per machine around a training: lends limits, records, and sums up what was used."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smaragdine.errors import UserError
from smaragdine.system import boot_id


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs."""

    machine: str
    name: str  # the machine's name, for people
    gpu_uuid: str | None


@dataclass(frozen=True)
class MachineUse:
    """What one machine's devices used, in J."""

    machine: str
    energy_j: dict[str, float]
    estimated: tuple[str, ...]
    missing: tuple[str, ...]  # GPUs of ranks that could not be recorded


class MeasuredBlock:
    """Measures a block. The lowest rank of each machine does the work. If it fails on one machine it fails on
    all, so that no rank waits for one that is gone."""

    def __init__(
        self,
        rank: int,
        world: int,
        group: Any,
        limits_w: Sequence[float] | None,
        record: bool,
        folder: str | os.PathLike[str] | None,
    ) -> None:
        self._rank = rank
        self._world = world
        self._group = group
        self._limits_w = limits_w
        # Inside `smaragdine run` everything is already recorded.
        self._record = record and not os.environ.get("SMARAGDINE_SPOOL")
        self._folder = folder
        self._open = contextlib.ExitStack()
        self._recording: Any = None
        self._machine = ""
        self._missing: list[str] = []
        self._begin_s = 0.0

    def begin(self) -> None:
        if self._record or self._limits_w is not None:
            places = self._gather(_place())
            self._machine = places[self._rank].name
            ranks = [r for r, place in enumerate(places) if place.machine == places[self._rank].machine]
            error = ""
            try:
                if self._rank == ranks[0]:
                    self._begin(ranks, places)
            except Exception as refused:  # whatever it is, other ranks wait for an answer
                error = str(refused) or repr(refused)
            errors = [each for each in self._gather(error) if each]
            if errors:
                self._open.close()
                raise UserError(errors[0])
        self._begin_s = time.perf_counter()

    def end(self, failed: bool) -> None:
        if failed:
            # Other ranks may be anywhere: ask them nothing.
            self._open.close()
            return
        self._gather(None)
        time_s = time.perf_counter() - self._begin_s
        used = self._end() if self._record or self._limits_w is not None else []
        if self._rank == 0 and sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):
                print(*_lines(time_s, used), sep="\n", file=sys.stderr)

    def _begin(self, ranks: Sequence[int], places: Sequence[RankPlace]) -> None:
        if self._limits_w is not None:
            wanted = [(places[rank].gpu_uuid, self._limits_w[rank]) for rank in ranks]
            set_limits(self._open, wanted)
        if self._record:
            from smaragdine.api import record

            gpus, self._missing = gpus_of([places[rank].gpu_uuid for rank in ranks])
            self._recording = self._open.enter_context(record(self._folder, gpus=gpus))

    def _end(self) -> list[MachineUse]:
        used, error = None, ""
        try:
            self._open.close()
            used = self._used()
        except Exception as failed:  # as at the beginning, other ranks wait for an answer
            error = str(failed) or repr(failed)
        ended: list[tuple[MachineUse | None, str]] = self._gather((used, error))
        errors = [each for _, each in ended if each]
        if errors:
            raise UserError(errors[0])
        return [each for each, _ in ended if each]

    def _used(self) -> MachineUse | None:
        if self._recording is None:
            return None
        from smaragdine.accounting.run import Run

        devices = Run.open(self._recording).summary.devices
        counted = {name: d for name, d in devices.items() if d.scope == "device" and d.energy_j is not None}
        return MachineUse(
            self._machine,
            {name: device.energy_j or 0.0 for name, device in counted.items()},
            tuple(name for name, device in counted.items() if device.provenance == "estimated"),
            tuple(self._missing),
        )

    def _gather(self, mine: Any) -> list[Any]:
        if self._world == 1:
            return [mine]
        import torch.distributed as distributed

        found: list[Any] = [None] * self._world
        distributed.all_gather_object(found, mine, group=self._group)
        return found


def _place() -> RankPlace:
    import torch

    uuid = None
    if torch.cuda.is_available():
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    name = socket.gethostname()
    return RankPlace(f"{boot_id()}/{name}", name, uuid)


def gpus_of(uuids: Sequence[str | None]) -> tuple[list[str], list[str]]:
    """The GPUs of a machine's ranks that NVML knows here, and those it does not: each rank may see only its
    own."""
    from smaragdine.jobs.lender import devices_here

    found = list(dict.fromkeys(uuid for uuid in uuids if uuid is not None))
    known = devices_here([], {}).values() if found else ()
    return [uuid for uuid in found if uuid in known], [uuid for uuid in found if uuid not in known]


def set_limits(opened: contextlib.ExitStack, wanted: Sequence[tuple[str | None, float]]) -> None:
    """Sets (UUID of a GPU, W) until `opened` closes; through the daemon's lease, if there is a daemon."""
    from smaragdine.jobs.lender import devices_here, lender, ranges_here, wanted_limits
    from smaragdine.jobs.setting import Setting

    by_uuid = {uuid: device for device, uuid in devices_here([], {}).items()}
    ranges, limits = ranges_here(), dict[Any, Any]()
    for uuid, limit_w in wanted:
        if uuid not in by_uuid:
            why = "this rank has none" if uuid is None else f"NVML does not know {uuid}"
            raise UserError("no GPU to set a power limit on", why, "Leave power_limits out, or see doctor")
        limits |= wanted_limits(Setting("power", limit_w), [by_uuid[uuid]], ranges)
    lent = opened.enter_context(lender(lambda line: print(f"smaragdine: {line}", file=sys.stderr)))
    lent.apply(limits)


def _lines(time_s: float, used: Sequence[MachineUse]) -> list[str]:
    lines = [f"Time (s): {time_s:.3f}"]
    if not used:
        return lines
    lines.append(f"Energy (J): {sum(sum(each.energy_j.values()) for each in used):.3f}")
    for each in used:
        devices = [
            f"{device} {energy_j:.3f}{' (estimated)' if device in each.estimated else ''}"
            for device, energy_j in each.energy_j.items()
        ]
        lines.append(f"  {each.machine}: {', '.join(devices)}")
        if each.missing:
            lines.append(f"  {each.machine}: not seen by the rank that records: {', '.join(each.missing)}")
    return lines
