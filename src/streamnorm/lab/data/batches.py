"""The python form of a batch of CIFAR-10: a pickle, built here by the few steps that such a file needs.

Nothing is imported or called, every step is counted, and only texts are keys: a small pickle can otherwise ask for any
amount of memory and time, by lists of lists of lists, by a place in the memo, by the hash of a tuple of tuples.
"""

import pickletools
from typing import Any

CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY: dict[str, Any] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
VALUES = {
    *("BININT", "BININT1", "BININT2", "INT", "LONG1"),
    *("SHORT_BINSTRING", "BINSTRING", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "STRING"),
}
# What numpy's arrays, and bytes in the older protocols, are made by.
ARRAY, DTYPE, BYTES, BUFFER = "array", "dtype", "bytes", "buffer"
MAKERS = {f"numpy.{core}.multiarray _reconstruct": ARRAY for core in ("core", "_core")}
MAKERS |= {f"numpy.{core}.numeric _frombuffer": BUFFER for core in ("core", "_core")}
MAKERS |= {"numpy ndarray": ARRAY, "numpy dtype": DTYPE, "_codecs encode": BYTES}


class Made:
    """What a maker made: of an array and a dtype, what it was told."""

    def __init__(self, maker: str, told: Any) -> None:
        self.maker, self.told, self.state = maker, told, ()


def unpickled(raw: bytes, steps: int) -> Any:
    """What the pickle `raw` builds in so many steps at most. A damaged one can raise anything."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    copied = 0
    argument: Any

    def since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    for step, (operation, argument, _) in enumerate(pickletools.genops(raw)):
        name = operation.name
        if step > steps:
            raise ValueError(f"more than {steps:,} steps")
        if name in VALUES:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in EMPTY:
            stack.append(EMPTY[name]())
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("TUPLE", "LIST"):
            items = since_mark()
            stack.append(tuple(items) if name == "TUPLE" else items)
        elif name in TUPLES:
            stack[-TUPLES[name] :] = [tuple(stack[-TUPLES[name] :])]
        elif name in ("APPEND", "APPENDS"):
            items = since_mark() if name == "APPENDS" else [stack.pop()]
            _a(list, stack[-1]).extend(items)
        elif name in ("SETITEM", "SETITEMS", "DICT"):
            items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else since_mark()
            if name == "DICT":
                stack.append({})
            keys = [_a((str, bytes), key) for key in items[::2]]
            _a(dict, stack[-1]).update(zip(keys, items[1::2], strict=True))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            if name == "STACK_GLOBAL":
                module, attribute = _a(str, stack.pop(-2)), _a(str, stack.pop())
                argument = f"{module} {attribute}"
            if argument not in MAKERS:
                raise ValueError(f"it asks for {argument[:100].replace(' ', '.')}, which no batch of CIFAR-10 needs")
            stack.append(Made("maker", MAKERS[argument]))
        elif name == "REDUCE":
            told = _a(tuple, stack.pop())
            maker = _a(Made, stack.pop())
            if maker.told == BYTES:
                text = _a(str, told[0])
                copied += len(text)
                if copied > 2 * len(raw):
                    raise ValueError("more bytes than the file has")
                stack.append(text.encode("latin1"))
            else:
                stack.append(Made(maker.told, told))
        elif name == "BUILD":
            state = _a(tuple, stack.pop())
            _a(Made, stack[-1]).state = state
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"the step {name}, which no batch of CIFAR-10 needs")
    raise ValueError("truncated")


def _a(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} where there must be another")
    return value


def pixels_of(array: Any, shape: tuple[int, int]) -> tuple[bytearray, bool]:
    """The bytes of an array of this shape, and whether they stand column by column."""
    _a(Made, array)
    if array.maker == ARRAY:
        _, found, dtype, by_columns, raw = array.state
    else:
        raw, dtype, found, order = array.told
        by_columns = _a(str, order) == "F"
    kind = _a(Made, dtype).told[0]
    if dtype.maker != DTYPE or kind not in ("u1", b"u1"):
        raise TypeError(f"pixels of dtype {str(_a((str, bytes), kind))[:20]}")
    if [*map(type, _a(tuple, found))] != [int, int] or found != shape:
        raise ValueError(f"images of shape {str(found[:4])[:80]}, must be {shape}")
    raw = raw.encode("latin1") if isinstance(raw, str) else _a((bytes, bytearray), raw)  # as Python 2 wrote it
    if len(raw) != shape[0] * shape[1]:
        raise ValueError(f"{len(raw):,} bytes of pixels, must be {shape[0] * shape[1]:,}")
    return bytearray(raw), bool(_a(int, by_columns))


def labels_of(labels: Any, count: int, classes: int) -> bytes:
    if len(_a(list, labels)) != count:
        raise ValueError(f"labels of shape ({len(labels)},), must be ({count},)")
    if not all(type(label) is int and 0 <= label < classes for label in labels):
        raise ValueError(f"labels other than 0 to {classes - 1}")
    return bytes(labels)
