"""`smaragdine VERB`: one module per verb, imported when it is used."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from typing import NoReturn

from smaragdine.errors import UserError
from smaragdine.version import __version__

VERBS = {
    "run": "record a training script: energy per device, epoch, layer and operation",
    "show": "show a recording at a glance",
    "report": "show where the joules went: in devices, and in the operations of one step",
    "export": "write for other tools: Perfetto, speedscope, tables, Prometheus, LaTeX, TensorBoard",
    "account": "show which operation used how much energy: a footprint",
    "compare": "show what changed between runs, and what of it is noise",
    "sweep": "run a program at many power or clock limits, many times; resumable",
    "tune": "try power limits while a program runs, and settle on the best",
    "fit": "find the best power or clock limit, and how sure that is",
    "profile": "measure a step over batch sizes and power limits, for allocate",
    "allocate": "split a batch over unequal GPUs, with a power limit for each",
    "platform": "choose a GPU and its limit for a job",
    "batch": "find batch size and limit that reach a target at the least cost",
    "study": "repeat the paper's study of BERT and ALBERT, or make one of your program",
    "doctor": "show what can be measured on this machine, what not, and how to fix it",
    "baseline": "record idle power, to subtract it from runs",
    "calibrate": "replay a run's operations one by one, to know what each draws",
    "daemon": "measure for every user of this machine, with least privilege",
    "session": "let the daemon record a program that is already running",
}

# What other tools call it.
_ELSEWHERE = {"diff": "compare", "record": "run", "stats": "show", "summary": "show", "monitor": "run"}

_HELP = """\
usage: smaragdine VERB [options]

The energy profiler for deep learning.

{verbs}

  smaragdine VERB --help    the options of a verb, with an example
  smaragdine --version

example:
  smaragdine doctor
  smaragdine run train.py --epochs 3
  smaragdine report runs/2026-11-15-train
"""


def program() -> NoReturn:
    """The command itself, which ends the process here. If the interpreter ended it, threads of libraries that
    nobody joined could abort it: Arrow's do, once in hundreds of runs on a busy machine."""
    sys.meta_path.insert(0, _WithoutPandas())
    try:
        code = main()
    except SystemExit as end:  # --help
        code = end.code if isinstance(end.code, int) else 0
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # closed by the caller
                stream.flush()
    except BrokenPipeError:
        code = code or 141
    except OSError:
        code = code or 2
    os._exit(code)


class _WithoutPandas:
    """Keeps PyArrow from importing pandas, which takes half of a short command's time, only to ask whether a
    list is one of its own. Everyone else can still import it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name != "pandas":
            return
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # `inspect` is dear to load
        while frame.f_back is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
            frame = frame.f_back
        # PyArrow's own code is compiled and has no frame, so its caller seems to ask.
        if str(frame.f_globals.get("__name__")).partition(".")[0] in ("smaragdine", "pyarrow"):
            raise ModuleNotFoundError("not needed", name=name)


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        # A terminal without × shows a ? instead of failing.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        return _dispatch(words)
    except UserError as error:
        print(f"smaragdine: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # `smaragdine show … | head` is no error, and the interpreter must not complain on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except OSError as error:
        # For instance a full disk behind the standard output.
        print(f"smaragdine: {error}", file=sys.stderr)
        return 2
    except UnicodeEncodeError:
        print("smaragdine: a path is not UTF-8. Rename it", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return 130


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        width = max(map(len, VERBS))
        verbs = "\n".join(f"  {verb:{width}}  {text}" for verb, text in VERBS.items())
        print(_HELP.format(verbs=verbs), end="")
        return 0
    if words[0] in ("--version", "-V"):
        print(f"smaragdine {__version__}")
        return 0
    if words[0] not in VERBS:
        raise UserError(f"unknown verb {words[0]}", remedy=_meant(words[0]))
    verb = importlib.import_module(f"smaragdine.cli.{words[0]}")
    return verb.main(words[1:])


def _meant(word: str) -> str:
    import difflib  # dear to load

    near = _ELSEWHERE.get(word) or next(iter(difflib.get_close_matches(word, VERBS)), None)
    return (f"Did you mean {near}? " if near else "") + f"There are: {', '.join(VERBS)}"
