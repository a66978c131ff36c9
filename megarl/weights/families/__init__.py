"""The model families megarl knows: for each, which HF tensors make which parameter. One short file per family."""

from megarl.weights.families.blocks import Family
from megarl.weights.families.deepseek_v3 import DEEPSEEK_V3
from megarl.weights.families.glm4_moe import GLM4_MOE
from megarl.weights.families.llama import LLAMA
from megarl.weights.families.mixtral import MIXTRAL
from megarl.weights.families.qwen2 import QWEN2
from megarl.weights.families.qwen3 import QWEN3
from megarl.weights.families.qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {
    family.name: family for family in (LLAMA, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL, GLM4_MOE, DEEPSEEK_V3)
}
"""By the ``model_type`` of config.json."""

__all__ = ["FAMILIES", "Family"]
