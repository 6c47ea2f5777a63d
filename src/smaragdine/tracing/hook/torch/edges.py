"""Dataflow between sibling modules, from one call of each outermost module.

What a module returns is known by its node in the autograd graph, or by itself where it has none. From what
another module is given, the graph is walked back to the nearest nodes so known: those modules feed it.
Nothing is kept when the outermost call ends.
"""

import weakref

import torch

_MOST_NODES = 2000  # walked for one call: what lies further is no part of this model
_DEEPEST = 4  # of lists and dictionaries with tensors in them


class Edges:
    """Of one thread."""

    def __init__(self, done, found):
        self.done = done  # paths of outermost modules already seen through, in this process
        self.found = found  # (source, target) -> None, in order
        self.root = None  # path of the outermost module at hand
        self._forget()

    def _forget(self):
        self.nodes = {}  # autograd node -> path of the module that returned it
        self.tensors = {}  # id -> (weak reference, path), for tensors without a node

    def enter(self, path, args, depth):
        if not depth:
            self._forget()
            self.root = None if path in self.done else path
        elif self.root is not None:
            self._feed(path, args)

    def leave(self, path, kwargs, output, depth):
        if self.root is None:
            return
        if depth:
            if kwargs:
                self._feed(path, kwargs)  # pre-hooks for all modules do not get them
            self._returned(path, output)
        else:
            if output is not None:  # None: it raised
                self.done.add(self.root)
            self.root = None
            self._forget()

    def _returned(self, path, output):
        for tensor in tensors_in(output):
            node = tensor.grad_fn
            if node is not None:
                self._produced(self.nodes, node, self.nodes.get(node), path, path)
            else:
                entry = self.tensors.get(id(tensor))
                known = entry[1] if entry is not None and entry[0]() is tensor else None
                self._produced(self.tensors, id(tensor), known, path, (weakref.ref(tensor), path))

    @staticmethod
    def _produced(where, key, known, path, value):
        # What a part has returned and its parent passes on is the part's; what went through unchanged is not.
        if known is None or not known.startswith(path + "/"):
            where[key] = value

    def _feed(self, path, inputs):
        walk, seen = [], set()
        for tensor in tensors_in(inputs):
            if tensor.grad_fn is not None:
                walk.append(tensor.grad_fn)
                continue
            for whole in (tensor, tensor._base):
                entry = None if whole is None else self.tensors.get(id(whole))
                if entry is not None and entry[0]() is whole:
                    self._add(entry[1], path)
        while walk and len(seen) < _MOST_NODES:
            node = walk.pop()
            if node in seen:
                continue
            seen.add(node)
            source = self.nodes.get(node)
            if source is not None:
                self._add(source, path)
            else:
                walk.extend(before for before, _ in node.next_functions if before is not None)

    def _add(self, source, target):
        """Between the children of the lowest parent they share."""
        a, b = source.split("/"), target.split("/")
        shared = 0
        while shared < min(len(a), len(b)) and a[shared] == b[shared]:
            shared += 1
        if shared < min(len(a), len(b)):  # else one is inside the other
            self.found["/".join(a[: shared + 1]), "/".join(b[: shared + 1])] = None


def tensors_in(value, depth=0):
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _DEEPEST:
        if isinstance(value, dict):
            value = value.values()
        elif not isinstance(value, (list, tuple)):
            return
        for part in value:
            for tensor in tensors_in(part, depth + 1):
                yield tensor
