"""What TensorFlow's functions that learn look like: how data flows between their scopes, and which products
may be fused with something that is written elsewhere."""

import weakref

from ..state import process

_state = process.tensorflow

_MOST_OPERATIONS = 200000
_NO_FLOW = frozenset({"Const", "Placeholder", "ReadVariableOp", "VarHandleOp", "NoOp", "Shape"})
_PRODUCTS = frozenset(
    {"MatMul", "BatchMatMulV2", "BatchMatMulV3", "Conv2D", "Conv3D", "DepthwiseConv2dNative"}
)
_LONGEST_FUSION = 4  # product, bias, sum, activation

_state.roots = weakref.WeakKeyDictionary()
_state.graph_facts = weakref.WeakKeyDictionary()


def note(graph, root):
    """A function is being written, its gradients are wanted, and `root` is a scope of it."""
    _state.roots.setdefault(graph, set()).add(root)


def facts():
    """edges: [[source, target], …] between siblings. fusions: {operation: [[product, …], …]}, the chains of
    operations that lead from a product to one in another scope."""
    edges, fusions = {}, {}
    for graph, roots in list(_state.roots.items()):
        if graph not in _state.graph_facts:
            _state.graph_facts[graph] = _facts(graph, roots)
        edges.update(_state.graph_facts[graph][0])
        fusions.update(_state.graph_facts[graph][1])
    return {"edges": [list(edge) for edge in edges], "fusions": fusions}


def _facts(graph, roots):
    edges, fusions = {}, {}
    operations = graph.get_operations()
    for operation in operations if len(operations) <= _MOST_OPERATIONS else ():
        if not _flows(operation, roots):
            continue
        if operation.type in _PRODUCTS:
            _fusions(operation, roots, fusions)
        for tensor in operation.inputs:
            if _flows(tensor.op, roots):
                _add(tensor.op.name, operation.name, edges)
    return edges, fusions


def _flows(operation, roots):
    return operation.type not in _NO_FLOW and operation.name.partition("/")[0] in roots


def _add(source, target, edges):
    above, below = source.split("/"), target.split("/")
    for i, (one, other) in enumerate(zip(above, below), start=1):
        if one != other:
            # Between two operations of one scope it tells nothing of layers.
            if i < len(above) or i < len(below):
                edges["/".join(above[:i]), "/".join(below[:i])] = None
            return


def _fusions(product, roots, fusions):
    scope = product.name.rpartition("/")[0]
    chain = [product]
    while len(chain) < _LONGEST_FUSION:
        users = [user for user in chain[-1].outputs[0].consumers() if user.name.partition("/")[0] in roots]
        if len(users) != 1:
            return
        if users[0].name.rpartition("/")[0] != scope:
            fusions.setdefault(users[0].name, []).append([operation.name for operation in chain])
        chain.append(users[0])
