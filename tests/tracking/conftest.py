from __future__ import annotations

import pytest

from megarl.tracking.mlflow_store import connect, store_uri_below


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URI of a real sqlite store; its migrations take seconds, so all tests share it."""
    uri = store_uri_below(tmp_path_factory.mktemp("store"))
    connect(uri)
    return uri
