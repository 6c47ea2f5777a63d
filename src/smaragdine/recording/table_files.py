"""Files with columns: what they hold is told by their first bytes, and by their name only after that."""

from __future__ import annotations

import codecs
import csv
import gzip
import os
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from smaragdine.arrow import pc
from smaragdine.errors import UserError
from smaragdine.recording.columns import TEXT, need_one_of_each, noting_names
from smaragdine.recording.unpacked import arrow_bytes, refuse_beyond

_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_OTHER_MAGIC = {
    b"PK\x03\x04": "a zip file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ": "an xz file",
    b"FEA1": "a Feather file of version 1",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"SQLite format 3": "an SQLite database",
}
_PIECE = 1 << 20


def read_content(path: str | os.PathLike[str]) -> pa.Buffer:
    """All bytes of a file, mapped, or unpacked if it is a gzip file."""
    file = Path(path)
    try:
        with pa.memory_map(str(file)) as source:
            content = source.read_buffer()
    except (OSError, pa.ArrowException) as error:
        if file.is_dir():
            raise UserError(f"{file} is a folder", remedy="Name a file") from None
        if file.is_file() and not file.stat().st_size:
            raise UserError(f"{file} is empty") from None
        why = "" if not file.exists() else (getattr(error, "strerror", None) or str(error))
        raise UserError(f"{file} cannot be read" if why else f"{file} does not exist", why) from None
    if content.size and bytes(content[:2]) == b"\x1f\x8b":
        content = _unpacked(content, file)
    if not content.size:
        raise UserError(f"{file} is empty")
    for magic, what in _OTHER_MAGIC.items():
        if bytes(content[: len(magic)]) == magic:
            raise UserError(
                f"{file} is {what}", remedy="Unpack or rewrite it; see docs/events.md for what is read"
            )
    return content


def _unpacked(packed: pa.Buffer, file: Path) -> pa.Buffer:
    """What a gzip file holds, piece by piece and up to a ceiling: a few bytes may unpack to any number."""
    content = bytearray()
    try:
        with gzip.GzipFile(fileobj=pa.BufferReader(packed)) as source:
            while piece := source.read(_PIECE):
                content += piece
                remedy = "If it is one all the same, unpack it yourself: gunzip"
                refuse_beyond(len(content), packed.size, str(file), remedy)
    except EOFError:
        raise UserError(f"{file} is cut off", "its gzip stream has no end", "Copy it anew") from None
    except (OSError, zlib.error) as error:
        raise UserError(f"{file} is damaged", str(error), "Copy it anew") from None
    return pa.py_buffer(content)


def kind_of(content: pa.Buffer, path: str | os.PathLike[str]) -> str:
    """parquet, arrow, stream, json, xplane, csv, or unknown."""
    head = bytes(content[: min(4096, content.size)])
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"ARROW1"):
        return "arrow"
    if head.startswith(b"\xff\xff\xff\xff"):
        return "stream"
    words = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if words[:1] in (b"{", b"["):
        return "json"
    suffixes = {suffix.lower() for suffix in Path(path).suffixes[-2:]}
    if ".pb" in suffixes:
        return "xplane"
    if suffixes & {".csv", ".txt", ".log"}:
        return "csv"
    if head[:1] == b"\x0a" and b"\0" in head:
        return "xplane"
    return "csv" if b"," in first_line(words) and b"\0" not in head else "unknown"


def read_table(
    content: pa.Buffer, kind: str, columns: Sequence[str], words: Sequence[str], where: str
) -> pa.Table:
    """The named columns, as far as they are there; `words` are worth a dictionary. A CSV's are all text."""
    try:
        if kind == "parquet":
            return _read_parquet(content, columns, words, where)
        if kind in ("arrow", "stream"):
            return _read_arrow(content, kind, columns, where)
        check_text(content, where)
        return read_csv(content, columns, words, where)
    except pa.ArrowInvalid as error:
        why = str(error).splitlines()[0]
        if "UTF8" in why or "UTF-8" in why:
            raise UserError(f"{where} is not UTF-8", why, "Save it as UTF-8") from None
        raise UserError(f"{where} cannot be read as {_NAMES[kind]}", why) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8", str(error), "Save it as UTF-8") from None
    except (OSError, pa.ArrowException, ValueError) as error:
        raise UserError(
            f"{where} cannot be read as {_NAMES[kind]}", str(error), "Is it whole? Copy it anew"
        ) from None


_NAMES = {"parquet": "Parquet", "arrow": "an Arrow file", "stream": "an Arrow stream", "csv": "CSV"}


def _read_parquet(content: pa.Buffer, columns: Sequence[str], words: Sequence[str], where: str) -> pa.Table:
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(pa.BufferReader(content))
    there = [name for name in metadata.schema.to_arrow_schema().names if name in columns]
    need_one_of_each(there, columns, where)
    file = pq.ParquetFile(
        pa.BufferReader(content), metadata=metadata, read_dictionary=[name for name in words if name in there]
    )
    if not there:
        return file.schema_arrow.empty_table()  # the caller wants to know what is there instead
    # A column of one value is a few bytes however many rows it has: eight bytes a row are unpacked then.
    packed = sum(metadata.row_group(n).total_byte_size for n in range(metadata.num_row_groups))
    refuse_beyond(max(packed, 8 * metadata.num_rows * len(there)), content.size, where)
    table = file.read(there)
    table.validate(full=True)
    return noting_names(table, file.schema_arrow.names)


def _read_arrow(content: pa.Buffer, kind: str, columns: Sequence[str], where: str) -> pa.Table:
    refuse_beyond(arrow_bytes(content), content.size, where)
    source = pa.BufferReader(content)
    if kind == "arrow":
        table = pa.ipc.open_file(source).read_all()
    else:
        # A stream may end between two batches without anybody noticing: only its end mark says it is whole.
        if bytes(content[-len(_END_OF_STREAM) :]) != _END_OF_STREAM:
            raise UserError(f"{where} is cut off", "an Arrow stream without its end mark", "Write it anew")
        table = pa.ipc.open_stream(source).read_all()
    table.validate(full=True)
    # Nobody else looks whether the names are UTF-8.
    need_one_of_each(table.column_names, columns, where)
    return table


# A program of tables would take it for a formula, and may run what it names: it gets an apostrophe. What
# looks as if it had got one gets another, so that our own reader can take it away again.
_BEGINS = r"'*(?:[=@\t\r]|[+-][^\d.])"
_FORMULA, _GUARDED = rf"^({_BEGINS})", rf"^'({_BEGINS})"


def guarded(text: str) -> str:
    return re.sub(_FORMULA, r"'\1", text)


def unguarded(table: pa.Table) -> pa.Table:
    """Text as it was before `write_csv`."""
    for i, field in enumerate(table.schema):
        column = table.column(i)
        if pa.types.is_dictionary(field.type):
            chunks = [
                pa.DictionaryArray.from_arrays(chunk.indices, _without_guard(chunk.dictionary))
                for chunk in column.chunks
            ]
            table = table.set_column(i, field.name, pa.chunked_array(chunks, field.type))
        elif pa.types.is_string(field.type):
            table = table.set_column(i, field.name, _without_guard(column))
    return table


def _without_guard(texts: Any) -> Any:
    return pc.replace_substring_regex(texts, _GUARDED, r"\1")


def write_csv(table: pa.Table, path: Path) -> None:
    """Text as text: without dictionaries, which a CSV does not know, and nothing that begins a formula."""
    import pyarrow.csv as pv

    for i, field in enumerate(table.schema):
        column = table.column(i)
        if pa.types.is_dictionary(field.type):
            column = column.cast(pa.string())
        if pa.types.is_string(column.type):
            column = pc.replace_substring_regex(column, _FORMULA, r"'\1")
            table = table.set_column(i, field.name, column)
    pv.write_csv(table, path)


_LINE_END = re.compile(rb"\r\n|\r|\n")


def first_line(content: pa.Buffer | bytes) -> bytes:
    """Without its end, which is one of three."""
    return _LINE_END.split(bytes(content[: min(65536, len(content))]), maxsplit=1)[0]


def csv_header(content: pa.Buffer, delimiter: str = ",") -> tuple[list[str], bool]:
    """The column names without the spaces around them, and whether there were any."""
    line = first_line(content).decode("utf-8-sig", "replace")
    raw = next(csv.reader([line], delimiter=delimiter, skipinitialspace=False), [])
    names = [name.strip() for name in raw]
    return names, names != raw


def check_text(content: pa.Buffer, where: str) -> None:
    """Refuse what is no UTF-8, at the first byte that is not. Arrow looks at the columns it is asked for."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    view = memoryview(content)
    try:
        for at in range(0, content.size, _PIECE):
            decoder.decode(view[at : at + _PIECE], final=at + _PIECE >= content.size)
    except UnicodeDecodeError:
        raise UserError(f"{where} is not UTF-8", remedy="Save it as UTF-8") from None


def read_csv(
    content: pa.Buffer,
    columns: Sequence[str],
    words: Sequence[str],
    where: str,
    invalid_row: Callable[[Any], str] | None = None,
) -> pa.Table:
    import pyarrow.csv as pv

    names, spaced = csv_header(content)
    there = [name for name in names if name in columns]
    need_one_of_each(there, columns, where)
    if not there:
        return pa.table({name: pa.array([], pa.string()) for name in dict.fromkeys(names)})
    # A line break inside quotes forbids cutting the file at any line break: only then, it is slower.
    quoted = re.search(rb'"', memoryview(content)) is not None
    table = pv.read_csv(
        pa.BufferReader(content),
        read_options=pv.ReadOptions(column_names=names, skip_rows=1, block_size=8 << 20),
        parse_options=pv.ParseOptions(newlines_in_values=quoted, invalid_row_handler=invalid_row),
        convert_options=pv.ConvertOptions(
            column_types={name: TEXT if name in words and not spaced else pa.string() for name in there},
            include_columns=there,
            strings_can_be_null=False,
        ),
    )
    if spaced:
        trimmed = [pc.utf8_trim_whitespace(column) for column in table.columns]
        table = pa.table(trimmed, names=table.column_names)
    if re.search(rb"'[=@\t\r+-]", memoryview(content)) is not None:
        table = unguarded(table)
    return noting_names(table, names)
