"""Megatron's distributed optimizer, its schedule, and the Adam it runs on a machine without CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import megatron.core.optimizer.distrib_optimizer as distributed_optimizer
import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl.config import OptimizerConfig as OptimizerSection


class GroupStepAdam(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) that counts steps per parameter group.

    ``w <- w (1 - lr wd) - lr m_hat / (sqrt(v_hat) + eps)``. Transformer Engine's and apex's FusedAdam keep ``step``
    in the group too, and that is the form the distributed optimizer saves and loads.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(params, group)

    def _update(self, params: list[torch.Tensor], group: dict[str, Any]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param] = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
        grads = [p.grad for p in params if p.grad is not None]
        means = [self.state[p]["exp_avg"] for p in params]
        squares = [self.state[p]["exp_avg_sq"] for p in params]
        beta1, beta2 = group["betas"]
        correction1, correction2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, correction2**0.5)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(params, means, denominators, -group["lr"] / correction1)


def _use_group_step_adam() -> None:
    """Where neither Transformer Engine nor apex gave Megatron a FusedAdam, give it ours."""
    if distributed_optimizer.USING_TE_OPTIMIZER or distributed_optimizer.USING_APEX_OPTIMIZER:
        return
    megatron_optimizer.Adam = GroupStepAdam
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed_optimizer.Adam = GroupStepAdam
    distributed_optimizer.HAVE_APEX_OR_TE = True
    distributed_optimizer.USING_APEX_OPTIMIZER = True


def build_optimizer(
    chunks: Sequence[torch.nn.Module], section: OptimizerSection, *, bf16: bool, max_steps: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """The distributed optimizer of one rank and its learning-rate schedule, counted in optimizer steps."""
    _use_group_step_adam()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=section.lr,
            min_lr=section.min_lr,
            weight_decay=section.weight_decay,
            adam_beta1=section.beta1,
            adam_beta2=section.beta2,
            adam_eps=section.eps,
            clip_grad=section.clip_grad,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=True,
        ),
        list(chunks),
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=section.lr,
        min_lr=section.lr if section.decay == "constant" else section.min_lr,
        lr_warmup_steps=section.warmup_steps,
        lr_decay_steps=max(max_steps, section.warmup_steps + 1),
        lr_decay_style=section.decay,
        start_wd=section.weight_decay,
        end_wd=section.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        override_opt_param_scheduler=True,  # a resumed run follows its own config
        use_checkpoint_opt_param_scheduler=False,
    )
    return optimizer, scheduler
