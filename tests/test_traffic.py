"""What a sync moves, against numbers worked out apart (shared arithmetic of the design, table 3.2), in GiB per GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megarl.traffic import GIB, Setting, _assign, traffic_of, typical_settings
from megarl.weights.engine_layout import EngineLayout
from megarl.weights.megatron_layout import MegatronLayout
from megarl.weights.spec import ModelSpec

MODELS = Path(__file__).parents[1] / "configs/models"


@pytest.mark.parametrize(
    ("model", "trainer", "engine", "need", "straight"),
    [
        ("Qwen3-8B", MegatronLayout(tp=2, world_size=8), EngineLayout(2), 7.63, 0.00),
        ("Qwen3-8B", MegatronLayout(tp=4, pp=2, world_size=8), EngineLayout(2), 7.63, 6.67),
        ("Qwen3-8B", MegatronLayout(tp=4, pp=2, world_size=8), EngineLayout(8), 1.91, 1.67),
        ("Qwen3-30B-A3B", MegatronLayout(tp=4, ep=8, world_size=8), EngineLayout(8, True), 7.15, 0.28),
        ("Qwen3-30B-A3B", MegatronLayout(tp=4, ep=8, world_size=8), EngineLayout(8), 7.15, 6.19),
        ("Qwen3-30B-A3B", MegatronLayout(tp=2, pp=2, ep=4, world_size=8), EngineLayout(4, True), 14.24, 7.30),
    ],
)
def test_bytes_and_bounds_are_the_known_ones(
    model: str, trainer: MegatronLayout, engine: EngineLayout, need: float, straight: float
) -> None:
    found = traffic_of(Setting(model, ModelSpec.from_folder(MODELS / model), trainer, engine))
    assert found.need_bytes / GIB == pytest.approx(need, abs=0.02)
    assert found.straight_bytes / GIB == pytest.approx(straight, abs=0.02)
    assert found.colocated_bytes <= found.straight_bytes
    assert sorted(found.assignment) == sorted(rank % engine.tp for rank in range(trainer.world_size))


def test_the_assignment_is_the_best_of_all() -> None:
    common = np.array([[1, 9, 0], [9, 8, 0], [0, 9, 1]])
    assert _assign(common) == ((1, 0, 2), 19)
    assert _assign(np.array([[5, 0], [5, 0], [0, 5], [4, 0]])) == ((0, 0, 1, 1), 15)


def test_an_engine_larger_than_the_trainer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 trainer ranks must be a multiple of the engine's 3"):
        _assign(np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("model", "billions"),
    [("Qwen3-8B", 8.19), ("Qwen3-235B-A22B", 235.1), ("Mixtral-8x7B", 46.7), ("DeepSeek-V3", 671.0)],
)
def test_the_shipped_models_have_their_published_size(model: str, billions: float) -> None:
    assert ModelSpec.from_folder(MODELS / model).num_params / 1e9 == pytest.approx(billions, abs=0.05)


def test_every_typical_setting_fits_its_model() -> None:
    settings = list(typical_settings(MODELS))
    assert {setting.model for setting in settings} == {path.name for path in MODELS.iterdir()}
    for setting in settings:
        setting.trainer.check(setting.spec)
        setting.engine.check(setting.spec)
        assert setting.trainer.world_size % setting.engine.tp == 0
