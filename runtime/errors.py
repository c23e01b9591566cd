"""The one exception that moec raises for bad input.

Every message names three things, so that a user can act on it without reading our source:

* ``where``: the module path, parameter or option that is at fault;
* the values that were found;
* ``way_out``: what to change.
"""

from __future__ import annotations


class MoecError(Exception):
    """Bad input to moec (a plan, a model, an example or a call).

    Args:
        message: what is wrong, with the values that were found.
        where: module path, parameter name or option at fault (empty when there is none).
        way_out: what the user can change to go on (empty when the message says it already).
    """

    def __init__(self, message: str, *, where: str = "", way_out: str = "") -> None:
        self.message = message
        self.where = where
        self.way_out = way_out
        text = f"{where}: {message}" if where else message
        if way_out:
            text += f"\n  way out: {way_out}"
        super().__init__(text)

    def __reduce__(self):
        # Exceptions cross process boundaries in the test pool; keyword arguments do not survive the default.
        return (_rebuild, (self.message, self.where, self.way_out))


def _rebuild(message: str, where: str, way_out: str) -> MoecError:
    return MoecError(message, where=where, way_out=way_out)
