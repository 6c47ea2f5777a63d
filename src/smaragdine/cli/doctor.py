"""`smaragdine doctor`: shows what can be measured here, what not, why, and how to fix it."""

from __future__ import annotations

import json
import os
import sys

from smaragdine.cli.parsing import Parser
from smaragdine.monitor.through_daemon import through_daemon
from smaragdine.sensors.discover import discover, settings_from_environment


def main(words: list[str]) -> int:
    parser = Parser(
        "doctor",
        "Show which channels can be read here, what is estimated, what is absent, why, and how to fix it.",
        "  smaragdine doctor\n  smaragdine doctor --json | jq .absent",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(words)
    elsewhere = through_daemon(os.environ, look_only=True)
    machine = discover(settings_from_environment(os.environ), elsewhere=elsewhere)
    channels = machine.channels()
    for sensor in machine.sensors:
        sensor.close()
    if options.json:
        values = {
            "channels": [
                {
                    "device": channel.device,
                    "quantity": channel.quantity,
                    "provenance": channel.provenance,
                    "period_ms": channel.period_ms,
                    "unit": channel.unit,
                    "sensor": channel.sensor,
                    "detail": channel.detail,
                }
                for channel in channels
            ],
            "absent": [vars(absent) for absent in machine.absent],
        }
        json.dump(values, sys.stdout, indent=1, ensure_ascii=False)
        print()
        return 0
    from smaragdine.report.terminal import console, doctor_tables

    console().print(doctor_tables(channels, machine.absent))
    return 0
