"""How a process that replays answers what it is asked, whatever the framework.

It runs in the program's interpreter, which may not have our package: standard library alone, and Python 3.8.
"""

import json
import os
import sys


def said(error, most=300):
    """An error in one line."""
    return ((str(error) or repr(error)).splitlines() or [""])[0][:most]


def answer_all(card, lost, answers):
    """A line of JSON for each line of stdin. `lost` tells whether an error has ended all work on the card."""
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if asked["do"] == "check":
                answer = card.check(asked["calls"], asked.get("lists", []))
            elif asked["do"] == "prepare":
                answer = card.prepare(asked["call"], asked.get("cold", True))
            elif asked["do"] == "load":
                answer = card.begin(asked.get("rest", 0.0))
            elif asked["do"] == "pause":
                answer = card.pause()
            else:
                answer = card.stop()
        except Exception as error:
            answer = {"why": said(error)}
            if lost():
                # Nothing runs in this process any more; whoever asks starts another one.
                answers.write(json.dumps(dict(answer, died=True)) + "\n")
                os._exit(1)
        answers.write(json.dumps(answer) + "\n")
