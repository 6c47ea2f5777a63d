"""HLO programs as bytes: as much of protobuf's format as it takes to run one several times in a row."""

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def varint(value):
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number, value):
    """A field: a whole number, or bytes."""
    if isinstance(value, int):
        return varint(number << 3 | VARINT) + varint(value)
    return varint(number << 3 | BYTES) + varint(len(value)) + value


def fields(data):
    """(number, value) in their order; a value is a whole number, or bytes."""
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        kind = key & 7
        if kind == VARINT:
            value, at = read_varint(data, at)
        elif kind == BYTES:
            length, at = read_varint(data, at)
            value, at = data[at : at + length], at + length
        else:
            length = 8 if kind == FIXED64 else 4
            value, at = Fixed(data[at : at + length]), at + length
        yield key >> 3, value


class Fixed(bytes):
    """Four or eight bytes without a length before them."""


def read_varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def encoded(parts):
    out = bytearray()
    for number, value in parts:
        if isinstance(value, Fixed):
            out += varint(number << 3 | (FIXED64 if len(value) == 8 else FIXED32)) + value
        else:
            out += field(number, value)
    return bytes(out)


def numbers(value):
    """A repeated whole number, packed or not."""
    if isinstance(value, int):
        return [value]
    at, found = 0, []
    while at < len(value):
        one, at = read_varint(value, at)
        found.append(one)
    return found


def first(data, number, default=b""):
    return next((value for at, value in fields(data) if at == number), default)


class Shape:
    def __init__(self, raw):
        self.raw = raw
        self.kind, self.dims, self.minor_to_major, self.parts = 0, [], [], []
        for number, value in fields(raw):
            if number == 2:
                self.kind = value
            elif number == 3:
                self.dims += numbers(value)
            elif number == 4:
                self.parts.append(Shape(value))
            elif number == 5:
                for inner, each in fields(value):
                    if inner == 1:
                        self.minor_to_major += numbers(each)
        if len(self.minor_to_major) != len(self.dims):
            self.minor_to_major = list(range(len(self.dims)))[::-1]


_TUPLE = 13


def program_shape(module):
    """Shapes of a program's parameters, and of its result."""
    host = first(module, 4)
    return [Shape(value) for number, value in fields(host) if number == 1], Shape(first(host, 2))


def named(module, name):
    """The last name that a program says is its name."""
    return module + field(1, name.encode())


def repeated(module, times):
    """The same program, with its instruction so many times. Each time has parameters and results of its own,
    and computations of its own: no two fusions may share one."""
    if times == 1:
        return module
    parts = list(fields(module))
    computations = [list(fields(value)) for number, value in parts if number == 3]
    entry_id = next(value for number, value in parts if number == 6)
    called = [each for each in computations if (5, entry_id) not in each]
    entry = next(each for each in computations if (5, entry_id) in each)
    parameters, result = program_shape(module)
    identities = [value for each in called for number, value in each if number == 5]
    own = sum(number == 2 for number, _ in entry)
    made, copies, roots = [], [], []
    for turn in range(times):
        begin = entry_id + 1 + turn * len(called)
        ids = dict(zip(identities, range(begin, begin + len(called))))
        ids[entry_id] = entry_id
        copies += [(3, encoded(_copied(each, ids, turn, 0, 0))) for each in called]
        for number, value in _copied(entry, ids, turn, turn * own, turn * len(parameters)):
            if number == 2:
                made.append(value)
            elif number == 6:
                roots.append(value)
    end = (entry_id << 32) + times * own
    if result.kind == _TUPLE:  # a tuple of tuples would be no result
        wholes, roots = roots, []
        for whole in wholes:
            for at, part in enumerate(result.parts):
                given = [(1, b"part.%d" % end), (2, b"get-tuple-element"), (3, part.raw), (13, at)]
                made.append(encoded([*given, (35, end), (36, whole)]))
                roots.append(end)
                end += 1
    leaves = (result.parts if result.kind == _TUPLE else [result]) * times
    whole = Shape(field(2, _TUPLE) + b"".join(field(4, each.raw) for each in leaves))
    results = [(1, b"results.of.all"), (2, b"tuple"), (3, whole.raw), (35, end)]
    made.append(encoded(results + [(36, each) for each in roots]))
    shapes = [(1, each.raw) for _ in range(times) for each in parameters] + [(2, whole.raw)]
    names = [(3, b"p%d" % at) for at in range(times * len(parameters))]
    shape = encoded(shapes + names)
    kept = [(number, value) for number, value in entry if number not in (2, 4, 6)]
    entry = kept + [(2, each) for each in made] + [(4, shape), (6, end)]
    rest = [(number, shape if number == 4 else value) for number, value in parts if number != 3]
    return encoded([*copies, (3, encoded(entry)), *rest])


def _copied(computation, ids, turn, shift, parameters):
    """A computation's fields in its turn: numbers and names, its own and its instructions', and what these
    refer to. The entry stays one: its instructions move up by `shift`, its parameters by `parameters`."""
    instructions = [first(value, 35, 0) for number, value in computation if number == 2]
    begin = (ids[next(value for number, value in computation if number == 5)] << 32) + shift
    places = {identity: begin + at for at, identity in enumerate(instructions)}
    for number, value in computation:
        if number == 1:
            value += b".%d" % turn
        elif number == 5:
            value = ids[value]
        elif number == 6:
            value = places[value]
        elif number == 2:
            value = encoded(_instruction(value, ids, places, turn, parameters))
        yield number, value


def _instruction(raw, ids, places, turn, parameters):
    found, parameter, is_parameter = [], 0, False
    for number, value in fields(raw):
        if number == 1:
            value += b".%d" % turn
        elif number == 2:
            is_parameter = value == b"parameter"
        elif number == 9:
            parameter = value
            continue
        elif number == 35:
            value = places[value]
        elif number == 36:
            found += [(36, places[one]) for one in numbers(value)]
            continue
        elif number == 38:
            found += [(38, ids[one]) for one in numbers(value)]
            continue
        found.append((number, value))
    return found + [(9, parameter + parameters)] if is_parameter else found


# Whose whole numbers are places in something, by opcode; and what has as many places as it is long.
_PLACED = (b"gather", b"scatter", b"dynamic-slice", b"dynamic-update-slice", b"iota", b"one-hot")


def most_index(module):
    """What a whole number that a program reads may be at most, and one more: the longest side of whatever it
    looks up in. Out of range is no error in XLA, but every look-up would then be of the same place."""
    most = 2
    for number, computation in fields(module):
        if number != 3:
            continue
        sides = {}
        for at, value in fields(computation):
            if at == 2:
                parts = list(fields(value))
                own = {key: part for key, part in parts if key in (2, 3, 35)}
                sides[own.get(35, 0)] = max(Shape(own.get(3, b"")).dims or [1])
                if own.get(2) in _PLACED:
                    operands = [one for key, part in parts if key == 36 for one in numbers(part)]
                    most = max([most, sides[own.get(35, 0)], *(sides.get(one, 1) for one in operands[:1])])
    return most


def in_place(module):
    """(result, parameter) that may be one and the same memory: the first of the same shape, for each result.
    Of a program that writes in place; alone it would copy first."""
    parameters, result = program_shape(module)
    left = dict(enumerate(each.raw for each in parameters))
    found = []
    for at, part in enumerate(result.parts or [result]):
        same = next((number for number, raw in left.items() if raw == part.raw), None)
        if same is not None:
            del left[same]
            found.append((at, same))
    return found


def sharing(module, pairs):
    """The same program with these results in the memory of these parameters."""
    _, result = program_shape(module)
    entries = []
    for at, parameter in pairs:
        place = [(1, at)] if result.kind == _TUPLE else []
        entries.append((1, encoded([*place, (2, parameter), (4, 1)])))
    return module + field(8, encoded(entries))


def compile_options(module):
    """CompileOptionsProto: layouts as they are, and of the compiler only what comes after HLO's passes."""
    parameters, result = program_shape(module)
    build = [(1, -1), (2, result.raw), (4, 1), (5, 1), (11, 1)]
    return encoded([(1, each.raw) for each in parameters] + [(3, encoded(build))])
