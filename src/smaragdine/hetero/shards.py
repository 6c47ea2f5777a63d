"""Unequal shards for PyTorch's DistributedDataParallel, which averages gradients as if shards were equal.

We multiply each rank's loss so that this average is the mean over the whole global batch. Nothing else
changes: mixed precision, gradient accumulation, `no_sync`, clipping and communication hooks work as before.
Around the training, one rank of each machine sets limits and records.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from smaragdine.errors import UserError
from smaragdine.files import read_json
from smaragdine.system import boot_id

if TYPE_CHECKING:
    from types import TracebackType


# What `split` was given: samples per rank, and the limits that go with them.

_MOST = 10**9


@dataclass(frozen=True)
class SavedAllocation:
    """Batches and limits, by rank."""

    batches: tuple[int, ...]
    power_limits_w: tuple[float, ...] | None = None
    gpus: tuple[str, ...] = ()  # their names in the file


def read_allocation(path: str | os.PathLike[str], method: str | None = None) -> SavedAllocation:
    """Reads an answer of `smaragdine allocate --json`: by default the cheapest that is fast enough."""
    file = Path(path)
    try:
        values = read_json(file)
    except OSError as error:
        raise UserError(f"{file} cannot be read", error.strerror or str(error)) from None
    except ValueError as error:
        raise _bad(file, f"not JSON: {error}") from None
    try:
        answers: dict[str, Any] = {str(each["method"]): each for each in values["methods"]}
        chosen = method or min(answers, key=lambda name: _preference(answers[name]))
        if chosen not in answers:
            raise UserError(f"{file} has no method {chosen}", remedy=f"There are: {', '.join(answers)}")
        rows: Sequence[Mapping[str, Any]] = answers[chosen]["allocation"]
        found = SavedAllocation(
            checked_batches([row["batch"] for row in rows], str(file)),
            tuple(float(row["power_limit_w"]) for row in rows),
            tuple(str(row["gpu"]) for row in rows),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _bad(file, f"{type(error).__name__} {error}") from None
    return found


def _preference(answer: Mapping[str, Any]) -> tuple[bool, float, bool]:
    """Answers that keep to the slowdown come first, however much cheaper a slower one is. If an answer was
    preferred to a cheaper one that it cannot be told from, that cost counts."""
    least = float(answer.get("tie", answer)["cost"])
    return bool(answer.get("too_slow")), float(f"{least:.9g}"), answer["method"] != "optimal"


def checked_batches(batches: Sequence[Any], where: str = "the split") -> tuple[int, ...]:
    if not batches:
        raise UserError(f"{where} has no rank", remedy="Give the samples of each rank: split([3, 5])")
    for rank, batch in enumerate(batches):
        if not isinstance(batch, int) or isinstance(batch, bool) or not 0 <= batch <= _MOST:
            raise UserError(f"{where} has a bad batch for rank {rank}", f"{batch!r} is no number of samples")
        if not batch:
            raise UserError(f"{where} gives rank {rank} no samples", remedy="Start the job without that rank")
    return tuple(batches)


def checked_limits(limits_w: Sequence[Any], ranks: int) -> tuple[float, ...]:
    if len(limits_w) != ranks:
        raise UserError(f"{len(limits_w)} power limits for {ranks} ranks", remedy="Give one for each")
    for limit in cast("Sequence[object]", limits_w):
        if not isinstance(limit, int | float) or isinstance(limit, bool) or not 0 < limit < 1e5:
            raise UserError(f"a power limit of {limit!r}", "not a power above 0 W")
    return tuple(float(limit) for limit in limits_w)


def _bad(file: Path, why: str) -> UserError:
    return UserError(f"{file} is no allocation", why, "Make one: smaragdine allocate … --json > FILE")


# Which samples a rank gets of every global batch. All ranks compute the same, so none must ask.


@dataclass(frozen=True)
class RankPart:
    """A rank's part of one global batch."""

    samples: int  # this rank's
    global_samples: int


def shares(total: int, batches: Sequence[int]) -> list[int]:
    """Splits `total` samples in proportion to `batches`, by largest remainder; in a tie the lower rank
    wins."""
    whole = sum(batches)
    found = [total * batch // whole for batch in batches]
    by_remainder = sorted(range(len(batches)), key=lambda rank: (-(total * batches[rank] % whole), rank))
    for rank in by_remainder[: total - sum(found)]:
        found[rank] += 1
    return found


def permutation(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of an epoch. numpy promises the same numbers from this generator in all its versions, so
    machines may have different ones."""
    return np.random.RandomState([seed, epoch]).permutation(count)


class ShardSampler:
    """The batches of one rank, as a DataLoader's `batch_sampler`."""

    def __init__(
        self, count: int, batches: Sequence[int], rank: int, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        self._count = count
        self._batches = tuple(batches)
        self._rank = rank
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self.epoch = 0

    def __len__(self) -> int:
        whole = sum(self._batches)
        return self._count // whole if self._drop_last else -(-self._count // whole)

    def parts(self) -> Iterator[RankPart]:
        """The sizes of what `__iter__` gives."""
        for begin in self._begins():
            total = min(sum(self._batches), self._count - begin)
            yield RankPart(shares(total, self._batches)[self._rank], total)

    def __iter__(self) -> Iterator[list[int]]:
        order = permutation(self._count, self._seed, self.epoch) if self._shuffle else np.arange(self._count)
        for begin in self._begins():
            indices = order[begin : begin + sum(self._batches)]
            counts = shares(len(indices), self._batches)
            first = sum(counts[: self._rank])
            mine = indices[first : first + counts[self._rank]]
            # A rank without samples still takes part in the all-reduce: a sample stands in, with no weight.
            yield (mine if mine.size else indices[:1]).tolist()

    def _begins(self) -> range:
        whole = sum(self._batches)
        return range(0, len(self) * whole, whole)


_OURS = ("batch_size", "sampler", "batch_sampler")


def split(
    batches: Sequence[int] | str | os.PathLike[str],
    *,
    group: Any = None,
    method: str | None = None,
    power_limits: Sequence[float] | bool = False,
    record: bool = True,
    folder: str | os.PathLike[str] | None = None,
) -> Shards:
    """Splits every global batch over the ranks.

    `batches` has the samples of each rank, by rank; or it is the path of an allocation (`smaragdine allocate
    --json`), of which `method` names an answer (by default the cheapest that is fast enough). `power_limits`,
    in W by rank, or True for the allocation's, hold during the `with` block. `record` measures the block's
    energy, into `folder`.
    """
    if isinstance(batches, str | os.PathLike):
        allocation = read_allocation(batches, method)
    else:
        allocation = SavedAllocation(checked_batches(list(batches)))
    here, world = _place(group)
    if world != len(allocation.batches):
        why = f"there are {world} ranks"
        remedy = f"Start it with --nproc-per-node so that there are {len(allocation.batches)}"
        raise UserError(f"the split is for {len(allocation.batches)} ranks", why, remedy)
    limits_w = _limits(power_limits, allocation)
    return Shards(
        allocation.batches, here, group, MeasuredBlock(here, world, group, limits_w, record, folder)
    )


class Shards:
    """This rank's part of the split. As a context, it sets limits and records during the block."""

    def __init__(self, batches: Sequence[int], rank: int, group: Any, measured: MeasuredBlock) -> None:
        self.batches = tuple(batches)  # by rank
        self.rank = rank
        self._group = group
        self._measured = measured
        self._part: RankPart | None = None
        self._warned = False

    @property
    def world_size(self) -> int:
        return len(self.batches)

    @property
    def batch(self) -> int:
        """This rank's samples of a whole global batch."""
        return self.batches[self.rank]

    @property
    def part(self) -> RankPart | None:
        """This rank's part of the batch that the loader gave last; 0 samples if one stands in."""
        return self._part

    def loader(
        self,
        dataset: Any,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> ShardLoader:
        """This rank's batches, from a DataLoader with these `options`; a smaller last one in proportion."""
        mine = [name for name in _OURS if name in options]
        if mine:
            raise UserError(f"loader({mine[0]}=…)", "the split decides that", "Leave it out")
        try:
            count = len(dataset)
        except TypeError:
            why = "it has no length, so nobody knows what belongs to whom"
            raise UserError(f"{type(dataset).__name__} cannot be split", why) from None
        sampler = ShardSampler(count, self.batches, self.rank, shuffle, seed, drop_last)
        return ShardLoader(self, dataset, sampler, options)

    def weight(self, loss: Any, count: Any = None, *, summed: bool = False) -> Any:
        """Scales `loss` so that the mean of the ranks' gradients is that of the mean over the global batch.

        `loss` is a mean over `count` elements of this rank (a sum if `summed`). Without a count, the elements
        are the samples of the batch that the loader gave last. Every rank calls it for every batch.
        """
        part = self._part
        if count is None:
            if part is None:
                why = "no batch came from shards.loader yet"
                raise UserError("weight() does not know the samples", why, "Give their number: count=")
            factor = (1 if summed else part.samples) * self.world_size / part.global_samples
            return loss * (factor if part.samples else 0.0)
        import torch

        # All of it on the loss's device, so that nobody waits for a number to arrive here.
        kind = torch.float32 if loss.device.type == "mps" else torch.float64
        mine = torch.as_tensor(count, dtype=kind, device=loss.device).detach().reshape(())
        if part is not None and not part.samples:
            mine = torch.zeros_like(mine)
        total = mine.clone()
        if self.world_size > 1:
            torch.distributed.all_reduce(total, group=self._group)
        factor = (torch.ones_like(mine) if summed else mine) * self.world_size / (total + (total == 0))
        if part is not None and not part.samples:
            factor = torch.zeros_like(factor)
        return loss * factor.to(loss.dtype)

    def wrap(self, module: Any, **options: Any) -> Any:
        """Wraps `module` in DistributedDataParallel with these options, unless it is wrapped already."""
        from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm  # pyright: ignore[reportPrivateUsage]
        from torch.nn.parallel import DistributedDataParallel

        plain = any(isinstance(m, _BatchNorm) and not isinstance(m, SyncBatchNorm) for m in module.modules())
        if plain and self.world_size > 1 and not self._warned:
            self._warned = True
            warnings.warn(
                "BatchNorm takes its statistics from each rank's shard alone, so this training differs from "
                "one on a single device; on GPUs use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
                stacklevel=2,
            )
        if isinstance(module, DistributedDataParallel) or self.world_size == 1:
            return module
        return DistributedDataParallel(module, process_group=self._group, **options)

    def took(self, part: RankPart) -> None:
        self._part = part

    def __enter__(self) -> Shards:
        self._measured.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._measured.end(failed=kind is not None)


class ShardLoader:
    """A DataLoader over one rank's shards."""

    def __init__(
        self, shards: Shards, dataset: Any, sampler: ShardSampler, options: Mapping[str, Any]
    ) -> None:
        from torch.utils.data import DataLoader

        self._shards = shards
        self.sampler = sampler
        self.loader: Any = DataLoader(dataset, batch_sampler=sampler, **options)  # pyright: ignore[reportArgumentType]

    def set_epoch(self, epoch: int) -> None:
        """Chooses another order for every epoch, the same on all ranks. Call it before each epoch."""
        self.sampler.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        for part, batch in zip(self.sampler.parts(), self.loader, strict=True):
            self._shards.took(part)
            yield batch


def _place(group: Any) -> tuple[int, int]:
    """This process's rank and the number of ranks."""
    try:
        import torch.distributed as distributed
    except ImportError:
        raise UserError("PyTorch is not installed", "shards are for its DDP", "Install torch") from None
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(group), distributed.get_world_size(group)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        why = "the ranks do not know each other yet"
        raise UserError("no split", why, "Call torch.distributed.init_process_group() first")
    return 0, 1


def _limits(given: Sequence[float] | bool, allocation: SavedAllocation) -> tuple[float, ...] | None:
    if given is False:
        return None
    if given is not True:
        return checked_limits(list(given), len(allocation.batches))
    if allocation.power_limits_w is None:
        remedy = "Name an allocation's file, or the limits: power_limits=[100, 60]"
        raise UserError("there are no power limits to set", "the split has none", remedy)
    return checked_limits(allocation.power_limits_w, len(allocation.batches))


# What is done once per machine around a training: limits, a recording, and the sum of what was used.


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
            places = self._gather(_rank_place())
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
                print(*_report_lines(time_s, used), sep="\n", file=sys.stderr)

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


def _rank_place() -> RankPlace:
    import torch

    uuid = None
    if torch.cuda.is_available():
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    name = socket.gethostname()
    return RankPlace(f"{boot_id()}/{name}", name, uuid)


def gpus_of(uuids: Sequence[str | None]) -> tuple[list[str], list[str]]:
    """The GPUs of a machine's ranks that NVML knows here, and others: each rank may see only its own."""
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


def _report_lines(time_s: float, used: Sequence[MachineUse]) -> list[str]:
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
