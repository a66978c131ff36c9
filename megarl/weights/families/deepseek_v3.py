"""DeepSeek-V3: latent attention; dense layers first, then experts and shared ones."""

from megarl.weights.families.blocks import Family, dense_mlp, expert_bias, latent_attention, moe, shared_experts

_EXPERTS = moe("mlp", gate="gate_proj", up="up_proj", down="down_proj")

DEEPSEEK_V3 = Family(
    "deepseek_v3",
    dense=latent_attention() + dense_mlp(),
    moe=(*latent_attention(), *_EXPERTS, expert_bias(), *shared_experts()),
)
