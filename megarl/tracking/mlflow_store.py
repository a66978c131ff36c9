"""Where MLflow keeps its records: a local sqlite file by default, or any tracking URI."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import uuid
from pathlib import Path
from typing import Any

from megarl.config import MlflowConfig
from megarl.tracking.record import without_password

_SQLITE = "sqlite:///"
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""Read by MLflow when it is imported or called; what the user has set stays."""


def store_uri(config: MlflowConfig, output: Path) -> str:
    """The URI of the config, or of the sqlite file beside the runs below ``output``."""
    return config.uri or store_uri_below(output)


def store_uri_below(output: Path) -> str:
    """The URI of the sqlite file that runs below ``output`` share."""
    return f"{_SQLITE}{(output / 'mlflow.db').resolve()}"


def sqlite_file(uri: str) -> Path | None:
    """The file of a sqlite URI; None for anything else."""
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def open_command(uri: str) -> str:
    """The command, or for a server the address, that shows the records."""
    if sqlite_file(uri) is None:
        return without_password(uri)
    return f"mlflow ui --backend-store-uri {shlex.quote(uri)}"


def connect(uri: str) -> Any:
    """An ``MlflowClient``; makes the sqlite file, whole or not at all, when it is missing.

    Raises whatever MLflow raises, at the latest after its time limits.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    file = sqlite_file(uri)
    if file is not None and not file.exists():
        _make_store(file, MlflowClient)
    return MlflowClient(tracking_uri=uri)


def experiment_id(client: Any, uri: str, name: str) -> str:
    """The experiment called ``name``, made when missing; artifacts of a sqlite store lie beside it."""
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    file = sqlite_file(uri)
    location = None if file is None else (file.parent / "mlflow-artifacts").resolve().as_uri()
    return str(client.create_experiment(name, artifact_location=location))


def _make_store(file: Path, client: Any) -> None:
    """Migrate a new database under another name: a process killed half-way leaves nothing that looks ready."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        client(tracking_uri=f"{_SQLITE}{scratch}").search_experiments(max_results=1)
        with contextlib.suppress(FileExistsError):  # another run was faster; its store is as good
            os.link(scratch, file)
    finally:
        scratch.unlink(missing_ok=True)
