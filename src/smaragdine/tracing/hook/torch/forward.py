"""The calls of a PyTorch model as steps, for programs that only predict."""

import time

import torch

from .. import marks, training


def announce(model):
    """Mark the end of every call without gradients; a function that stops it."""
    count = [0]

    def called(module, args, output):
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or training.active():
            return
        marks.soon(time.time_ns(), "step_end", count[0], training.FORWARD)
        count[0] += 1

    return model.register_forward_hook(called).remove
