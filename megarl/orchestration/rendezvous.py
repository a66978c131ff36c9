"""What torch.distributed reads from the environment, for every rank of a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank lives, before torch.distributed is set up.

    Example: ``Place(node="8a41", address="10.0.0.5", free_port=40123)``
    """

    node: str
    address: str
    free_port: int


def rendezvous(places: Sequence[Place], *, own_device: bool) -> list[dict[str, str]]:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT of every rank.

    LOCAL_RANK is the number of the rank's device among those it can see: always 0 when each rank sees only its
    ``own_device``, else the rank's number on its node. Rank 0 is the master, on a port that was free a moment ago.
    """
    one_node = len({place.node for place in places}) == 1
    master = "127.0.0.1" if one_node else places[0].address
    before: Counter[str] = Counter()
    result = []
    for rank, place in enumerate(places):
        result.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "LOCAL_RANK": "0" if own_device else str(before[place.node]),
                "MASTER_ADDR": master,
                "MASTER_PORT": str(places[0].free_port),
            }
        )
        before[place.node] += 1
    return result
