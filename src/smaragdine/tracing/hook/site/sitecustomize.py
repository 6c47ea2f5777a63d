# Every Python the program starts reads this file first, old ones too: keep it valid Python 2.7.
import os
import sys


_HERE = os.path.dirname(os.path.normpath(__file__))


def _leave_path():
    # By name alone: the current folder, to which a relative entry refers, may be gone.
    sys.path[:] = [entry for entry in sys.path if os.path.normpath(entry) != _HERE]
    for entry in list(sys.path_importer_cache):
        if os.path.normpath(entry) == _HERE:
            del sys.path_importer_cache[entry]


def _load_hook():
    if not os.environ.get("SMARAGDINE_SPOOL") or sys.version_info < (3, 8):
        return
    # What importlib.util offers under public names. These are always loaded; it would load a dozen more.
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import spec_from_file_location

    folder = os.path.dirname(_HERE)
    spec = spec_from_file_location(
        "_smaragdine_hook", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    package = module_from_spec(spec)
    sys.modules["_smaragdine_hook"] = package
    try:
        spec.loader.exec_module(package)
        from _smaragdine_hook import install

        install.start()
    except Exception:
        for name in [name for name in sys.modules if name.split(".")[0] == "_smaragdine_hook"]:
            del sys.modules[name]


_leave_path()
sys.modules.pop("sitecustomize", None)
try:
    # The one that would have been found without us. Its errors are left to `site`, which is importing us and
    # treats them as it would have; where there is none, that is the ImportError which `site` expects and
    # ignores.
    import sitecustomize  # noqa: F401
finally:
    try:
        _load_hook()
    except Exception:
        pass
