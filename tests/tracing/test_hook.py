"""The hook as the program meets it: present in every Python process, and nothing else changed."""

import ast
import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import types
import zipapp

import pytest

from smaragdine.tracing.hook import environment as hook_environment
from smaragdine.tracing.hook import lightning, marks, training
from smaragdine.tracing.hook.environment import environment
from smaragdine.tracing.hook.state import process

HOOK = pathlib.Path(hook_environment.__file__).parent
UV = shutil.which("uv") or shutil.which("uv", path=os.path.dirname(sys.executable))

DUMP = """
import json, sys
main = sys.modules["__main__"]
json.dump({
    "path": sys.path, "argv": sys.argv, "orig": getattr(sys, "orig_argv", [])[1:], "flags": list(sys.flags),
    "main": {name: repr(value).split(" at 0x")[0] for name, value in vars(main).items() if name[:2] == "__"},
    "cache": sorted(sys.path_importer_cache), "modules": sorted(sys.modules), "warn": sys.warnoptions,
    "hooks": [repr(sys.excepthook), repr(sys.displayhook)],
}, sys.stdout)
"""


def interpreters():
    names = [sys.executable, *(f"python3.{minor}" for minor in range(8, 16)), "pypy3"]
    return [name for name in dict.fromkeys(map(shutil.which, names)) if name and works(name)]


def works(name):
    return subprocess.run([name, "-c", "import json"], capture_output=True, check=False).returncode == 0


def run(command, *, spool=None, stdin=None, cwd=None, paths=(), **variables):
    """A program's end, with the hook where there is a spool."""
    base = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    base.update(variables)
    if paths:
        base["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    if spool is not None:
        base.update(environment(str(spool), "test", base))
    return subprocess.run(
        [str(word) for word in command],
        input=stdin,
        env=base,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def hooked(tmp_path, program, **variables):
    """Run a program under the hook; it must succeed and say nothing. Its marks, by file."""
    spool = tmp_path / "spool"
    spool.mkdir(exist_ok=True)
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(program))
    done = run([sys.executable, script], spool=spool, cwd=tmp_path, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    return read(spool)


def read(spool):
    return {
        file.name: [json.loads(line) for line in file.read_text().splitlines()]
        for file in (sorted(spool.iterdir()) if spool.exists() else [])
        if not file.is_symlink()
    }


def without_frames_of(folder, text):
    """A traceback less the frames of files in a folder, each with the source lines shown below it."""
    kept, skipping = [], False
    for line in text.splitlines(keepends=True):
        skipping = str(folder) in line if line.startswith("  File ") else skipping and line.startswith("    ")
        kept += [] if skipping else [line]
    return "".join(kept)


@pytest.mark.parametrize("way", ["command", "script", "module", "zipapp", "stdin"])
@pytest.mark.parametrize("python", interpreters())
def test_program_is_as_without(tmp_path, python, way):
    (tmp_path / "program").mkdir()
    (tmp_path / "program/__main__.py").write_text(DUMP)
    zipapp.create_archive(tmp_path / "program", tmp_path / "program.pyz")
    arguments = {
        "command": ["-W", "ignore", "-c", DUMP, "-x", "1"],
        "script": ["program/__main__.py", "--flag"],
        "module": ["-O", "-m", "program", "a"],
        "zipapp": ["program.pyz"],
        "stdin": ["-", "a"],
    }[way]
    stdin = DUMP if way == "stdin" else None
    keep = {"PYTHONDONTWRITEBYTECODE": "1"}
    bare = run([python, *arguments], cwd=tmp_path, stdin=stdin, paths=["/nonexistent", tmp_path], **keep)
    with_hook = run(
        [python, *arguments],
        cwd=tmp_path,
        stdin=stdin,
        paths=["/nonexistent", tmp_path],
        spool=tmp_path,
        **keep,
    )
    assert (bare.stderr, bare.returncode) == (with_hook.stderr, with_hook.returncode) == ("", 0)
    bare, with_hook = json.loads(bare.stdout), json.loads(with_hook.stdout)
    gained = set(with_hook.pop("modules")) - set(bare.pop("modules"))
    ours = {name for name in gained if name.split(".")[0] == "_smaragdine_hook"}
    assert ours == {"_smaragdine_hook"} | {
        f"_smaragdine_hook.{name}" for name in ("install", "marks", "state")
    }
    assert gained - ours <= {"atexit"}
    # The one folder more is the package's own, where its files are looked for.
    assert set(with_hook.pop("cache")) - set(bare.pop("cache")) <= {str(HOOK)}
    assert bare == with_hook


@pytest.mark.parametrize("flag", ["-S", "-E", "-I"])
def test_isolated_interpreters_are_left_alone(tmp_path, flag):
    done = run(
        [sys.executable, flag, "-c", "import sys; print('_smaragdine_hook' in sys.modules)"], spool=tmp_path
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_without_a_spool_only_the_chain(tmp_path):
    code = "import json, sys; print(json.dumps([sorted(sys.modules), sys.path]))"
    bare, chained = (
        json.loads(run([sys.executable, "-c", code], paths=paths).stdout)
        for paths in ([tmp_path], [hook_environment.SITE, tmp_path])
    )
    assert set(chained[0]) - set(bare[0]) <= {"sitecustomize"}
    assert chained[1] == bare[1]


OTHERS = {
    "works": "import sys\nsys.other = (__name__, __file__, vars(sys.modules['sitecustomize']) is globals())",
    "raises": "1 / 0",
    "lacks a module": "import sys\nsys.other = 1\nimport no_such_module",
    "lacks itself": "raise ImportError('gone', name='sitecustomize')",
    "exits": "raise SystemExit(7)",
    "replaces itself": "import sys, types\nsys.modules['sitecustomize'] = types.ModuleType('mine')",
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("python", interpreters())
def test_another_sitecustomize(tmp_path, python, other):
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(OTHERS[other])
    code = """if 1:
        import sys
        module = sys.modules.get("sitecustomize")
        print(getattr(module, "__name__", 0), getattr(module, "__file__", 0), getattr(sys, "other", 0))
        print(sys.path, file=sys.stdout)
        print("_smaragdine_hook.install" in sys.modules, file=sys.stderr)
    """
    bare = run([python, "-c", code], paths=[folder])
    with_hook = run([python, "-c", code], paths=[folder], spool=tmp_path)
    assert (bare.stdout, bare.returncode) == (with_hook.stdout, with_hook.returncode)
    assert bare.stderr.replace("False", "True") == without_frames_of(HOOK, with_hook.stderr)


def test_current_folder_gone(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    code = "import os, subprocess, sys; os.rmdir(os.getcwd()); subprocess.run([sys.executable, '-c', 'pass'])"
    done = run([sys.executable, "-c", code], cwd=folder, spool=tmp_path)
    assert (done.stderr, done.returncode) == ("", 0)


def test_no_sitecustomize_is_still_none(tmp_path):
    code = "import sys; print('sitecustomize' in sys.modules)\nimport sitecustomize"
    bare = run([sys.executable, "-c", code])
    with_hook = run([sys.executable, "-c", code], spool=tmp_path)
    assert bare.stdout == with_hook.stdout
    assert bare.stderr == with_hook.stderr


@pytest.mark.skipif(not shutil.which("python2.7"), reason="no Python 2")
def test_python_2_passes_by(tmp_path):
    if not works("python2.7"):
        pytest.skip("no Python 2")
    done = run(
        ["python2.7", "-c", "import sys; print([p for p in sys.path if 'maragdine' in p])"], spool=tmp_path
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.skipif(UV is None, reason="no uv")
def test_uv_run(tmp_path):
    command = [UV, "run", "--no-project", "--offline", "--python", sys.executable, "python", "-c"]
    done = run(
        [*command, "import sys; print('_smaragdine_hook' in sys.modules)"], spool=tmp_path, cwd=tmp_path
    )
    assert done.stdout == "True\n", done.stderr


def test_frameworks_are_the_programs_own(tmp_path):
    """Not the hook's folders and files of the same names."""
    names = ("torch", "tensorflow", "jax", "keras", "lightning", "transformers")
    for name in names:
        (tmp_path / f"{name}.py").write_text("mine = True")
    hooked(
        tmp_path,
        f"""
        import importlib, os
        for name in {names}:
            module = importlib.import_module(name)
            assert module.mine and os.path.dirname(module.__file__) == os.path.dirname(__file__), name
        """,
    )


def test_errors_look_the_same(tmp_path):
    bare = run([sys.executable, "-c", "import sys; sys.exit(1 / 0)"])
    with_hook = run([sys.executable, "-c", "import sys; sys.exit(1 / 0)"], spool=tmp_path)
    assert (bare.stderr, bare.returncode) == (with_hook.stderr, with_hook.returncode)


@pytest.mark.parametrize("file", sorted(HOOK.rglob("*.py")), ids=lambda file: file.name)
def test_parses_on_python_3_8(file):
    ast.parse(file.read_text(), feature_version=(3, 8))


@pytest.mark.parametrize("python", interpreters())
def test_marks_on_every_python(tmp_path, python):
    code = "from _smaragdine_hook import marks; marks.mark('step_begin', 3, source='test')"
    done = run([python, "-c", code], spool=tmp_path)
    assert (done.stderr, done.returncode) == ("", 0)
    (lines,) = read(tmp_path).values()
    assert lines[0]["name"] == "step_begin"


def test_children_have_their_own_files(tmp_path):
    files = hooked(
        tmp_path,
        """
        import multiprocessing, os, subprocess, sys

        def child(name):
            from _smaragdine_hook import marks
            marks.mark("child", source=name)

        if __name__ == "__main__":
            child("parent")
            for method in ("spawn", "fork", "forkserver"):
                process = multiprocessing.get_context(method).Process(target=child, args=(method,))
                process.start()
                process.join()
            code = "from program import child; child('subprocess')"
            subprocess.run([sys.executable, "-c", code], check=True)
            pid = os.fork()
            if pid == 0:
                child("os.fork")
                sys.exit()
            os.waitpid(pid, 0)
            child("parent")
        """,
    )
    for name, lines in files.items():
        assert {f"marks-{line['pid']}.jsonl" for line in lines} == {name}
        assert len({line["source"] for line in lines}) == 1
    found = sorted((lines[0]["source"], len(lines)) for lines in files.values())
    assert found == [
        ("fork", 1),
        ("forkserver", 1),
        ("os.fork", 1),
        ("parent", 2),
        ("spawn", 1),
        ("subprocess", 1),
    ]


def test_full_disk_and_lost_folder_are_silent(tmp_path):
    files = hooked(
        tmp_path,
        """
        import os, shutil
        from _smaragdine_hook import marks
        from _smaragdine_hook.state import process
        spool = os.environ["SMARAGDINE_SPOOL"]
        os.symlink("/dev/full", f"{spool}/marks-{os.getpid()}.jsonl")
        marks.mark("full", source="test")
        assert process.marks.dropped == 1
        shutil.rmtree(spool)
        marks.set_spool(spool)
        marks.mark("gone", source="test")
        assert process.marks.dropped == 2
        marks.mark("wrong", "index", source="test")
        marks.mark("wrong", source=None)
        assert process.marks.dropped == 4
        """,
    )
    assert files == {}


def test_torn_line_spoils_no_other(tmp_path):
    files = hooked(
        tmp_path,
        """
        import os
        from _smaragdine_hook import marks
        from _smaragdine_hook.state import process
        marks.mark("first", source="test")
        write = os.write
        os.write = lambda fd, data: write(fd, data[:9])
        marks.mark("torn", source="test")
        os.write = write
        marks.mark("last", source="test")
        fd = process.marks.file[1]
        content = open(f"{process.marks.spool}/marks-{os.getpid()}.jsonl").read().splitlines()
        assert [len(content), len(content[1])] == [3, 9], content
        os.truncate(fd, 0)
        """,
    )
    assert list(files.values()) == [[]]


def test_closed_descriptor_is_not_written_to(tmp_path):
    files = hooked(
        tmp_path,
        """
        import os
        from _smaragdine_hook import marks
        marks.mark("first", source="test")
        os.closerange(3, 100)
        mine = [os.open(f"mine-{number}", os.O_RDWR | os.O_CREAT) for number in range(20)]
        marks.mark("second", source="test")
        os.closerange(3, 100)
        marks.mark("third", source="test")
        assert all(os.path.getsize(f"mine-{number}") == 0 for number in range(20))
        """,
    )
    (lines,) = files.values()
    assert [line["name"] for line in lines] == ["first", "second", "third"]


def test_threads_lose_nothing(tmp_path):
    files = hooked(
        tmp_path,
        """
        import threading
        from _smaragdine_hook import marks
        def work(number):
            for index in range(500):
                marks.mark("step", index, source=f"thread {number}")
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        """,
    )
    (lines,) = files.values()
    assert len({(line["source"], line["index"]) for line in lines}) == 2000


def test_broken_patch_is_silent_but_told(tmp_path):
    package = tmp_path / "lightning/pytorch/trainer"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").touch()
    (package / "call.py").write_text("value = 1")
    (lines,) = hooked(
        tmp_path,
        """
        import lightning.pytorch.trainer.call as call
        assert call.value == 1
        """,
    ).values()
    assert [line["name"] for line in lines] == ["hook_error"]
    assert lines[0]["detail"]["framework"] == "lightning"
    assert "_call_callback_hooks" in lines[0]["detail"]["error"]


def test_imports(tmp_path):
    (tmp_path / "space").mkdir()
    for name in ("plain", "lazy", "early", "only_found", "space/inner"):
        (tmp_path / f"{name}.py").write_text("value = 1")
    (tmp_path / "fails.py").write_text("raise ImportError('mine')")
    hooked(
        tmp_path,
        """
        import importlib.util, sys
        import early
        from _smaragdine_hook import install
        patched = []
        names = ("plain", "lazy", "early", "only_found", "space", "space.inner", "fails", "absent", "math")
        patch = lambda module: patched.append((module.__name__, module.value))
        install.after_import({name: patch for name in names})
        assert patched == [("early", 1)]

        import plain
        assert patched.pop() == ("plain", 1)
        loader = plain.__spec__.loader
        assert type(loader).__name__ == "SourceFileLoader" and loader is plain.__loader__
        assert "exec_module" not in vars(loader)
        importlib.reload(plain)
        assert patched.pop() == ("plain", 1)

        spec = importlib.util.find_spec("lazy")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        module = importlib.util.module_from_spec(spec)
        sys.modules["lazy"] = module
        spec.loader.exec_module(module)
        assert len(patched) == 1
        assert module.value == 1
        assert patched.pop() == ("lazy", 1)

        assert importlib.util.find_spec("only_found").origin.endswith("only_found.py")
        assert importlib.util.find_spec("absent") is None
        import space.inner, math
        assert patched.pop() == ("space.inner", 1)
        try:
            import fails
        except ImportError as error:
            assert str(error) == "mine"
        assert patched == [("early", 1)]
        import importlib.metadata
        importlib.invalidate_caches()
        list(importlib.metadata.distributions())
        """,
    )


def test_lines(tmp_path):
    (lines,) = hooked(
        tmp_path,
        """
        from _smaragdine_hook.marks import mark
        mark("step_begin", 7, source="torch", t_ns=5)
        mark('a "quoted" µ name', source="me", total=3, detail={"key": [1, None]})
        """,
        RANK="2",
    ).values()
    first, second = lines
    pid = first["pid"]
    assert first == {"t_ns": 5, "name": "step_begin", "index": 7, "rank": 2, "pid": pid, "source": "torch"}
    assert second.pop("t_ns") > 1.7e18
    assert second == {
        "name": 'a "quoted" µ name',
        "index": None,
        "rank": 2,
        "pid": pid,
        "source": "me",
        "total": 3,
        "detail": {"key": [1, None]},
    }


def test_marks_of_a_running_process(tmp_path, monkeypatch):
    monkeypatch.setattr(process.marks, "spool", None)
    monkeypatch.setattr(process.marks, "file", None)
    marks.mark("nobody listens", source="me")
    marks.set_spool(tmp_path)
    marks.mark("one", source="me")
    marks.set_spool(None)
    marks.mark("two", source="me")
    assert [[line["name"] for line in lines] for lines in read(tmp_path).values()] == [["one"]]


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, 0),
        ({"RANK": "3", "SLURM_PROCID": "5", "SLURM_NTASKS": "8"}, 3),
        ({"OMPI_COMM_WORLD_RANK": "4"}, 4),
        ({"PMIX_RANK": "5"}, 5),
        ({"PMI_RANK": "6"}, 6),
        ({"SLURM_PROCID": "7"}, 0),
        ({"SLURM_PROCID": "7", "SLURM_NTASKS": "1"}, 0),
        ({"SLURM_PROCID": "7", "SLURM_NTASKS": "8"}, 7),
        ({"RANK": "gold"}, 0),
    ],
)
def test_rank(variables, rank):
    assert marks.rank_of(variables) == rank


@pytest.fixture
def unranked(monkeypatch):
    """A process whose environment names no rank."""
    monkeypatch.setattr(process.marks, "rank", None)
    for name in (*marks._RANKS, "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("unranked")
def test_rank_of_lightnings_own_launcher():
    module = types.SimpleNamespace(_call_callback_hooks=lambda trainer, name, **kwargs: marks.rank())
    lightning.patch_call(module)
    assert marks.rank() == 0
    trainer = types.SimpleNamespace(global_rank=3)
    assert module._call_callback_hooks(trainer, "setup", stage="fit") == 3


@pytest.mark.usefixtures("unranked")
@pytest.mark.parametrize(
    ("group", "rank"),
    [
        ({"is_initialized": lambda: True, "get_rank": lambda: 3}, 3),
        ({"is_initialized": lambda: False}, 0),
        ({}, 0),
    ],
)
def test_rank_where_a_trainer_begins(monkeypatch, group, rank):
    """As those of transformers and Keras do."""
    monkeypatch.setitem(sys.modules, "torch.distributed", types.SimpleNamespace(**group))
    trainer = type("Trainer", (), {})()
    assert training.begin(trainer)
    training.end(trainer)
    assert marks.rank() == rank


def test_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    site = hook_environment.SITE
    bare = environment("spool", "id", {})
    assert bare == {
        "PYTHONPATH": site,
        "SMARAGDINE_SPOOL": str(tmp_path / "spool"),
        "SMARAGDINE_RUN_ID": "id",
    }
    assert environment("spool", "id", {"PYTHONPATH": ""})["PYTHONPATH"] == site
    assert environment("spool", "id", {"PYTHONPATH": "a:"})["PYTHONPATH"] == f"{site}:a:"
