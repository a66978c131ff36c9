"""The environment of every test process, set before torch and the frameworks are imported."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.update(
    OMP_NUM_THREADS="1",
    OMP_WAIT_POLICY="passive",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    DO_NOT_TRACK="1",
    RAY_USAGE_STATS_ENABLED="0",
    MLFLOW_DISABLE_TELEMETRY="true",
    MPLBACKEND="Agg",
)

settings.register_profile("megarl", deadline=None, print_blob=True)
settings.load_profile("megarl")
