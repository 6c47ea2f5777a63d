"""Who trains in this process.

There is one stream of steps: an optimizer or a session that runs underneath a trainer marks none.
"""

import os
import sys
import weakref

from . import marks
from .state import process

FORWARD = "torch:forward"  # the source of a model's calls, where nothing else announces steps


def begin(trainer):
    """Claim the process for `trainer`. Returns False where another one has it."""
    if active():
        return False
    process.trainer = (os.getpid(), weakref.ref(trainer))
    learn_rank()
    return True


def end(trainer):
    """Give the process back. Returns False where it was not `trainer`'s."""
    if not owns(trainer):
        return False
    process.trainer = None
    return True


def owns(trainer):
    return active() and process.trainer[1]() is trainer


def active():
    # A trainer owns nothing once it is gone (nobody tells us of every exception), nor in a forked child.
    owner = process.trainer
    return owner is not None and owner[1]() is not None and owner[0] == os.getpid()


def learn_rank():
    """Take the rank from PyTorch's process group, where there is one."""
    distributed = sys.modules.get("torch.distributed")
    # A PyTorch without it has the module, but nothing in it.
    initialized = getattr(distributed, "is_initialized", None)
    if initialized is not None and initialized():
        marks.learn_rank(distributed.get_rank())


def model():
    """The model being trained, of Lightning, whose trainer calls parts of it and never the whole."""
    return getattr(process.trainer[1](), "lightning_module", None) if active() else None
