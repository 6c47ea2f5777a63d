"""Bytes as they come from elsewhere: cut off, turned over, put together wrongly, saved by another editor.

for data in spoilt(random.Random(4), whole, 100): …
"""

from __future__ import annotations

import gzip
import random
import re
from collections.abc import Callable, Iterator, Sequence

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORD = re.compile(rb"[A-Za-z_]{2,}")
NUMBERS: tuple[bytes, ...] = (
    b"0",
    b"-0",
    b"-1",
    b"nan",
    b"NaN",
    b"inf",
    b"-Infinity",
    b"1e308",
    b"1e309",
    b"-1e999",
    b"1e-320",
    b"1e1000000000",
    b"1e-1000000000",
    b"2147483648",
    b"4294967296",
    b"9007199254740993",
    b"9223372036854775807",
    b"9223372036854775808",
    b"-9223372036854775808",
    b"-9223372036854775809",
    b"18446744073709551616",
    b"170141183460469231731687303715884105728",
    b"0.1e-7",
    b"1_000",
    b"0x10",
    b"1,5",
    b"+5",
    b" 7 ",
    b"",
    b"null",
    b"true",
    b'""',
    b"[]",
    b"{}",
    b"[[1]]",
    b"\xd9\xa3",  # a digit, though not one of ours
    b"9" * 400,
    b"9" * 5000,
    b"1." + b"0" * 5000,
)
WORDS: tuple[bytes, ...] = (
    b"",
    b"a" * 3000,
    b"\xff\xfe",
    b"\xc3",
    b"\xed\xa0\x80",  # half a surrogate
    b"\\ud800",
    b"\\u0000",
    b"\0",
    b"\x1b]0;title\x07",
    b"\x1b[2J",
    b"=1+2",
    b"@x",
    b"a\nb",
    b"a\rb",
    b'a"b',
    b"a,b",
    "ü→\u202e😀".encode(),
    b"%s{0}${x}",
    b"../../x",
    b"#",
    b"&a",
    b"*a",
    b"!!python/none",
    b"null",
    b"x: y",
)
_ENCODINGS = ("utf-16", "utf-16-le", "utf-8-sig", "latin-1", "cp037", "utf-32")
_BLOCKS: tuple[bytes, ...] = (
    b"\0" * 8,
    b"\xff" * 8,
    b"\xff\xff\xff\x7f",
    b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"[" * 2000,
    b'{"a":' * 2000,
    b"\n",
    b"\r",
    b"\r\n",
    b",",
    b'"',
    b"'",
    b"}",
    b"]",
    b"\0",
    b"\x80",
    b"\xef\xbb\xbf",
    b"\x1f\x8b\x08",
    b"PAR1",
    b"ARROW1\0\0",
)

Spoil = Callable[[random.Random, bytes, Sequence[bytes]], bytes]


def spoilt(dice: random.Random, whole: Sequence[bytes], count: int) -> Iterator[bytes]:
    """`count` files, each made of one of the whole ones by one to three of the ways below."""
    for _ in range(count):
        data = dice.choice(whole)
        for _ in range(dice.choice((1, 1, 1, 2, 3))):
            data = dice.choices(_WAYS, _OFTEN)[0](dice, data, whole)
        yield data


def _place(dice: random.Random, data: bytes) -> int:
    """Anywhere, the two ends more often: there formats say what they are."""
    end = len(data)
    near = min(end, 64)
    return dice.choice((dice.randint(0, end), dice.randint(0, near), end - dice.randint(0, near)))


def _cut(dice: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = _place(dice, data)
    return dice.choice((data[:at], data[:at], data[at:]))


def _flip(dice: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 4, 16))):
        changed[min(_place(dice, data), len(data) - 1)] ^= 1 << dice.randrange(8)
    return bytes(changed)


def _byte(dice: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    if not data:
        return data
    at = min(_place(dice, data), len(data) - 1)
    return data[:at] + bytes([dice.choice((0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)))]) + data[at + 1 :]


def _remove(dice: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = _place(dice, data)
    return data[:at] + data[at + dice.choice((1, 2, 8, dice.randint(0, len(data)))) :]


def _repeat(dice: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = _place(dice, data)
    part = data[at : at + dice.randint(1, 200)]
    return data[:at] + part * dice.choice((2, 2, 3, 50)) + data[at + len(part) :]


def _splice(dice: random.Random, data: bytes, whole: Sequence[bytes]) -> bytes:
    other = dice.choice(whole)
    return data[: _place(dice, data)] + other[_place(dice, other) :]


def _insert(dice: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = _place(dice, data)
    return data[:at] + dice.choice(_BLOCKS) + data[at:]


def _swap_lines(dice: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    lines = data.split(b"\n")
    i, j = dice.randrange(len(lines)), dice.randrange(len(lines))
    lines[i], lines[j] = lines[j], lines[i]
    return b"\n".join(lines)


def _line_ends(dice: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    return data.replace(b"\n", dice.choice((b"\r", b"\r\n", b"\n\n", b"\r\r\n", b"\x0b", b"\xe2\x80\xa8")))


def _encoding(dice: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    try:
        return data.decode().encode(dice.choice(_ENCODINGS), "replace")
    except UnicodeDecodeError:
        return data


def _number(dice: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    return _another(dice, data, _NUMBER, NUMBERS)


def _word(dice: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    return _another(dice, data, _WORD, WORDS)


def _another(dice: random.Random, data: bytes, what: re.Pattern[bytes], with_: Sequence[bytes]) -> bytes:
    found = list(what.finditer(data))
    if not found:
        return data
    chosen = dice.choice(found)
    return data[: chosen.start()] + dice.choice(with_) + data[chosen.end() :]


def _packed(dice: random.Random, data: bytes, whole: Sequence[bytes]) -> bytes:
    packed = gzip.compress(data, 1, mtime=0)
    return packed if dice.random() < 0.5 else dice.choice((_flip, _cut))(dice, packed, whole)


_WAYS: tuple[Spoil, ...] = (
    _cut,
    _flip,
    _byte,
    _remove,
    _repeat,
    _splice,
    _insert,
    _swap_lines,
    _line_ends,
    _encoding,
    _number,
    _word,
    _packed,
)
_OFTEN = (4, 6, 3, 3, 2, 2, 3, 1, 1, 1, 8, 4, 1)
