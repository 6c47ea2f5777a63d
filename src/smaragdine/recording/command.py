"""Which program `run` starts: a script, a module or any executable, as you would start it by hand."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from smaragdine.errors import NOT_FOUND, NOT_RUN, UserError

# `--hub.token`, `HF_TOKEN=`, `+wandb.api_key=`: a whole word, so that `--max-tokens` is no secret.
_SECRET_WORD = r"(?:token|secret|password|passwd|credentials?|auth|signature|(?:[a-z0-9]+[-_])?key)"
_SECRET_NAME = rf"[+-]*(?:[\w.+-]*[._+-])?{_SECRET_WORD}(?:[._+-][\w.+-]*)?"
_SECRET_OPTION = re.compile(rf"^-{_SECRET_NAME}$", re.IGNORECASE)
_SECRET_VALUE = re.compile(rf"^(?P<name>{_SECRET_NAME})=.*$", re.IGNORECASE | re.DOTALL)
_URL_PASSWORD = re.compile(r"(?P<scheme>\w://)[^/\s@]+@")
_SECRET_INSIDE = re.compile(rf"(?P<name>\b{_SECRET_NAME})=[^\s;&'\"]+", re.IGNORECASE)


@dataclass(frozen=True)
class Command:
    executable: str  # the file to start
    argv: tuple[str, ...]  # its arguments, its own name first
    label: str  # for the recording's folder: the script's or the program's name


def build_command(words: Sequence[str], environment: Mapping[str, str]) -> Command:
    """`train.py …`, `-m module …`, or an executable with its arguments.

    A leading `--` announces an executable. There too, as behind the `--` of `sweep`, Python runs a script
    that cannot be started by itself.
    """
    words = list(words)
    if words[:1] == ["--"]:
        words = _required(words[1:])
        path = Path(words[0])
        if path.suffix == ".py" and path.is_file() and not _found(words[0], environment):
            return _script(path, words, environment)
        return _executable(words, environment)
    words = _required(words)
    if words[0] == "-m":
        if len(words) < 2:
            raise UserError("-m needs a module", remedy="Example: smaragdine run -m package.train --epochs 3")
        python = _python(environment)
        return Command(python, (python, *words), words[1].rpartition(".")[2])
    if words[0].startswith("-"):
        raise UserError(
            f"unknown option {words[0]}",
            remedy="Options of smaragdine come before the script; see smaragdine run --help",
        )
    path = Path(words[0])
    is_folder = path.is_dir() and (os.sep in words[0] or _found(words[0], environment) is None)
    if path.suffix in (".py", ".pyc", ".pyz", ".ipynb") or is_folder:
        return _script(path, words, environment)
    return _executable(words, environment)


def _required(words: list[str]) -> list[str]:
    if not words:
        raise UserError("nothing to run", remedy="Example: smaragdine run train.py --epochs 3")
    return words


def _script(path: Path, words: list[str], environment: Mapping[str, str]) -> Command:
    if path.suffix == ".ipynb":
        raise UserError(
            f"{path} is a notebook",
            remedy=f"Convert it first: jupyter nbconvert --to script {path}",
        )
    if not path.exists():
        where = f"looked in {os.getcwd()}"
        raise UserError(f"{path} does not exist", where, "Check the path of the script", NOT_FOUND)
    if path.is_dir() and not (path / "__main__.py").exists():
        raise UserError(f"{path} is a folder", "it has no __main__.py", "Name the script inside it", NOT_RUN)
    if not os.access(path, os.R_OK):
        raise UserError(f"{path} cannot be read", "permission denied", f"Try: chmod u+r {path}", NOT_RUN)
    python = _python(environment)
    return Command(python, (python, *words), path.resolve().stem)


def _found(name: str, environment: Mapping[str, str]) -> str | None:
    return shutil.which(name, path=environment.get("PATH"))


def _executable(words: list[str], environment: Mapping[str, str]) -> Command:
    name = words[0]
    found = _found(name, environment)
    if found is None and os.sep not in name:
        # torchrun, accelerate … sit beside our own interpreter when its environment is not activated.
        beside = Path(sys.executable).parent / name
        found = str(beside) if os.access(beside, os.X_OK) and beside.is_file() else None
    if found is None:
        if Path(name).is_file():
            why, remedy = "it is not executable", f"Try: chmod u+x {name}, or smaragdine run python {name}"
        elif Path(name).is_dir():
            why, remedy = "it is a folder", "Name the program inside it"
        elif os.sep in name:
            why, remedy = "no such file", "Check the path"
        else:
            why, remedy = (
                "no such command on PATH",
                "A Python script needs its .py; check the spelling otherwise",
            )
        raise UserError(f"cannot run {name}", why, remedy, NOT_RUN if Path(name).exists() else NOT_FOUND)
    script = next((word for word in words[1:] if word.endswith(".py")), name)
    return Command(found, tuple(words), Path(script).stem)


def _python(environment: Mapping[str, str]) -> str:
    """Our own interpreter. Where we are installed as an isolated tool, the user's one."""
    prefix = Path(sys.prefix)
    if (prefix / "pipx_metadata.json").exists() or (prefix / "uv-receipt.toml").exists():
        path = environment.get("PATH")
        return shutil.which("python", path=path) or shutil.which("python3", path=path) or sys.executable
    return sys.executable


def without_secrets(argv: Sequence[str]) -> list[str]:
    """The command as we store it, without the values of options that name a secret."""
    stored: list[str] = []
    hide = False
    for word in argv:
        match = _SECRET_VALUE.match(word)
        if hide and not word.startswith("-"):
            stored.append("***")
        elif match:
            stored.append(f"{match['name']}=***")
        else:
            word = _URL_PASSWORD.sub(r"\g<scheme>***@", word)
            stored.append(_SECRET_INSIDE.sub(r"\g<name>=***", word))
        hide = bool(_SECRET_OPTION.match(word))
    return stored
