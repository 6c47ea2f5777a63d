"""Columns from files and from memory. A file's first bytes say what it is, and its name only after them."""

from __future__ import annotations

import codecs
import csv
import gzip
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smaragdine.arrow import pc
from smaragdine.errors import UserError

# Columns from wherever people have them: checked, of one type, and not copied where that can be avoided.
# Messages count rows from 1; in a CSV, the row after the header is row 1.

TEXT = pa.dictionary(pa.int32(), pa.string())
_NAMES_COLUMNS = b"smaragdine.columns"
MOST_NS = 2**63 - 1
MOST_T_NS = 2**62  # the year 2116
_NUMBER = r"^(?i)[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$|^[-+]?(nan|inf(inity)?)$"
_EXACT_FLOAT = 2**53  # beyond it a float has lost digits that nobody can give back


def as_table(data: Any, where: str) -> pa.Table:
    """Make an Arrow table of a dict of arrays, a table or batch, or a data frame that speaks Arrow."""
    try:
        if isinstance(data, pa.Table):
            return data
        if isinstance(data, Mapping):
            columns: Mapping[str, Any] = data
            return pa.table({name: _array(values) for name, values in columns.items()})
        if hasattr(data, "__dataframe__") and not hasattr(data, "__arrow_c_stream__"):
            from pyarrow.interchange import from_dataframe

            return from_dataframe(data)
        return pa.table(data)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"{where}: no table can be made of this {type(data).__name__}",
            str(error),
            "Give a dict of arrays of one length, an Arrow table or a data frame",
        ) from None


def _array(values: Any) -> Any:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    return pa.array(values, from_pandas=True)


def need_columns(table: pa.Table, required: Sequence[str], optional: Sequence[str], where: str) -> None:
    missing = [name for name in required if name not in table.column_names]
    if missing:
        raise UserError(
            f"{where} has no column {', '.join(missing)}",
            f"it has {', '.join(_all_names(table)[:12]) or 'none'}",
            f"Needed are {', '.join(required)}" + (f", and {', '.join(optional)} may be" if optional else ""),
        )
    need_one_of_each(table.column_names, (*required, *optional), where)
    if not table.num_rows:
        raise UserError(f"{where} has no rows")


def need_one_of_each(names: Sequence[str], columns: Sequence[str], where: str) -> None:
    """Refuse two columns of one name: nobody knows which one is meant."""
    for name in columns:
        if names.count(name) > 1:
            raise UserError(f"{where} has two columns named {name}", remedy="Leave one out")


def noting_names(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Keep all column names of a file for error messages, where only some columns were read."""
    return table.replace_schema_metadata({**(table.schema.metadata or {}), _NAMES_COLUMNS: "\0".join(names)})


def _all_names(table: pa.Table) -> list[str]:
    noted = (table.schema.metadata or {}).get(_NAMES_COLUMNS)
    return table.column_names if noted is None else noted.decode().split("\0")


def refuse(where: str, column: str, bad: npt.NDArray[np.bool_], why: str, remedy: str = "") -> None:
    """Raise for the first row where `bad` is true."""
    rows = np.flatnonzero(bad)
    if rows.size:
        more = f" (and {rows.size - 1:,} more)" if rows.size > 1 else ""
        raise UserError(f"{where}, row {rows[0] + 1:,}{more}", f"{column} {why}", remedy)


def whole(table: pa.Table, name: str, where: str, nullable: bool = False) -> pa.ChunkedArray:
    """A column of whole numbers as int64. One of int64 is passed on as it is."""
    column = _plain(table[name])
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        column = _parsed(column, name, where)
    elif pa.types.is_floating(kind):
        column = _unfloated(column, name, where)
    elif pa.types.is_null(kind):
        column = column.cast(pa.int64())
    elif not pa.types.is_integer(kind) and not pa.types.is_decimal(kind):
        raise UserError(f"{where}: {name} is of type {kind}", remedy=f"{name} must be whole numbers")
    if not nullable:
        refuse(where, name, _is_null(column), "is missing")
    if column.type == pa.int64():
        return column
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid:
        values = column.to_pylist()
        bad = np.array([v is not None and (v != int(v) or not -MOST_NS <= v <= MOST_NS) for v in values])
        refuse(where, name, bad, "is no whole number of 64 bits")
        raise UserError(f"{where}: {name} has a value that is no whole number of 64 bits") from None


def number(table: pa.Table, name: str, where: str) -> pa.ChunkedArray:
    """A column of finite numbers as float64."""
    column = _plain(table[name])
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        try:
            column = pc.utf8_trim_whitespace(column).cast(pa.float64())
        except pa.ArrowInvalid as error:
            good = pc.fill_null(pc.match_substring_regex(pc.utf8_trim_whitespace(column), _NUMBER), True)
            refuse(where, name, ~good.to_numpy(), "is no number")
            raise UserError(f"{where}: {name} has a value that is no number", str(error)) from None
    elif not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind)):
        raise UserError(f"{where}: {name} is of type {kind}", remedy=f"{name} must be numbers")
    refuse(where, name, _is_null(column), "is missing")
    column = column.cast(pa.float64(), safe=False)
    refuse(where, name, ~np.isfinite(column.to_numpy()), "is not finite")
    return column


def text(table: pa.Table, name: str, where: str, nullable: bool = False) -> pa.ChunkedArray:
    """A column of words, dictionary-encoded; every word has one code."""
    column = table[name]
    kind = column.type
    if kind == TEXT and all(_tidy(chunk.dictionary) for chunk in column.chunks):
        column = column.unify_dictionaries()
    else:
        plain = _plain(column)
        if pa.types.is_binary(plain.type) or pa.types.is_large_binary(plain.type):
            plain = _decoded(plain, name, where)
        if not (_is_text(plain.type) or pa.types.is_null(plain.type)):
            raise UserError(f"{where}: {name} is of type {kind}", remedy=f"{name} must be text")
        column = plain.cast(pa.string()).dictionary_encode().cast(TEXT).unify_dictionaries()
    if not nullable:
        refuse(where, name, _is_null(column), "is missing")
        for chunk in column.chunks[:1]:
            empty = pc.index(chunk.dictionary, "").as_py()
            if empty >= 0:
                codes = np.concatenate([c.indices.to_numpy(zero_copy_only=False) for c in column.chunks])
                refuse(where, name, codes == empty, "is empty")
    return column


def constant(value: str | int | None, kind: pa.DataType, rows: int) -> pa.Array:
    return pa.nulls(rows, kind) if value is None else pa.repeat(pa.scalar(value, kind), rows)


def words_column(codes: npt.NDArray[np.int32], words: Sequence[str]) -> pa.DictionaryArray:
    """Make a dictionary column of codes and their words; a negative code is null."""
    indices = pa.array(codes, mask=codes < 0) if codes.size and int(codes.min()) < 0 else pa.array(codes)
    return pa.DictionaryArray.from_arrays(indices, pa.array(list(words), pa.string()))


def encode(values: Sequence[str | None]) -> pa.DictionaryArray:
    return pa.array(values, pa.string()).dictionary_encode()


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_dictionary(column.type):
        return column.cast(column.type.value_type)
    return column.cast(pa.string()) if str(column.type) == "string_view" else column


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _tidy(words: pa.Array) -> bool:
    # Arrow allows nulls and repeats among the words. Then codes would not be names.
    return not words.null_count and len(words.unique()) == len(words)


def _is_null(column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    if not column.null_count:
        return np.zeros(0, dtype=np.bool_)
    return column.is_null().to_numpy()


def _parsed(column: pa.ChunkedArray, name: str, where: str) -> pa.ChunkedArray:
    column = pc.utf8_trim_whitespace(column)
    column = pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid:
        good = pc.fill_null(pc.match_substring_regex(column, r"^[-+]?\d+(\.0*)?$"), True)
        refuse(where, name, ~good.to_numpy(), "is no whole number")
        # There may be millions of digits: make no number of what has more than 64 bits hold.
        digits = pc.replace_substring_regex(column, r"^\+|\.0*$", "")
        digits = pc.replace_substring_regex(digits, r"^(-?)0+(\d)", r"\1\2")
        short = pc.fill_null(pc.less_equal(pc.binary_length(digits), len(str(-MOST_NS))), True)
        refuse(where, name, ~short.to_numpy(), "is beyond 64 bits")
        values = [None if word is None else int(word) for word in digits.to_pylist()]
        bad = np.array([v is not None and not -MOST_NS <= v <= MOST_NS for v in values])
        refuse(where, name, bad, "is beyond 64 bits")
        return pa.chunked_array([pa.array(values, pa.int64())])


def _unfloated(column: pa.ChunkedArray, name: str, where: str) -> pa.ChunkedArray:
    column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
    values = pc.fill_null(column, 0).to_numpy().astype(np.float64)
    refuse(where, name, ~(values == np.trunc(values)), "is no whole number")
    refuse(where, name, np.abs(values) > _EXACT_FLOAT, "is a float too large to be exact", "Give int64")
    return column.cast(pa.int64())


def _decoded(column: pa.ChunkedArray, name: str, where: str) -> pa.ChunkedArray:
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        raise UserError(f"{where}: {name} is not UTF-8") from None


# How large a packed file becomes, known before it is unpacked, and how large it may become. A few megabytes
# of zeros unpack to gigabytes, in a gzip file, in Parquet, or in an Arrow message.

# Text of numbers packs 3 to 50 times. Small files may be packed more tightly, and do no harm.
_TIMES = 100
_AT_LEAST = 256 << 20
_AT_MOST = 16 << 30

_RECORD_BATCH = 3  # two of Arrow's kinds of messages
_DICTIONARY = 2


def ceiling(packed_bytes: int) -> int:
    return min(max(_TIMES * packed_bytes, _AT_LEAST), _AT_MOST)


def refuse_beyond(unpacked_bytes: int, packed_bytes: int, where: str, remedy: str = "") -> None:
    most = ceiling(packed_bytes)
    if unpacked_bytes > most:
        raise UserError(
            f"{where} unpacks to more than {most >> 20:,} MiB",
            f"it has {packed_bytes / 2**20:.3g} MiB, and no trace or log is packed so tightly",
            remedy or "If it is one all the same, write it anew unpacked",
        )


def arrow_bytes(content: pa.Buffer) -> int:
    """How many bytes the messages of an Arrow stream or file unpack to, by what they say of themselves."""
    source = pa.BufferReader(content)
    source.seek(8 if bytes(content[:6]) == b"ARROW1" else 0)
    total = 0
    try:
        while source.tell() < content.size:
            message = pa.ipc.read_message(source)
            total += sum(_buffers(memoryview(message.metadata), message.body))
    except (pa.ArrowException, OSError, EOFError, ValueError, struct.error):
        pass  # whoever reads it will say what is wrong
    return total


def _buffers(metadata: memoryview, body: pa.Buffer | None) -> Iterator[int]:
    """The sizes of a message's buffers once unpacked. Each buffer begins with its own."""
    at = _root(metadata)
    kind, header = _number(metadata, at, 1, "<B"), _table(metadata, at, 2)
    if kind == _DICTIONARY and header is not None:
        header = _table(metadata, header, 1)
    if kind not in (_DICTIONARY, _RECORD_BATCH) or header is None or body is None:
        return
    if _table(metadata, header, 3) is None:
        return  # not packed: it is as large as it is
    buffers = _table(metadata, header, 2)
    if buffers is None:
        return
    (count,) = struct.unpack_from("<I", metadata, buffers)
    for number in range(count):
        offset, length = struct.unpack_from("<qq", metadata, buffers + 4 + 16 * number)
        if length >= 8 and 0 <= offset <= body.size - 8:
            (unpacked,) = struct.unpack("<q", bytes(body[offset : offset + 8]))
            yield max(unpacked, 0)


# As much of FlatBuffers as this takes. A table begins with the distance back to the list of its fields.


def _root(data: memoryview) -> int:
    return struct.unpack_from("<I", data, 0)[0]


def _field(data: memoryview, table: int, number: int) -> int | None:
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0 or 4 + 2 * number >= struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset = struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0]
    return table + offset if offset else None


def _number(data: memoryview, table: int, number: int, kind: str) -> Any:
    at = _field(data, table, number)
    return None if at is None else struct.unpack_from(kind, data, at)[0]


def _table(data: memoryview, table: int, number: int) -> int | None:
    at = _field(data, table, number)
    return None if at is None else at + struct.unpack_from("<I", data, at)[0]


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
    """All bytes of a file: mapped, or unpacked if it is a gzip file."""
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
    """Unpack a gzip file, piece by piece and up to a ceiling: a few bytes may unpack to any number."""
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
    """The kind of a file: parquet, arrow, stream, json, xplane, csv, or unknown."""
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
    """The named columns that are there. `words` are best read as dictionaries. A CSV's are all text."""
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
    # A column of one value is a few bytes, however many rows it has. Reckon eight bytes a row, unpacked.
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
        # A stream that ends between two batches looks whole: only the end mark says that it is.
        if bytes(content[-len(_END_OF_STREAM) :]) != _END_OF_STREAM:
            raise UserError(f"{where} is cut off", "an Arrow stream without its end mark", "Write it anew")
        table = pa.ipc.open_stream(source).read_all()
    table.validate(full=True)
    # Nobody else checks that the names are UTF-8.
    need_one_of_each(table.column_names, columns, where)
    return table


# A spreadsheet would take this for a formula, and may run what it names: give it an apostrophe. Text that
# looks as if it had one already gets another, so that our own reader can take it away again.
_BEGINS = r"'*(?:[=@\t\r]|[+-][^\d.])"
_FORMULA, _GUARDED = rf"^({_BEGINS})", rf"^'({_BEGINS})"


def guarded(text: str) -> str:
    return re.sub(_FORMULA, r"'\1", text)


def unguarded(table: pa.Table) -> pa.Table:
    """The text as it was before `write_csv`."""
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
    """Write text as text: without dictionaries, and with nothing that begins a formula."""
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
    """The first line, without its end, which may be of three kinds."""
    return _LINE_END.split(bytes(content[: min(65536, len(content))]), maxsplit=1)[0]


def csv_header(content: pa.Buffer, delimiter: str = ",") -> tuple[list[str], bool]:
    """The column names without spaces around them, and whether there were any spaces."""
    line = first_line(content).decode("utf-8-sig", "replace")
    raw = next(csv.reader([line], delimiter=delimiter, skipinitialspace=False), [])
    names = [name.strip() for name in raw]
    return names, names != raw


def check_text(content: pa.Buffer, where: str) -> None:
    """Refuse what is not UTF-8, and name the first such byte. Arrow only looks at the columns asked for."""
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
    # With a line break inside quotes, the file must not be cut at just any line break. That is slower, so
    # only then.
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
