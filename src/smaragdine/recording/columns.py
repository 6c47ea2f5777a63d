"""Columns from wherever people have them, checked, of one type, and not copied where that can be.

Rows are counted from 1 in messages; in a CSV the row after the header is row 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smaragdine.arrow import pc
from smaragdine.errors import UserError

TEXT = pa.dictionary(pa.int32(), pa.string())
_NAMES = b"smaragdine.columns"
MOST_NS = 2**63 - 1
MOST_T_NS = 2**62  # the year 2116
_NUMBER = r"^(?i)[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$|^[-+]?(nan|inf(inity)?)$"
_EXACT_FLOAT = 2**53  # above it a float has lost digits that nobody can give back


def as_table(data: Any, where: str) -> pa.Table:
    """A dict of arrays, an Arrow table or batch, or any data frame that speaks Arrow, as an Arrow table."""
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
    """Of two columns of one name nobody knows which is meant."""
    for name in columns:
        if names.count(name) > 1:
            raise UserError(f"{where} has two columns named {name}", remedy="Leave one out")


def noting_names(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Of a file of which only some columns were read: what it has, for who misses one."""
    return table.replace_schema_metadata({**(table.schema.metadata or {}), _NAMES: "\0".join(names)})


def _all_names(table: pa.Table) -> list[str]:
    noted = (table.schema.metadata or {}).get(_NAMES)
    return table.column_names if noted is None else noted.decode().split("\0")


def refuse(where: str, column: str, bad: npt.NDArray[np.bool_], why: str, remedy: str = "") -> None:
    """Raise for the first row of which `bad` is true."""
    rows = np.flatnonzero(bad)
    if rows.size:
        more = f" (and {rows.size - 1:,} more)" if rows.size > 1 else ""
        raise UserError(f"{where}, row {rows[0] + 1:,}{more}", f"{column} {why}", remedy)


def whole(table: pa.Table, name: str, where: str, nullable: bool = False) -> pa.ChunkedArray:
    """A column of whole numbers as int64; int64 itself is passed on untouched."""
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
    """Codes and their words as a dictionary column; a negative code is null."""
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
    # Arrow allows a null or the same word twice among the words; codes would then not be names.
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
        # There may be millions of them: none is made a number that has more than 64 bits hold.
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
