"""Process groups and the device mesh of a mesh of atomic axes.

``Groups(mesh, keys)`` is **collective**: every rank of the default process group constructs it with the same mesh and
the same keys.  Creation order is fixed by the mesh (never by the order of ``keys``), so ranks cannot disagree.
``ensure(more_keys)`` adds groups later and is collective too.

* ``device_mesh``: one ``DeviceMesh`` over all atomic axes (None for a world of one rank, which has no axis).
* ``name(key)``: the c10d ``group_name`` of this rank's group over a group key, which lowered graphs carry.

A group over one axis is the device mesh's own, a group over all axes the default group; the rest is created, and so
is every group with a purpose.
Groups of one rank never exist: axes of size 1 do not.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .errors import MoecError
from .mesh import Mesh, axes_of


class Groups:
    def __init__(self, mesh: Mesh, keys: Iterable[str] = (), device_type: str = "cpu") -> None:
        """Raises MoecError when the default process group is missing or its size is not the mesh's."""
        self.mesh = mesh
        self.device_mesh: DeviceMesh | None = None
        self._groups: dict[str, dist.ProcessGroup] = {}
        if mesh.world == 1:
            return
        if not dist.is_initialized():
            raise MoecError(
                f"a mesh of {mesh.world} ranks needs a process group, and torch.distributed is not initialised",
                where="plan",
                way_out="run under torchrun and call torch.distributed.init_process_group() first",
            )
        if dist.get_world_size() != mesh.world:
            raise MoecError(
                f"the mesh {dict(zip(mesh.names, mesh.shape, strict=True))} has {mesh.world} ranks, "
                f"torch.distributed has {dist.get_world_size()}",
                where="plan",
                way_out="choose degrees whose product is the number of processes",
            )
        self.device_mesh = init_device_mesh(device_type, mesh.shape, mesh_dim_names=mesh.names)
        for name in mesh.names:
            self._groups[name] = self.device_mesh.get_group(name)
        if len(mesh.names) > 1:
            assert dist.group.WORLD is not None  # initialised, see above
            self._groups[mesh.key(mesh.names)] = dist.group.WORLD
        self.ensure(keys)

    def ensure(self, keys: Iterable[str]) -> None:
        """Create the groups of ``keys`` that do not exist yet.  Collective."""
        for key in sorted({self._checked(k) for k in keys} - self._groups.keys(), key=self._order):
            for ranks in self.mesh.groups(key):
                # Every rank takes part in creating every group, in the same order; it keeps the one that it is in.
                group = dist.new_group(list(ranks))
                if dist.get_rank() in ranks:
                    self._groups[key] = group

    def group(self, key: str) -> dist.ProcessGroup:
        """This rank's process group over a group key."""
        if self._checked(key) not in self._groups:
            raise MoecError(
                f"no process group was created for {key!r}",
                where="groups",
                way_out=f"pass the key to Groups(mesh, keys) or ensure(keys); there are {sorted(self._groups)}",
            )
        return self._groups[key]

    def name(self, key: str) -> str:
        """The c10d name of this rank's group over a group key."""
        return self.group(key).group_name

    def _checked(self, key: str) -> str:
        if not self.mesh.is_key(key):
            raise MoecError(
                f"{key!r} is not a group key of the mesh with the axes {list(self.mesh.names)}",
                where="groups",
                way_out="join axis names in mesh order by commas (Mesh.key)",
            )
        return key

    def _order(self, key: str) -> tuple[list[int], str]:
        return [self.mesh.names.index(n) for n in axes_of(key).split(",")], key
