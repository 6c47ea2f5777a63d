"""How data flows between the layers of a Keras model, as far as Keras knows: in functional ones."""

_DEEPEST = 32


def edges(model):
    """[[source, target], …]: paths of layers, from the model's name down, also in models within models."""
    found = {}
    _collect(model, model.name, found, _DEEPEST)
    return [list(edge) for edge in found]


def _collect(layer, path, found, depth):
    # A Sequential model keeps a functional one inside, which has no name of its own in a path.
    functional = getattr(layer, "_functional", None) or layer
    for node in _nodes(functional):
        target = _operation(node)
        if not _is_layer(target):
            continue
        for source in _sources(node, _DEEPEST):
            if source is not target:
                found[_below(path, source.name), _below(path, target.name)] = None
    if depth:
        for child in layer._flatten_layers(include_self=False, recursive=False):
            _collect(child, _below(path, child.name), found, depth - 1)


def _below(path, name):
    """A model may have an empty name, and then no scope of its own."""
    return path + "/" + name if path else name


def _nodes(functional):
    by_depth = getattr(functional, "_nodes_by_depth", None) or {}
    return [node for nodes in by_depth.values() for node in nodes]


def _sources(node, depth):
    """Layers whose output a node takes, through operations that are no layers and leave no scope."""
    for parent in node.parent_nodes:
        if _is_layer(_operation(parent)):
            yield _operation(parent)
        elif depth:
            for source in _sources(parent, depth - 1):
                yield source


def _operation(node):
    return getattr(node, "operation", None) or node.layer  # tf_keras


def _is_layer(operation):
    return hasattr(operation, "weights") and type(operation).__name__ != "InputLayer"
