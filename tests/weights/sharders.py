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
        chunks = np.split(np.arange(config["num_hidden_layers"]), layout.pp * layout.vpp)
        for number, layers in enumerate(chunks):
            if number % layout.pp == pp:
                prefix = f"model{number // layout.pp}." if layout.vpp > 1 else ""
                chunk = _ends(config, weights, layout, tp, number == 0, number == len(chunks) - 1)
                for local, layer in enumerate(layers):
                    inside = _layer(config, weights, f"model.layers.{layer}.", layout, (tp, etp, ep), names)
                    chunk |= {f"decoder.layers.{local}.{name}": value for name, value in inside.items()}
                shards[-1] |= {prefix + name: value for name, value in chunk.items()}
    return shards


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
    moe = "num_experts_per_tok" in config
    input_norm = "self_attention.linear_qkv.layer_norm_weight" if te else "input_layernorm.weight"
    mlp_norm = "mlp.linear_fc1.layer_norm_weight" if te and not moe else "pre_mlp_layernorm.weight"
    params = {
        input_norm: weights[hf + "input_layernorm.weight"],
        mlp_norm: weights[hf + "post_attention_layernorm.weight"],
        "self_attention.linear_proj.weight": np.split(weights[hf + "self_attn.o_proj.weight"], layout.tp, axis=1)[tp],
    }
    for kind in ("weight", "bias"):
        if hf + f"self_attn.q_proj.{kind}" in weights:
            whole = _interleaved(config, [weights[hf + f"self_attn.{x}_proj.{kind}"] for x in "qkv"])
            params[f"self_attention.linear_qkv.{kind}"] = np.split(whole, layout.tp)[tp]
    if config["model_type"].startswith("qwen3"):
        params["self_attention.q_layernorm.weight"] = weights[hf + "self_attn.q_norm.weight"]
        params["self_attention.k_layernorm.weight"] = weights[hf + "self_attn.k_norm.weight"]
    if not moe:
        fc1, fc2 = _mlp([weights[hf + f"mlp.{x}_proj.weight"] for x in ("gate", "up", "down")], layout.tp, tp)
        return params | {"mlp.linear_fc1.weight": fc1, "mlp.linear_fc2.weight": fc2}
    block, parts = moe_names(config)
    params["mlp.router.weight"] = weights[f"{hf}{block}.gate.weight"]
    owned = np.split(np.arange(num_experts(config)), layout.ep)[ep]
    for local, expert in enumerate(owned):
        tensors = [weights[f"{hf}{block}.experts.{expert}.{part}.weight"] for part in parts]
        for linear, value in zip(("linear_fc1", "linear_fc2"), _mlp(tensors, layout.etp, etp), strict=True):
            local_name = f"mlp.experts.local_experts.{local}.{linear}.weight"
            params[f"mlp.experts.{linear}.weight{local}" if te else local_name] = value
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


def num_experts(config: dict[str, Any]) -> int:
    return config.get("num_experts") or config["num_local_experts"]


def engine_shards(config: dict[str, Any], weights: Weights, tp: int, expert_parallel: bool) -> list[Weights]:
    """The parameters of every vLLM rank in its checkpoint layout."""
    return [_engine_rank(config, weights, tp, rank, expert_parallel) for rank in range(tp)]


def _engine_rank(config: dict[str, Any], weights: Weights, tp: int, rank: int, expert_parallel: bool) -> Weights:
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
        for kind in ("weight", "bias"):
            if f"{hf}self_attn.q_proj.{kind}" in weights:
                q, k, v = (weights[f"{hf}self_attn.{x}_proj.{kind}"] for x in "qkv")
                parts = [np.split(q, tp)[rank], _kv(config, k, tp)[rank], _kv(config, v, tp)[rank]]
                params[f"{hf}self_attn.qkv_proj.{kind}"] = np.concatenate(parts)
        params[hf + "self_attn.o_proj.weight"] = np.split(weights[hf + "self_attn.o_proj.weight"], tp, axis=1)[rank]
        params |= _engine_mlp(config, weights, hf, tp, rank, expert_parallel)
    return params


def _kv(config: dict[str, Any], part: np.ndarray, tp: int) -> list[np.ndarray]:
    """Heads spread over the ranks; each given to several ranks when there are more ranks than heads."""
    heads = part.reshape(config["num_key_value_heads"], -1, *part.shape[1:])
    repeated = np.repeat(heads, max(1, tp // len(heads)), axis=0)
    return [share.reshape(-1, *part.shape[1:]) for share in np.split(repeated, tp)]


def _engine_mlp(
    config: dict[str, Any], weights: Weights, hf: str, tp: int, rank: int, expert_parallel: bool
) -> Weights:
    if "num_experts_per_tok" not in config:
        fc1, fc2 = _mlp([weights[hf + f"mlp.{x}_proj.weight"] for x in ("gate", "up", "down")], tp, rank)
        return {hf + "mlp.gate_up_proj.weight": fc1, hf + "mlp.down_proj.weight": fc2}
    block, parts = moe_names(config)
    experts = np.arange(num_experts(config))
    owned = np.array_split(experts, tp)[rank] if expert_parallel else experts
    ways, share = (1, 0) if expert_parallel else (tp, rank)
    pairs = [
        _mlp([weights[f"{hf}{block}.experts.{expert}.{part}.weight"] for part in parts], ways, share)
        for expert in owned
    ]
    return {
        f"{hf}{block}.gate.weight": weights[f"{hf}{block}.gate.weight"],
        f"{hf}{block}.experts.routed_experts.w13_weight": np.stack([fc1 for fc1, _ in pairs]),
        f"{hf}{block}.experts.routed_experts.w2_weight": np.stack([fc2 for _, fc2 in pairs]),
    }
