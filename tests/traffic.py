"""What interpreted kernels read and write: every address, per launch, program and tensor.

Requires: tests/interpreter.py hands it every pointer argument, every load and every store of a launch.
Guarantees: a load or store outside of the tensor that its pointer came from raises ``OutOfBounds`` (masked lanes are
not looked at), and so does one in the gaps of a view.  Two programs of one launch that store to the same bytes, or of
which one loads what the other stores, raise ``Race``: on a GPU the result would depend on who comes first.
Never: touches memory.

1. A pointer argument enters a kernel as ``(index + 1) << 48 | data_ptr``: real addresses have 47 bits, so a pointer
   says which argument it was computed from, however far it strayed.
2. ``Launch.access`` takes the index off again, holds the address against the argument's shape and strides, records it.
3. ``Launch.finish`` looks for races among all that was recorded.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import torch

SHIFT = np.uint64(48)
ADDRESS = np.uint64((1 << 48) - 1)


class OutOfBounds(AssertionError):
    """A kernel loads or stores what is no element of the tensor that it was given."""


class Race(AssertionError):
    """Two programs of one launch use the same bytes, one of them storing."""


class Bytes(NamedTuple):
    loaded: int
    stored: int


class _Accesses:
    """Loads or stores of one storage: sorted offsets from its first byte, with their width and program."""

    def __init__(self) -> None:
        self.records: list[tuple[np.ndarray, int, int]] = []

    def unit(self) -> int:
        """The smallest width."""
        return min((width for _, width, _ in self.records), default=1 << 10)

    def units(self, unit: int) -> tuple[np.ndarray, np.ndarray]:
        """Sorted (offset, program) of every ``unit`` bytes, equal pairs once."""
        if not self.records:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        programs = 1 + max(p for _, _, p in self.records)
        keys = [
            ((offsets[:, None] + np.arange(0, width, unit)).ravel() // unit) * programs + program
            for offsets, width, program in self.records
        ]
        key = np.unique(np.concatenate(keys))
        return key // programs * unit, key % programs


class Launch:
    """One launch of one kernel."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.arguments: list[torch.Tensor] = []  # kept alive: no later tensor gets their addresses
        self.loads: dict[int, _Accesses] = defaultdict(_Accesses)  # by the storage's address
        self.stores: dict[int, _Accesses] = defaultdict(_Accesses)

    def pointer(self, tensor: torch.Tensor) -> np.ndarray:
        """What a kernel gets for ``tensor``."""
        self.arguments.append(tensor)
        return np.array([(len(self.arguments) << int(SHIFT)) + tensor.data_ptr()], dtype=np.uint64)

    def access(self, tagged: np.ndarray, width: int, program: int, store: bool) -> None:
        """Record ``width`` bytes at each of ``tagged``.  Raises OutOfBounds."""
        what = "store" if store else "load"
        for tag in np.unique(tagged >> SHIFT):
            if not 1 <= tag <= len(self.arguments):
                raise OutOfBounds(f"{self.name}: {what} out of bounds, by a pointer that came from no argument")
            tensor = self.arguments[int(tag) - 1]
            address = (tagged[(tagged >> SHIFT) == tag] & ADDRESS).astype(np.int64)
            self._check(tensor, address - tensor.data_ptr(), width, what)
            storage = tensor.untyped_storage().data_ptr()
            accesses = (self.stores if store else self.loads)[storage]
            accesses.records.append((np.unique(address - storage), width, program))

    def _check(self, tensor: torch.Tensor, offset: np.ndarray, width: int, what: str) -> None:
        bad = (offset < 0) | (offset + width > extent(tensor))
        size = tensor.element_size()
        if width == size and not tensor.is_contiguous():
            # Elements of a view: nothing is left after taking off the strides, largest first.
            rest = offset // size
            for stride, count in sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True):
                if stride:
                    rest = rest - np.minimum(rest // stride, count - 1) * stride
            bad |= rest != 0
        if bad.any():
            raise OutOfBounds(
                f"{self.name}: {what} out of bounds, at byte {int(offset[bad][0])} of argument "
                f"{tuple(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}"
            )

    def finish(self) -> None:
        """Raises Race."""
        for storage, stores in self.stores.items():
            loads = self.loads[storage]
            unit = min(stores.unit(), loads.unit())
            stored, writer = stores.units(unit)
            twice = stored[1:] == stored[:-1]
            if twice.any():
                where = self._where(storage + int(stored[1:][twice][0]))
                raise Race(f"{self.name}: two programs of one launch store to {where}")
            loaded, reader = loads.units(unit)
            at = np.minimum(np.searchsorted(stored, loaded), stored.size - 1)
            crossed = (stored[at] == loaded) & (writer[at] != reader)
            if crossed.any():
                where = self._where(storage + int(loaded[crossed][0]))
                raise Race(f"{self.name}: one program loads what another one of the launch stores, {where}")

    def _where(self, address: int) -> str:
        tensor = next(t for t in self.arguments if 0 <= address - t.data_ptr() < extent(t))
        return f"byte {address - tensor.data_ptr()} of argument {tuple(tensor.shape)} {tensor.dtype}"

    def unique_bytes(self, tensor: torch.Tensor | None = None) -> Bytes:
        """Of ``tensor``, or of all arguments."""
        return Bytes(*(sum(n for _, n in self._ranges(side, tensor)) for side in (self.loads, self.stores)))

    def offsets(self, tensor: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Where in ``tensor``, in bytes from its first element, was (loaded, stored): sorted, one number an access."""
        loaded, stored = (
            np.concatenate([o for o, _ in self._ranges(side, tensor)] or [np.zeros(0, np.int64)])
            for side in (self.loads, self.stores)
        )
        return loaded, stored

    @staticmethod
    def _ranges(side: dict[int, _Accesses], tensor: torch.Tensor | None) -> list[tuple[np.ndarray, int]]:
        """(offsets from the tensor's first element, their bytes) for each storage."""
        found = []
        for storage, accesses in side.items():
            offset = np.unique(accesses.units(accesses.unit())[0])
            if tensor is not None:
                offset = offset + (storage - tensor.data_ptr())
                offset = offset[(offset >= 0) & (offset < extent(tensor))]
            found.append((offset, int(offset.size) * accesses.unit()))
        return found


class Traffic:
    """All launches inside one ``with repaired() as traffic``."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def unique_bytes(self, tensor: torch.Tensor | None = None) -> Bytes:
        """Bytes loaded from and stored to ``tensor`` (None: any tensor), each once a launch: what two launches read,
        memory delivers twice."""
        counts = [launch.unique_bytes(tensor) for launch in self.launches]
        return Bytes(sum(c.loaded for c in counts), sum(c.stored for c in counts))

    def written(self) -> list[torch.Tensor]:
        """The tensors that any launch stored to, in order of the launches, each storage once."""
        found: dict[int, torch.Tensor] = {}
        for launch in self.launches:
            for t in launch.arguments:
                if launch.unique_bytes(t).stored:
                    found.setdefault(t.untyped_storage().data_ptr(), t)
        return list(found.values())


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element of ``tensor`` to the end of its last."""
    if not tensor.numel():
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
