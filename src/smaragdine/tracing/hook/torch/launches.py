"""What inductor launches its kernels with, while a window is open.

inductor tells PyTorch's profiler, but a profiler of all threads keeps nothing of it (torch 2.11 and 2.13). So
we write it down, each distinct launch once, and put its number behind the name that the profiler records.
"""

import torch

SEPARATOR = " smaragdine-launch:"
_MOST = 10000

# As the profiler calls them.
_TYPES = {
    "torch.float32": "float",
    "torch.float64": "double",
    "torch.bfloat16": "c10::BFloat16",
    "torch.float16": "c10::Half",
    "torch.float8_e4m3fn": "c10::Float8_e4m3fn",
    "torch.int64": "long int",
    "torch.int32": "int",
    "torch.int16": "short int",
    "torch.int8": "signed char",
    "torch.uint8": "unsigned char",
    "torch.bool": "bool",
}
_ABOUT = ("kernel_hash", "kernel_kwargs", "num_warps", "num_stages")


class Launches:
    def __init__(self):
        self.said = []
        self._numbers = {}
        self._original = self._ours = None

    def follow(self):
        original = torch._C._profiler._RecordFunctionFast

        def record(name, *rest):
            try:
                if len(rest) == 2 and rest[1].get("kernel_backend") == "triton":
                    name = "%s%s%d" % (name, SEPARATOR, self._number(*rest))
            except Exception:
                pass  # the profiler records it without
            return original(name, *rest)

        self._original, self._ours = original, record
        torch._C._profiler._RecordFunctionFast = record

    def let_go(self):
        if self._ours is not None and torch._C._profiler._RecordFunctionFast is self._ours:
            torch._C._profiler._RecordFunctionFast = self._original
        self._ours = None

    def _number(self, args, about):
        key = (*(about.get(name) for name in _ABOUT), *map(_seen, args))
        number = self._numbers.get(key)
        if number is None:
            if len(self.said) >= _MOST:
                raise OverflowError
            said = {name: about.get(name) for name in _ABOUT}
            dims, strides, types, values = zip(*map(_said, args))
            said.update(dims=dims, strides=strides, types=types, values=values)
            self.said.append(said)
            number = self._numbers[key] = len(self.said) - 1
        return number


def _seen(arg):
    if isinstance(arg, torch.Tensor):
        return tuple(arg.shape), arg.stride(), arg.dtype
    return type(arg), arg


def _said(arg):
    """Dimensions, strides, type and value, as the profiler writes them."""
    if isinstance(arg, torch.Tensor):
        return list(arg.shape), list(arg.stride()), _TYPES.get(str(arg.dtype), ""), ""
    known = isinstance(arg, (bool, int, float))
    return [], [], "Scalar" if known else "", repr(arg) if known else ""
