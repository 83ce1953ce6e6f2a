"""The modules that a layer sits in: what learns there is what a layer without parameters of its own hears of.

A layer is not told where it is put, least of all a copy of it or one that was unpickled. But when it is called, the
modules around it are being called too: the outermost of them is searched, once.
"""

from collections.abc import Callable, Iterator
from weakref import ref

from torch import Tensor, nn

from .compat import calling_modules


class Room:
    """A module with a layer somewhere inside of it. Holds nothing alive."""

    __slots__ = ("_module", "_parameters")

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)
        self._parameters: list[ref[Tensor]] | None = None  # looked up when first asked for

    @property
    def module(self) -> nn.Module | None:
        return self._module()

    def has_any(self, owned: set[int]) -> bool:
        """Whether one of these is a parameter of the module, or of one inside of it; they are given by their id."""
        if self._parameters is None:
            module = self.module
            self._parameters = [] if module is None else [ref(p) for p in module.parameters()]
        return any(id(parameter()) in owned for parameter in self._parameters)


Rooms = tuple[Room, ...]  # from the inside


def still_in(layer: nn.Module, rooms: Rooms) -> bool:
    """Whether the layer was not taken out of them since."""
    inner: nn.Module | None = layer
    for room in rooms:
        outer = room.module
        if outer is None or not any(child is inner for child in outer._modules.values()):
            return False
        inner = outer
    return True


def around(layer: nn.Module, listens: Callable[[nn.Module], bool]) -> Iterator[tuple[nn.Module, Rooms]]:
    """The rooms of a layer that is being called, and of all others of its kind in the same model."""
    outermost_first = reversed([module for module in calling_modules(layer) if module is not layer])
    root = next((module for module in outermost_first if any(each is layer for each in module.modules())), None)
    if root is None:
        return
    seen: set[nn.Module] = set()
    waiting: list[tuple[nn.Module, Rooms]] = [(root, ())]
    while waiting:
        module, rooms = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        if listens(module):
            yield module, rooms
        inside = (Room(module), *rooms)
        waiting.extend((child, inside) for child in module._modules.values() if child is not None)
