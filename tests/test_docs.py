"""The documentation: what it links to is there, and its commands have only options that there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from smaragdine.cli.main import VERBS, main

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "deploy", "examples", "experiments")
PAGES = sorted(
    page
    for pages in (ROOT.glob("*.md"), *((ROOT / folder).rglob("*.md") for folder in FOLDERS))
    for page in pages
    if "node_modules" not in page.parts
)
PROGRAM_FOLLOWS = ("run", "tune")  # the first word that is no option of theirs is the program
STUDIES = ("bert", "variants", "albert", "precision", "all", "custom", "figures")
SESSIONS = ("start", "stop", "read", "list")

_CODE = re.compile(r"```.*?```|^ {4}.*?$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"(`+)(.+?)\1", re.DOTALL)


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def links(page: Path) -> list[str]:
    """Targets of its links and pictures, as far as they lie in the repository."""
    prose = _INLINE.sub("", _CODE.sub("", text_of(page)))
    targets = re.findall(r"\]\(([^()\s]+)\)", prose) + re.findall(r'(?:src|href)="([^"]+)"', prose)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


@cache
def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    found: dict[str, int] = {}
    made: set[str] = set()
    text = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE):
        plain = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        seen = found.get(anchor, 0)
        found[anchor] = seen + 1
        made.add(f"{anchor}-{seen}" if seen else anchor)
    return made


def broken(page: Path) -> Iterator[str]:
    for target in links(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or not there.is_relative_to(ROOT):
            yield f"{target}: there is no such file"
        elif anchor and anchor not in anchors(there):
            yield f"{target}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert list(broken(page)) == []


def test_links_are_found() -> None:
    """So that a change of how they are found does not empty the test above."""
    assert sum(len(links(page)) for page in PAGES) > 100
    assert "settings.md" in {Path(target).name for target in links(ROOT / "README.md")}
    assert "a-sensor-of-your-own" in anchors(ROOT / "CONTRIBUTING.md")
    assert not (ROOT / "docs" / "nothing.md").exists()


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each `smaragdine VERB …` in code blocks, and of each `VERB …` in the text."""
    blocks = "\n".join(_CODE.findall(text_of(page))).replace("\\\n", " ")
    for line in blocks.splitlines():
        yield from _verbs(re.split(r"(?:^|\s)#", line)[0].split("smaragdine ", 1)[1:])
    for _, code in _INLINE.findall(_CODE.sub("", text_of(page))):
        yield from _verbs([code.removeprefix("sudo ").removeprefix("smaragdine ")])


def _verbs(found: list[str]) -> Iterator[list[str]]:
    for text in found:
        words = re.split(r"[|;&)]\s|\s>", text)[0].split()
        if words and words[0] in VERBS and any(word.startswith("-") for word in words):
            yield words


@cache
def options(*verb: str) -> dict[str, bool]:
    """Option → whether a value follows it, from what `--help` prints."""
    printed: list[str] = []

    def keep(_: object, message: str, __: object = None) -> None:
        printed.append(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("argparse.ArgumentParser._print_message", keep)
        with pytest.raises(SystemExit):
            main([*verb, "--help"])
    found = {"-h": False, "--help": False}
    for line in re.findall(r"^ {2,4}(-.*)$", "".join(printed), re.MULTILINE):
        for each in re.split(r", (?=-)", re.split(r" {2,}", line)[0]):
            name, _, value = each.partition(" ")
            found[name] = bool(value)
    return found


def unknown(words: list[str]) -> Iterator[str]:
    """Options of a command that its verb does not have."""
    verb, *rest = words
    under = {"study": STUDIES, "session": SESSIONS}.get(verb, ())
    verbs = (verb, rest.pop(0)) if rest and rest[0] in under else (verb, *under[:1])
    known = options(*verbs)
    value_follows = False
    for word in rest:
        if word == "--":
            return
        if value_follows:
            value_follows = False
        elif word.startswith("-") and word != "-":
            name = word.split("=")[0].strip("[]…,")
            if name not in known:
                yield f"{' '.join(verbs)} {name}"
            value_follows = known.get(name, False) and "=" not in word
        elif verb in PROGRAM_FOLLOWS:
            return


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_option_is_known_to_its_verb(page: Path) -> None:
    assert [each for words in commands(page) for each in unknown(words)] == []


def test_commands_and_options_are_found() -> None:
    found = [words for page in PAGES for words in commands(page)]
    assert len(found) > 80
    assert {words[0] for words in found} > set(VERBS) - {"doctor", "batch", "platform"}
    assert list(unknown(["run", "--live", "--epochs", "3", "train.py", "--lr", "1"])) == ["run --epochs"]
    custom = ["study", "custom", "train.py", "--vary", "a=1", "--what", "--", "--epochs", "1"]
    assert list(unknown(custom)) == ["study custom --what"]


if __name__ == "__main__":  # how many there are
    print(sum(len(links(page)) for page in PAGES), "links on", len(PAGES), "pages")
    print(sum(len(list(commands(page))) for page in PAGES), "commands with options")
