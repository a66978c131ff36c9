"""What a process's allocator does with memory that is freed: glibc reads it from the environment at start.

A page that is touched for the first time costs the kernel several times what copying into it does. So an engine, which
frees as much at every weight sync as it needs at the next, keeps its memory; a trainer gives large blocks back.
"""

from __future__ import annotations

_LARGE_BYTES = 16 * 2**20
_NEVER = 2**40


def return_memory() -> dict[str, str]:
    """Give freed blocks of 16 MiB and more back at once; by itself glibc comes to keep blocks of up to 32 MiB."""
    return {"MALLOC_MMAP_THRESHOLD_": str(_LARGE_BYTES)}


def reuse_memory() -> dict[str, str]:
    """Keep everything that was ever needed, in one heap for all threads."""
    return {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(_NEVER)}
