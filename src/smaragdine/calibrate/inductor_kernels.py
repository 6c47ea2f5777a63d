"""Kernels that inductor generated for torch.compile, each launched alone.

The recording has the source of each. It is a Python module with one kernel in it, and inductor's own launcher
around the kernel. We load it, fix the sizes of blocks that the program's autotuner had chosen, and call it.

Like torch_card.py this runs in the program's interpreter: standard library and torch alone, and Python 3.8.
"""

import copy
import hashlib
import importlib.util
import os
import re
import sys
import tempfile

import torch

_DEVICE = re.compile(r"(DeviceProperties\(type='\w+', index=)\d+")
_NAMES = re.compile(r"^def \w+\(([^)]*)\)", re.MULTILINE)
_ASSIGNED = re.compile(r"^\s*(\w+) = (.*)$", re.MULTILINE)
_ASSERTED = re.compile(r"device_assert\((.*)$", re.MULTILINE)
_LOAD = re.compile(r"(\s*)(\w+) = tl\.load\((\w+) \+ \((.*?)\), ")
_STORE = re.compile(r"(\s*)tl\.store\((\w+) \+ \((.*?)\), (\w+), (.*)\)$")
_LOADED = re.compile(r"load\((\w+)")
_BELOW = re.compile(r"\(?(\w+) < (\d+)\)?")
_WORD = re.compile(r"[A-Za-z_]\w*")

_folder = tempfile.TemporaryDirectory(prefix="smaragdine-kernels-")


def load(about, steady):
    """inductor's launcher of the kernel, with the settings of the program's."""
    source = _DEVICE.sub(r"\g<1>0", about["source"])  # here the card is the only one
    if steady:
        source = kept(source)
    name = "k" + hashlib.sha256(source.encode()).hexdigest()[:24]
    path = os.path.join(_folder.name, name + ".py")
    with open(path, "w") as file:
        file.write(source)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    launcher = next(each for each in vars(module).values() if hasattr(each, "inductor_meta"))
    launcher.configs = [_config(launcher.configs, about)]
    for tuning in ("dynamic_scale_rblock", "coordinate_descent_tuning"):
        launcher.inductor_meta[tuning] = False
    return launcher


def run(launcher, args):
    launcher.run(*args, stream=torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))


def kept(source):
    """The same kernel, but what it changes in place stays as it was: run a thousand times, gradients that are
    multiplied in place would end at zero, where a card draws less.

    It writes what it has read, unless what it computed is a number that does not occur.
    """
    lines, read = [], {}
    for line in source.splitlines():
        indent = len(line) - len(line.lstrip())
        if line.strip():  # a loop that has ended leaves no values
            read = {place: found for place, found in read.items() if found[0] <= indent}
        load, store = _LOAD.match(line), _STORE.match(line)
        if load is not None:
            read[load.group(3), load.group(4)] = (indent, load.group(2))
        elif store is not None and (store.group(2), store.group(3)) in read:
            at, old = read[store.group(2), store.group(3)]
            if at == indent:
                begin, pointer, index, new, mask = store.groups()
                value = "tl.where(%s > 1e30, %s, %s)" % (new, new, old)
                line = "%stl.store(%s + (%s), %s, %s)" % (begin, pointer, index, value, mask)
        lines.append(line)
    return "\n".join(lines) + "\n"


def bounds(source):
    """Position of an argument → what the integers in it must stay below, as far as the kernel asserts it.

    An index comes from a load, and is shifted where it is negative; the assertion names what comes of that.
    """
    names = _NAMES.search(source)
    if names is None:
        return {}
    arguments = [part.split(":")[0].strip() for part in names.group(1).split(",")]
    loaded = set(_LOADED.findall(source)).intersection(arguments)
    made = dict(_ASSIGNED.findall(source))
    found = {}
    for asserted in _ASSERTED.findall(source):
        for variable, most in _BELOW.findall(asserted):
            for word in _behind(variable, made) & loaded:
                at = arguments.index(word)
                found[at] = min(found.get(at, int(most)), int(most))
    return found


def _behind(variable, made):
    seen, left = set(), [variable]
    while left:
        each = left.pop()
        if each not in seen:
            seen.add(each)
            left += _WORD.findall(made.get(each, ""))
    return seen


def _config(configs, about):
    """The one that the program ran; where its tuner had found one of its own, made from another."""
    wanted = dict(part.split("=", 1) for part in about["blocks"].split(",") if part)
    for config in configs:
        if _said(config) == (wanted, about["warps"], about["stages"]):
            return config
    config = copy.deepcopy(configs[0])
    config.kwargs = {name: _value(text) for name, text in wanted.items()}
    config.num_warps, config.num_stages = about["warps"], about["stages"]
    return config


def _said(config):
    return {name: str(value) for name, value in config.kwargs.items()}, config.num_warps, config.num_stages


def _value(text):
    if text in ("True", "False"):
        return text == "True"
    try:
        return int(text)
    except ValueError:
        return text
