"""GLM-4.5: Qwen2's attention, in the large model with Qwen3's norms; dense layers, then experts and shared ones."""

from megarl.weights.families.blocks import Family, attention, dense_mlp, expert_bias, moe, shared_experts

_ATTENTION = attention(qkv_bias=True, qk_norm="qk_norm")
_EXPERTS = moe("mlp", gate="gate_proj", up="up_proj", down="down_proj", router_in_fp32=True)

GLM4_MOE = Family(
    "glm4_moe",
    dense=_ATTENTION + dense_mlp(),
    moe=(*_ATTENTION, *_EXPERTS, expert_bias(), *shared_experts()),
)
