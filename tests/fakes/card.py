"""Stands in for `torch_card.py` where there is no GPU: `python card.py torch_card.py`, the same requests.

What each operation draws stands in FAKE_CARD, a file of JSON: {"aten::mm": {"cold": [700, 1e-5], "hot": …}},
watts while it runs and seconds of a call. "dies": the process ends over it; "why": it cannot be made again.
The fake NVML's GPU works as long as is announced to it, so its counter shows exactly that power.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

PERIOD_NS = 10_000_000
AHEAD_S = 0.3
LOW_W, HIGH_W = 100.0, 1100.0  # of the GPU's description in the tests

with open(os.environ["FAKE_CARD"]) as given:
    known = json.load(given)


class Load(threading.Thread):
    def __init__(self, power_w: float, rest: float, time_s: float) -> None:
        super().__init__(daemon=True)
        self.part = (LOW_W + (power_w - LOW_W) / (1 + rest) - LOW_W) / (HIGH_W - LOW_W)
        self.rest, self.time_s = rest, time_s
        self.begin_s = time.time()
        self.going = True
        self.next_ns = (time.time_ns() // PERIOD_NS + 1) * PERIOD_NS
        self.announce()
        self.start()

    def run(self) -> None:
        while self.going:
            self.announce()
            time.sleep(AHEAD_S / 4)

    def announce(self) -> None:
        """The work of the time to come: nobody has read the counter of it yet."""
        lines = []
        while self.next_ns < time.time_ns() + AHEAD_S * 1e9:
            if self.part > 0:
                lines.append(f"0 {self.next_ns} {self.next_ns + round(self.part * PERIOD_NS)}\n")
            self.next_ns += PERIOD_NS
        path = os.environ["FAKE_NVML"] + ".work"
        before = ""
        if os.path.exists(path):
            with open(path) as file:
                before = file.read()
        with open(path + ".new", "w") as file:
            file.write(before + "".join(lines))
        os.replace(path + ".new", path)

    def end(self) -> dict[str, float]:
        self.going = False
        self.join()
        # What is announced is done before the next begins.
        time.sleep(max(0.0, (self.next_ns - time.time_ns()) / 1e9))
        ran_s = time.time() - self.begin_s
        on_s = ran_s / (1 + self.rest)
        return {"turns": 1, "calls": max(1, round(on_s / self.time_s)), "on_s": on_s, "rest_s": ran_s - on_s}


def main() -> None:
    json.loads(sys.stdin.readline())
    print(json.dumps({"ready": {"torch": "2.11.0+fake", "card": "a fake"}}), flush=True)
    ops: dict[int, str] = {}
    state, load = [LOW_W, 1e-3], None
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, object] = {}
        if asked["do"] == "check":
            ops |= {call["id"]: call["op"] for call in asked["calls"]}
            if any(known[call["op"]].get("dies") for call in asked["calls"]):
                os._exit(9)
            whys = [(call["id"], known[call["op"]].get("why")) for call in asked["calls"]]
            answer = {"checked": [{"id": id_, **({"why": why} if why else {})} for id_, why in whys]}
        elif asked["do"] == "prepare":
            state = known[ops[asked["call"]]]["cold" if asked["cold"] else "hot"]
            answer = {"calls": 1, "bytes": 1000, "call_s": state[1]}
        elif asked["do"] == "load":
            load = Load(state[0], asked["rest"], state[1])
        elif asked["do"] == "pause":
            load = Load(LOW_W, 0.0, 1e-3)
        elif load is not None:
            answer = load.end()
        print(json.dumps(answer or {"running": True}), flush=True)


main()
