"""How many OpenMP threads a process gets, and how they wait. The wrong choice costs thirty times.

OpenMP threads spin while they wait for each other. With more spinning threads than cores, both threads of a process
can end up on one core, one of them waiting for the other that cannot run.

What counts is who computes **at the same time**. In the synchronous loop the engine computes while the trainer's ranks
wait and the other way round, so a lone engine takes ``thread_env(cores, 1)`` and two trainer ranks
``thread_env(cores, 2)`` each, on the same cores. That is safe since the threads of both sleep while the other computes:
a passive thread at once, a lone process's after its short spin. An asynchronous run computes on both sides and counts
all of them together.

Measured on 2 cores, engine and two trainer ranks in turn, milliseconds for eight products [64, 512] x [512, 512], best
of 30 rounds: the engine 2.3 as chosen here, 3.2 with two passive threads, 3.1 with one; the trainer ranks 3.5 as
chosen, 65 with the default settings. On a machine that others keep busy too, two passive threads hold their 3.5 while
bound ones wait for whoever sits on their core (median 6.5).
"""

from __future__ import annotations

_SHORT_SPIN = "20000"
"""Turns of libgomp's wait loop before a thread sleeps, some 50 us: it spans the gaps inside one forward, no more."""


def thread_env(cores: int, computing_processes: int) -> dict[str, str]:
    """Environment of one of ``computing_processes`` processes that compute at once on ``cores`` cores of one machine.

    It must be set before torch is imported: libgomp reads it once. Every key is always set, so that nothing of the
    surrounding environment shines through.

    Raises:
        ValueError: a count below 1.
    """
    if cores < 1 or computing_processes < 1:
        raise ValueError(
            f"cores ({cores}) and computing_processes ({computing_processes}) must be >= 1; use cores=os.cpu_count()"
        )
    if computing_processes == 1:
        return {
            "OMP_NUM_THREADS": str(cores),
            "OMP_PROC_BIND": "true",
            "OMP_WAIT_POLICY": "active",
            "GOMP_SPINCOUNT": _SHORT_SPIN,
        }
    return {
        "OMP_NUM_THREADS": str(max(1, cores // computing_processes)),
        "OMP_PROC_BIND": "false",
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
    }
