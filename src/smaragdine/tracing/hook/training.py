"""Who trains in this process.

One stream of steps: what runs underneath a trainer (an optimizer, a session) keeps quiet.
"""

import os
import sys
import weakref

from . import marks

_owner = None  # (pid, weak reference to the object that trains)


def begin(trainer):
    """Claim the process for `trainer`; False where another one has it."""
    global _owner
    if active():
        return False
    _owner = (os.getpid(), weakref.ref(trainer))
    learn_rank()
    return True


def end(trainer):
    """Give the process back; False where it was not `trainer`'s."""
    global _owner
    if not owns(trainer):
        return False
    _owner = None
    return True


def owns(trainer):
    return active() and _owner[1]() is trainer


def active():
    # A trainer that died in an exception nobody told us about, or that was left behind by fork, owns nothing.
    owner = _owner
    return owner is not None and owner[1]() is not None and owner[0] == os.getpid()


def learn_rank():
    """From PyTorch's process group, where there is one."""
    distributed = sys.modules.get("torch.distributed")
    # A PyTorch without it has the module, but nothing in it.
    initialized = getattr(distributed, "is_initialized", None)
    if initialized is not None and initialized():
        marks.learn_rank(distributed.get_rank())


def model():
    """The model being trained, where its trainer calls parts of it and never the whole: Lightning's."""
    return getattr(_owner[1](), "lightning_module", None) if active() else None
