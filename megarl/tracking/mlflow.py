"""Experiment tracking with MLflow, out of the way of the run.

``MlflowTracker`` is what the run sees: it turns each call into one action for a background thread and returns. ``_Run``
is what the thread works on: plain calls of MLflow's client, which may be slow and may raise. Between them stands the
boundary: a failure is warned of once and counted, and costs the run nothing but that record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megarl.config import TrackingConfig
from megarl.tracking.background import Background
from megarl.tracking.boundary import Boundary
from megarl.tracking.local import CONFIG_FILE, ENVIRONMENT_FILE
from megarl.tracking.mlflow_names import (
    MAX_PARAMS_PER_BATCH,
    MAX_TAG,
    accepted_name,
    accepted_number,
    accepted_value,
)
from megarl.tracking.mlflow_store import connect, experiment_id
from megarl.tracking.record import RunRecord, flatten
from megarl.tracking.rollouts import rollout_rows
from megarl.types import TrajectoryGroup

_LOG = logging.getLogger(__name__)

CAPACITY = 1000
"""Records that may wait for a slow server; about 300 steps."""
DEADLINE_S = {"FINISHED": 30.0, "FAILED": 5.0, "KILLED": 5.0}
"""How long the end of a run waits for the records that are still on their way."""
STEPS_PER_TABLE = 100
"""MLflow rewrites a table whenever rows are added, so a long run has several."""


class MlflowTracker:
    """Records a run in MLflow; ``run_id`` is empty until the store has answered.

    Args:
        record: becomes parameters, tags and artifacts.
        config: the section ``tracking``.
        uri: see ``mlflow_store.store_uri``.
        run_id: of the run to go on with.
    """

    def __init__(self, record: RunRecord, config: TrackingConfig, *, uri: str, run_id: str = "") -> None:
        self._config = config
        self._boundary = Boundary("MLflow")
        self._run = _Run(uri, config.mlflow.experiment, record.name, run_id)
        self._background = Background(self._boundary, capacity=CAPACITY)
        self._background.submit(partial(self._run.describe, record))

    @property
    def run_id(self) -> str:
        """MLflow's id of this run."""
        return self._run.run_id

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Send all metrics of one step as one batch."""
        self._background.submit(partial(self._run.metrics, dict(metrics), step, _now_ms()))

    def log_rollouts(self, groups: Sequence[TrajectoryGroup], *, step: int) -> None:
        """Add the rollouts to the table that holds this step, when rollouts are due."""
        rows = rollout_rows(groups, step=step, config=self._config)
        if rows:
            self._background.submit(partial(self._run.table, rows, step))

    def log_file(self, path: Path) -> None:
        """Copy a file to the run's artifacts."""
        self._background.submit(partial(self._run.file, path))

    def close(self, status: str) -> None:
        """End the run as ``status``; waits at most ``DEADLINE_S`` for what is still on its way."""
        self._background.submit(partial(self._run.end, status))
        self._background.close(deadline_s=DEADLINE_S[status])
        self._boundary.summarise()


class _Run:
    """One run in the store. Opened by whatever is recorded first after the store can be reached."""

    def __init__(self, uri: str, experiment: str, name: str, run_id: str) -> None:
        self.run_id = run_id
        self._uri, self._experiment, self._name = uri, experiment, name
        self._client: Any = None

    def describe(self, record: RunRecord) -> None:
        """Parameters, tags, and the config and environment as files."""
        client = self._open()
        tags = {"megarl.git_commit": record.commit, "mlflow.source.git.commit": record.commit}
        tags |= {accepted_name(f"version.{name}"): version for name, version in record.versions.items()}
        tags |= self._parameters({accepted_name(k): accepted_value(v) for k, v in flatten(record.config).items()})
        for key, value in tags.items():
            client.set_tag(self.run_id, key, accepted_value(value, MAX_TAG))
        client.log_text(self.run_id, record.config_yaml(), CONFIG_FILE)
        client.log_text(self.run_id, record.environment_text(), ENVIRONMENT_FILE)

    def _parameters(self, wanted: dict[str, str]) -> dict[str, str]:
        """Log what is new. A parameter cannot change, so what a resumed run changed is returned as a tag."""
        from mlflow.entities import Param

        known = self._client.get_run(self.run_id).data.params
        new = [Param(key, value) for key, value in wanted.items() if key not in known]
        for start in range(0, len(new), MAX_PARAMS_PER_BATCH):
            self._client.log_batch(self.run_id, params=new[start : start + MAX_PARAMS_PER_BATCH])
        changed = [f"{k}: {known[k]} -> {v}" for k, v in wanted.items() if k in known and known[k] != v]
        return {"megarl.changed_when_resumed": "\n".join(changed)} if changed else {}

    def metrics(self, metrics: dict[str, float], step: int, timestamp_ms: int) -> None:
        """One batch."""
        from mlflow.entities import Metric

        batch = [Metric(accepted_name(k), accepted_number(v), timestamp_ms, step) for k, v in metrics.items()]
        self._open().log_batch(self.run_id, metrics=batch)

    def table(self, rows: Sequence[dict[str, Any]], step: int) -> None:
        """Add rows to the table of this step's hundred."""
        first = (step - 1) // STEPS_PER_TABLE * STEPS_PER_TABLE + 1
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        name = f"rollouts/steps_{first:06d}-{first + STEPS_PER_TABLE - 1:06d}.json"
        self._open().log_table(self.run_id, columns, name)

    def file(self, path: Path) -> None:
        """One artifact."""
        self._open().log_artifact(self.run_id, str(path))

    def end(self, status: str) -> None:
        """Set the final status."""
        self._open().set_terminated(self.run_id, status)

    def _open(self) -> Any:
        if self._client is None:
            client = connect(self._uri)
            self.run_id = self._resumed(client) or self._started(client)
            self._client = client
        return self._client

    def _resumed(self, client: Any) -> str:
        """The id of the run to go on with; empty when there is none, with a warning if there should be one."""
        from mlflow.exceptions import MlflowException

        if not self.run_id:
            return ""
        try:
            client.update_run(self.run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "INVALID_STATE"):
                raise
            _LOG.warning("MLflow: run %s cannot be continued (%s); a new run is started", self.run_id, error.message)
            return ""
        return self.run_id

    def _started(self, client: Any) -> str:
        experiment = experiment_id(client, self._uri, self._experiment)
        return str(client.create_run(experiment, run_name=self._name).info.run_id)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
