"""Run a patch right after a module of the program was executed."""

import sys

from . import marks
from .state import process


def install(patches):
    """`patches`: {module name: function of the module}. What is imported already is patched at once."""
    process.patches.update(patches)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name, patch in patches.items():
        module = sys.modules.get(name)
        # Half imported: its own import is under way and was not ours to follow.
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            _apply(name, patch, module)


def _apply(name, patch, module):
    try:
        patch(module)
    except Exception as exception:
        marks.error(name.split(".")[0], exception)


def _find(name, path, target):
    for finder in list(sys.meta_path):
        find_spec = None if isinstance(finder, _Finder) else getattr(finder, "find_spec", None)
        spec = None if find_spec is None else find_spec(name, path, target)
        if spec is not None:
            return spec
    return None


def _after(name, patch, loader):
    # An attribute of this one loader, gone once used: its type, and what else people ask a loader for, stay
    # as they are, and a lazy loader that keeps it and executes the module much later still ends up here.
    execute = loader.exec_module

    def exec_module(module):
        ours = getattr(module, "__name__", name) == name
        if ours:
            vars(loader).pop("exec_module", None)
        execute(module)
        if ours:
            _apply(name, patch, module)

    loader.exec_module = exec_module


class _Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        patch = process.patches.get(name)
        if patch is None:
            return None
        spec = _find(name, path, target)
        try:
            loader = getattr(spec, "loader", None)
            # A namespace has nothing to execute; a class used as its own loader is shared by many modules.
            if (
                not isinstance(loader, type)
                and hasattr(loader, "exec_module")
                and hasattr(loader, "__dict__")
            ):
                _after(name, patch, loader)
        except Exception as exception:
            marks.error(name.split(".")[0], exception)
        return spec
