"""A port to meet at, some time before somebody listens there."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_BELOW = 12000
_TRIES = 200


def free_port() -> int:
    """A port of this machine that is free now and that the system gives to nobody by itself.

    Between choosing a port and listening there may lie an import of ten seconds, in which other processes open
    connections; they get ports of the system's own range, so this one is below it.

    Raises:
        OSError: none was found.
    """
    first = int(_RANGE.read_text().split()[0])
    for _ in range(_TRIES):
        port = random.SystemRandom().randrange(max(1024, first - _BELOW), first)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"none of {_TRIES} ports below {first} was free")
