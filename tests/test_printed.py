"""The end of a program's log."""

from pathlib import Path

from smaragdine.files import last_printed, tail


def test_the_last_line_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert (tail(log), last_printed(log)) == ("", "")
    log.write_bytes(b" \n\n")
    assert last_printed(log) == ""
    log.write_bytes(b"first\n 10%\r 20%\r\n\xffValueError: bad data \n\n")
    assert last_printed(log) == "\ufffdValueError: bad data"
    log.write_bytes(b"first\n 10%\r 20%\r")
    assert last_printed(log) == "20%"
    log.write_bytes(b"a" * 70_000 + b"\n" + b"b" * 1000)
    assert last_printed(log) == "b" * 300
    assert len(tail(log)) == 1 << 16
