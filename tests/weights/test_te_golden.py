"""What ci/record_te_layouts.py saw in models built of Transformer Engine's modules, against what we say they hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.weights.megatron_layout import MegatronLayout, megatron_params
from megarl.weights.spec import ModelSpec
from tests.weights.models import CONFIGS

_GOLDEN = Path(__file__).parent / "golden"


def _recorded() -> Iterator[Any]:
    for path in sorted(_GOLDEN.glob("te-*.json")):
        golden = json.loads(path.read_text())
        for layout in golden["layouts"]:
            sizes = " ".join(f"{key}={size}" for key, size in layout["sizes"].items())
            yield pytest.param(golden["config"], layout, id=f"{path.stem.removeprefix('te-')}: {sizes or 'one rank'}")


@pytest.mark.parametrize(("config", "recorded"), list(_recorded()))
def test_names_and_shapes_of_every_rank_are_transformer_engines(
    config: dict[str, Any], recorded: dict[str, Any]
) -> None:
    spec, layout = ModelSpec.from_hf(config), MegatronLayout(**recorded["sizes"])
    told = {rank: share["tensors"] for share in recorded["shares"] for rank in share["ranks"]}
    assert sorted(told) == list(range(layout.world_size))
    for rank, tensors in told.items():
        ours = {name: list(shard.shape) for name, shard in megatron_params(spec, layout, rank, names="te").items()}
        assert ours == tensors, f"rank {rank}"


def test_every_model_is_recorded() -> None:
    assert {path.stem for path in _GOLDEN.glob("te-*.json")} == {f"te-{model}" for model in CONFIGS}
