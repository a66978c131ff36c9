"""Megatron's and vLLM's sharding written from its definition with numpy, sharing nothing with the planner."""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.weights.megatron_layout import MegatronLayout

Weights = dict[str, np.ndarray]


def megatron_shards(config: dict[str, Any], weights: Weights, layout: MegatronLayout, names: str) -> list[Weights]:
    """The parameters of every rank, found by counting through the grids instead of dividing."""
    shards: list[Weights] = []
    dense = [
        (tp, pp)
        for pp in range(layout.pp)
        for _dp in range(layout.world_size // (layout.tp * layout.cp * layout.pp))
        for _cp in range(layout.cp)
        for tp in range(layout.tp)
    ]
    expert = [
        (etp, ep)
        for pp in range(layout.pp)
        for _edp in range(layout.world_size // (layout.etp * layout.ep * layout.pp))
        for ep in range(layout.ep)
        for etp in range(layout.etp)
    ]
    for (tp, pp), (etp, ep) in zip(dense, expert, strict=True):
        shards.append({})
        chunks = _pipeline_chunks(config["num_hidden_layers"], layout)
        for number, layers in enumerate(chunks):
            if number % layout.pp == pp:
                prefix = f"model{number // layout.pp}." if layout.vpp > 1 else ""
                chunk = _ends(config, weights, layout, tp, number == 0, number == len(chunks) - 1)
                for local, layer in enumerate(layers):
                    inside = _layer(config, weights, f"model.layers.{layer}.", layout, (tp, etp, ep), names)
                    chunk |= {f"decoder.layers.{local}.{name}": value for name, value in inside.items()}
                shards[-1] |= {prefix + name: value for name, value in chunk.items()}
    return shards


def _pipeline_chunks(layers: int, layout: MegatronLayout) -> list[np.ndarray]:
    """The layers of every chunk in execution order; chunk c lies on stage c % PP."""
    if layout.pipeline_layout:
        assert "*" not in layout.pipeline_layout
        counts = [part.count("t") for part in layout.pipeline_layout.split("|")]
        return np.split(np.arange(layers), np.cumsum(counts)[:-1])
    if layout.first_stage_layers is None and layout.last_stage_layers is None:
        return np.split(np.arange(layers), layout.pp * layout.vpp)
    middle = layout.pp - (layout.first_stage_layers is not None) - (layout.last_stage_layers is not None)
    ends = (layout.first_stage_layers or 0) + (layout.last_stage_layers or 0)
    stages = [] if layout.first_stage_layers is None else [layout.first_stage_layers]
    stages += [(layers - ends) // middle] * middle if middle else []
    stages += [] if layout.last_stage_layers is None else [layout.last_stage_layers]
    counts = [count // layout.vpp for count in stages] * layout.vpp
    return np.split(np.arange(layers), np.cumsum(counts)[:-1])


def _ends(
    config: dict[str, Any], weights: Weights, layout: MegatronLayout, tp: int, is_first: bool, is_last: bool
) -> Weights:
    embedding, tied = weights["model.embed_tokens.weight"], config["tie_word_embeddings"]
    head = embedding if tied else weights["lm_head.weight"]
    params = {}
    if is_first:
        params["embedding.word_embeddings.weight"] = _padded(embedding, layout.vocab_multiple * layout.tp, layout.tp)[
            tp
        ]
    if is_last:
        params["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
    if is_last and not (tied and is_first):
        params["output_layer.weight"] = _padded(head, layout.vocab_multiple * layout.tp, layout.tp)[tp]
    return params


def _padded(table: np.ndarray, multiple: int, ways: int) -> list[np.ndarray]:
    missing = -len(table) % multiple
    return np.split(np.concatenate([table, np.zeros((missing, table.shape[1]), table.dtype)]), ways)


def _layer(
    config: dict[str, Any], weights: Weights, hf: str, layout: MegatronLayout, at: tuple[int, int, int], names: str
) -> Weights:
    tp, etp, ep = at
    te = names == "te"
    is_moe = hf + router_name(config) in weights
    mlp_norm = "mlp.linear_fc1.layer_norm_weight" if te and not is_moe else "pre_mlp_layernorm.weight"
    params = {
        mlp_norm: weights[hf + "post_attention_layernorm.weight"],
        "self_attention.linear_proj.weight": np.split(weights[hf + "self_attn.o_proj.weight"], layout.tp, axis=1)[tp],
    }
    params |= (_latent if "kv_lora_rank" in config else _grouped)(config, weights, hf, layout.tp, tp, te)
    if not is_moe:
        fc1, fc2 = _mlp([weights[hf + f"mlp.{x}_proj.weight"] for x in ("gate", "up", "down")], layout.tp, tp)
        return params | {"mlp.linear_fc1.weight": fc1, "mlp.linear_fc2.weight": fc2}
    block, parts = moe_names(config)
    params["mlp.router.weight"] = weights[f"{hf}{block}.gate.weight"]
    if "n_shared_experts" in config:
        params["mlp.router.expert_bias"] = weights[hf + "mlp.gate.e_score_correction_bias"]
        shared = [weights[f"{hf}mlp.shared_experts.{x}_proj.weight"] for x in ("gate", "up", "down")]
        fc1, fc2 = _mlp(shared, layout.tp, tp)
        params |= {"mlp.shared_experts.linear_fc1.weight": fc1, "mlp.shared_experts.linear_fc2.weight": fc2}
    owned = np.split(np.arange(num_experts(config)), layout.ep)[ep]
    for local, expert in enumerate(owned):
        tensors = [weights[f"{hf}{block}.experts.{expert}.{part}.weight"] for part in parts]
        for linear, value in zip(("linear_fc1", "linear_fc2"), _mlp(tensors, layout.etp, etp), strict=True):
            local_name = f"mlp.experts.local_experts.{local}.{linear}.weight"
            params[f"mlp.experts.{linear}.weight{local}" if te else local_name] = value
    return params


def _grouped(config: dict[str, Any], weights: Weights, hf: str, ways: int, tp: int, te: bool) -> Weights:
    input_norm = "self_attention.linear_qkv.layer_norm_weight" if te else "input_layernorm.weight"
    params = {input_norm: weights[hf + "input_layernorm.weight"]}
    for kind in ("weight", "bias"):
        if hf + f"self_attn.q_proj.{kind}" in weights:
            whole = _interleaved(config, [weights[hf + f"self_attn.{x}_proj.{kind}"] for x in "qkv"])
            params[f"self_attention.linear_qkv.{kind}"] = np.split(whole, ways)[tp]
    for letter in "qk":
        if hf + f"self_attn.{letter}_norm.weight" in weights:
            params[f"self_attention.{letter}_layernorm.weight"] = weights[hf + f"self_attn.{letter}_norm.weight"]
    return params


def _latent(config: dict[str, Any], weights: Weights, hf: str, ways: int, tp: int, te: bool) -> Weights:
    params = {"input_layernorm.weight": weights[hf + "input_layernorm.weight"]}
    for letter, down in (("q", "q_a_proj"), ("kv", "kv_a_proj_with_mqa")):
        params[f"self_attention.linear_{letter}_down_proj.weight"] = weights[f"{hf}self_attn.{down}.weight"]
        up = f"self_attention.linear_{letter}_up_proj"
        params[up + ".weight"] = np.split(weights[f"{hf}self_attn.{letter}_b_proj.weight"], ways)[tp]
        norm = up + ".layer_norm_weight" if te else f"self_attention.{letter}_layernorm.weight"
        params[norm] = weights[f"{hf}self_attn.{letter}_a_layernorm.weight"]
    return params


def _interleaved(config: dict[str, Any], qkv: list[np.ndarray]) -> np.ndarray:
    """Query group after query group: its query heads, its key head, its value head."""
    groups = config["num_key_value_heads"]
    grouped = [part.reshape(groups, len(part) // groups, *part.shape[1:]) for part in qkv]
    whole = np.concatenate(grouped, axis=1)
    return whole.reshape(-1, *whole.shape[2:])


def _mlp(gate_up_down: list[np.ndarray], ways: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    gate, up, down = gate_up_down
    fc1 = np.concatenate([np.split(gate, ways)[rank], np.split(up, ways)[rank]])
    return fc1, np.split(down, ways, axis=1)[rank]


def moe_names(config: dict[str, Any]) -> tuple[str, tuple[str, str, str]]:
    """The MoE block's name and those of gate, up and down."""
    if config["model_type"] == "mixtral":
        return "block_sparse_moe", ("w1", "w3", "w2")
    return "mlp", ("gate_proj", "up_proj", "down_proj")


def router_name(config: dict[str, Any]) -> str:
    """Of a layer with experts, below its prefix."""
    return moe_names(config)[0] + ".gate.weight"


def num_experts(config: dict[str, Any]) -> int:
    return config.get("num_experts") or config.get("n_routed_experts") or config["num_local_experts"]


def engine_shards(
    config: dict[str, Any], weights: Weights, tp: int, expert_parallel: bool, placement: str = "linear"
) -> list[Weights]:
    """The parameters of every vLLM rank in its checkpoint layout."""
    experts = np.arange(num_experts(config)) if "num_experts_per_tok" in config else np.arange(0)
    owned = [experts] * tp
    if expert_parallel:
        owned = np.array_split(experts, tp) if placement == "linear" else [experts[rank::tp] for rank in range(tp)]
    return [_engine_rank(config, weights, tp, rank, list(owned[rank]), expert_parallel) for rank in range(tp)]


def _engine_rank(
    config: dict[str, Any], weights: Weights, tp: int, rank: int, owned: list[int], expert_parallel: bool
) -> Weights:
    params = {
        "model.embed_tokens.weight": _padded(weights["model.embed_tokens.weight"], 64, tp)[rank],
        "model.norm.weight": weights["model.norm.weight"],
    }
    if not config["tie_word_embeddings"]:
        params["lm_head.weight"] = _padded(weights["lm_head.weight"], 64, tp)[rank]
    for layer in range(config["num_hidden_layers"]):
        hf = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            if f"{hf}{norm}.weight" in weights:
                params[f"{hf}{norm}.weight"] = weights[f"{hf}{norm}.weight"]
        if "kv_lora_rank" in config:
            params |= _engine_latent(weights, hf, tp, rank)
        for kind in ("weight", "bias"):
            if f"{hf}self_attn.q_proj.{kind}" in weights:
                q, k, v = (weights[f"{hf}self_attn.{x}_proj.{kind}"] for x in "qkv")
                parts = [np.split(q, tp)[rank], _kv(config, k, tp)[rank], _kv(config, v, tp)[rank]]
                params[f"{hf}self_attn.qkv_proj.{kind}"] = np.concatenate(parts)
        params[hf + "self_attn.o_proj.weight"] = np.split(weights[hf + "self_attn.o_proj.weight"], tp, axis=1)[rank]
        params |= _engine_mlp(config, weights, hf, tp, rank, owned, expert_parallel)
    return params


def _engine_latent(weights: Weights, hf: str, tp: int, rank: int) -> Weights:
    down = [weights[f"{hf}self_attn.{name}.weight"] for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    params = {f"{hf}self_attn.fused_qkv_a_proj.weight": np.concatenate(down)}
    for letter in ("q", "kv"):
        up, norm = f"{hf}self_attn.{letter}_b_proj.weight", f"{hf}self_attn.{letter}_a_layernorm.weight"
        params |= {up: np.split(weights[up], tp)[rank], norm: weights[norm]}
    return params


def _kv(config: dict[str, Any], part: np.ndarray, tp: int) -> list[np.ndarray]:
    """Heads spread over the ranks; each given to several ranks when there are more ranks than heads."""
    heads = part.reshape(config["num_key_value_heads"], -1, *part.shape[1:])
    repeated = np.repeat(heads, max(1, tp // len(heads)), axis=0)
    return [share.reshape(-1, *part.shape[1:]) for share in np.split(repeated, tp)]


def _engine_mlp(
    config: dict[str, Any], weights: Weights, hf: str, tp: int, rank: int, owned: list[int], expert_parallel: bool
) -> Weights:
    if hf + router_name(config) not in weights:
        return _engine_swiglu(weights, hf + "mlp.", tp, rank)
    block, parts = moe_names(config)
    ways, share = (1, 0) if expert_parallel else (tp, rank)
    pairs = [
        _mlp([weights[f"{hf}{block}.experts.{expert}.{part}.weight"] for part in parts], ways, share)
        for expert in owned
    ]
    params = {
        f"{hf}{block}.gate.weight": weights[f"{hf}{block}.gate.weight"],
        f"{hf}{block}.experts.routed_experts.w13_weight": np.stack([fc1 for fc1, _ in pairs]),
        f"{hf}{block}.experts.routed_experts.w2_weight": np.stack([fc2 for _, fc2 in pairs]),
    }
    if "n_shared_experts" in config:
        bias = hf + "mlp.gate.e_score_correction_bias"
        params |= {bias: weights[bias]} | _engine_swiglu(weights, hf + "mlp.shared_experts.", tp, rank)
    return params


def _engine_swiglu(weights: Weights, prefix: str, tp: int, rank: int) -> Weights:
    fc1, fc2 = _mlp([weights[f"{prefix}{x}_proj.weight"] for x in ("gate", "up", "down")], tp, rank)
    return {prefix + "gate_up_proj.weight": fc1, prefix + "down_proj.weight": fc2}
