"""What becomes of a recording: the events of its raw trace, and its result.

    python -m smaragdine.study.finishing   # the request is a pickle on stdin, the answer its last line

A process of its own does it beside the next program, which has to start before it is measured. It dies with
whoever started it: a raw trace stays until there is a result, so that the next command can begin anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from smaragdine.accounting.overview import Overview, overview
from smaragdine.errors import UserError, signal_name
from smaragdine.recording.format import TRACES_FOLDER
from smaragdine.recording.reader import Recording, open_recording
from smaragdine.recording.supervise import dying_with_us
from smaragdine.study.folder import has_result, log_of, remove_traced, run_folder
from smaragdine.study.results import RESULTS, Result, load_result, result_of, save_result
from smaragdine.study.settings import Run
from smaragdine.study.sketches import has_sketch, save_sketch, sketch_of
from smaragdine.sweep.repetition import Stop
from smaragdine.tracing.assemble.recording import NotWritten, assemble

# -P: modules beside the program are not ours.
COMMAND = (sys.executable, "-P", "-m", "smaragdine.study.finishing")
_NICE = 10


@dataclass(frozen=True)
class Finished:
    result: Result | None = None
    said: tuple[str, ...] = ()  # about the trace
    error: str = ""  # why there is no result
    useless: bool = False  # the recording says nothing about a step; else another try may have its result


def finish(folder: Path, run: Run) -> Finished:
    """Make the result of a run that was recorded into the study `folder`."""
    recording, log = run_folder(folder, run), log_of(folder, run)
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    try:
        said, assemble_s = assembled(recording)
    except NotWritten as error:
        return Finished(error=str(error))
    try:
        opened = open_recording(recording)
        begin_s = time.process_time()
        found = overview(opened)
        account_s = time.process_time() - begin_s
        result = result_of(run, opened, found, text, assemble_s, account_s)
    except UserError as error:
        return Finished(said=said, error=error.reason, useless=True)
    if not has_sketch(folder, run.setting.name):
        said = (*said, *sketched(folder, run.name, opened, found))
    try:
        save_result(folder, result)  # last: what has a result is not made again
    except (UserError, OSError) as error:
        return Finished(said=said, error=f"its result could not be written: {error}")
    return Finished(result, said)


def sketched(folder: Path, name: str, recording: Recording, found: Overview) -> tuple[str, ...]:
    """Keep the sketch of a run; why it cannot be. It never costs the result."""
    try:
        sketch = sketch_of(name, recording, found)
        if sketch is not None:
            save_sketch(folder, sketch)
    except Exception as error:
        return (f"some figures cannot be drawn of it: {str(error) or repr(error)}",)
    return ()


def assembled(recording: Path) -> tuple[tuple[str, ...], float | None]:
    """What is to be said about the trace, and the CPU seconds that its events took."""
    if not (recording / TRACES_FOLDER).is_dir():
        return (), None
    import pyarrow as pa

    pa.array([0])  # the first one loads libraries
    remove_traced(recording)  # of one who was ended before all events were there
    begin_s = time.process_time()
    try:
        said = tuple(assemble(recording, keep=True))
    except NotWritten:
        raise
    except Exception as error:  # the run is to be named, and the others to go on
        said = (f"the trace cannot be used: {error}",)
    return said, time.process_time() - begin_s


class Beside:
    """`finish`, in a process of its own that has begun."""

    def __init__(self, folder: Path, run: Run) -> None:
        self._folder, self._run = folder, run
        with _signals_held():
            self._child = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=dying_with_us(),
            )
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._child.stdin as request:
            request.write(pickle.dumps((folder, run)))

    def finished(self, stop: Stop) -> Finished:
        """Waits for it."""
        assert self._child.stdout is not None
        with self._child, stop.telling(self._child):
            printed = self._child.stdout.read().decode(errors="replace")
        last = next((line for line in reversed(printed.split("\n")) if line.strip()), "")
        answer = _answer(last)
        if has_result(self._folder, self._run):
            path = self._folder / RESULTS / f"{self._run.name}.json"
            return Finished(load_result(path), answer.said if answer else ())
        why = last.strip() or _ended(self._child.returncode)
        return answer or Finished(error=f"its result was not made: {why}")

    def abandon(self) -> None:
        with self._child:
            self._child.kill()


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """For a child, for good: Ctrl-C is for the program, and a result that was begun is worth its seconds. The
    second Ctrl-C kills."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _answer(line: str) -> Finished | None:
    """None: it did not come so far, and the line is of something else."""
    try:
        values = json.loads(line)
        return Finished(None, tuple(values["said"]), values["error"], values["useless"])
    except (ValueError, TypeError, KeyError):
        return None


def _ended(returncode: int) -> str:
    if returncode < 0:
        return f"whoever made it was killed by {signal_name(-returncode)}"
    return f"whoever made it ended with exit code {returncode}"


def main() -> None:
    folder, run = pickle.loads(sys.stdin.buffer.read())
    os.nice(_NICE)
    done = finish(folder, run)
    print("\n" + json.dumps({"said": done.said, "error": done.error, "useless": done.useless}), flush=True)
    # Threads of libraries that nobody has joined can abort a process on its way out.
    os._exit(0)


if __name__ == "__main__":
    main()
