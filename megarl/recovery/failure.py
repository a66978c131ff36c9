"""What a person is told when a run broke: who, where, the last log lines, and what to do next."""

from __future__ import annotations

from pathlib import Path


class WorkerFailed(RuntimeError):
    """A rank of a process group raised or died; the whole group is unusable from then on.

    Example: ``WorkerFailed("trainer", 1, "train_step", "ValueError: loss is nan", Path("logs/trainer-1.log"), ())``
    """

    def __init__(
        self,
        name: str,
        rank: int,
        method: str,
        cause: str,
        log: Path,
        log_lines: tuple[str, ...],
        died: bool = False,
    ) -> None:
        super().__init__(name, rank, method, cause, log, log_lines, died)
        self.name, self.rank, self.method = name, rank, method
        self.cause = cause
        """``Type: text`` of the rank's own error, or how its process ended. One line."""
        self.log, self.log_lines = log, log_lines
        self.died = died
        """The process is gone: not an error of Python but a signal, a crash, or too little memory."""

    def __str__(self) -> str:
        what = "died" if self.died else "failed"
        return f"{self.name} rank {self.rank} {what} in {self.method}: {self.cause}"


def describe(error: BaseException) -> str:
    """The message for a run that ends by ``error``, several lines, without a traceback of the driver."""
    parts = [_headline(error), *getattr(error, "__notes__", ())]
    if isinstance(error, WorkerFailed):
        parts += _log_part(error)
    parts.append("The last checkpoint stays usable: the same command continues from it.")
    return "\n".join(parts)


def _headline(error: BaseException) -> str:
    if isinstance(error, WorkerFailed | TimeoutError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _log_part(error: WorkerFailed) -> list[str]:
    if not error.log_lines:
        return [f"It wrote nothing to {error.log}."]
    return [f"Last lines of {error.log}:", *(f"  | {line}" for line in error.log_lines)]
