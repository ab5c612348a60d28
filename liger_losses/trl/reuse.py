"""TRL's old log-probabilities, and the sampler's correction, from the training forward, in GRPO, RLOO and GMPO.

TRL runs the model without gradients after each generation, for the log-probabilities of the policy that was sampled.
Until the next optimizer step, they are those of the training forward, detached: here a batch gets them, and the ratios
to the sampler's probabilities, in its first loss. Later iterations over the same batch find them there, as TRL's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.caller import warn
from liger_losses.checks import see
from liger_losses.chunked.losses.policy_estimates import BOUNDS, LEVELS
from liger_losses.places import Found, Replaced
from liger_losses.trl.divergences import chosen

_FORWARD = "_get_per_token_logps_and_entropies"
_RATIO = "importance_sampling_ratio"
#: The optimizer steps that were done when a batch was generated, if its first loss computes the old log-probabilities.
_GENERATED = "liger_losses_generated_at"
#: TRL's modes of the sampler's correction.
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def _no_logps(model: nn.Module, ids: Tensor, mask: Tensor, logits_to_keep: int, *_: Any, **__: Any) -> Any:
    return torch.zeros(len(ids), logits_to_keep, dtype=torch.float32, device=ids.device), None, None


#: By the name of the old log-probabilities in a batch, the trainer's attributes with which TRL does not compute them.
WITHOUT: dict[str, dict[str, Any]] = {
    "old_per_token_logps": {"vllm_importance_sampling_correction": False, "num_iterations": 1},
    "old_logps": {_FORWARD: _no_logps},  # RLOO's only other forward is the reference's
}


def without_old_policy(name: str, method: Callable[..., Any], self: Any, inputs: Any) -> dict[str, Any]:
    """A trainer's ``_generate_and_score_completions``, without the forward for the old log-probabilities.

    Args:
        name: the batch's name of them: ``"old_per_token_logps"`` or ``"old_logps"``.
        method: TRL's.
        self, inputs: its arguments.

    Raises:
        ValueError: dropout would make the old log-probabilities others than the training forward's.
    """
    if not chosen.reuse_forward or _refuses(self, name):
        return method(self, inputs)
    _check_dropout(self.model)
    _generate_when_training_begins(self)
    batch = _with_attributes(self, WITHOUT[name], method, self, inputs)
    batch.pop(name, None)
    return batch | {_GENERATED: torch.tensor(self.state.global_step)}  # TRL splits tensors, and no numbers


def _generate_when_training_begins(trainer: Any) -> None:
    """Make ``train()`` begin with a generation where the last one failed between two batches of a generation.

    The second might lack its old log-probabilities, and later generations would not end where a step does.
    """
    from transformers import TrainerCallback

    def begin(args: Any, *_: Any, **__: Any) -> None:
        if trainer._step % args.steps_per_generation:
            trainer._step = 0

    if not getattr(trainer, "_liger_losses_generates_first", False):
        trainer._liger_losses_generates_first = True
        callback = TrainerCallback()
        vars(callback)["on_train_begin"] = begin  # which stays after disable(), as the batches do
        trainer.add_callback(callback)


def with_old_policy(name: str, method: Callable[..., Tensor], self: Any, model: nn.Module, inputs: Any) -> Tensor:
    """A trainer's ``_compute_loss``, whose forward gives a batch the old log-probabilities that it lacks.

    Raises:
        RuntimeError: an optimizer step has changed the model since the batch was generated.
    """
    if _GENERATED not in inputs or name in inputs:
        return method(self, model, inputs)
    if self.state.global_step != inputs[_GENERATED]:
        raise RuntimeError(
            f"enable(reuse_forward=True): a batch that was generated at optimizer step {int(inputs[_GENERATED])} has "
            f"its first loss at step {self.state.global_step}, with another policy. Let an optimizer step end where a "
            "generation's batches do, or call liger_losses.trl.disable() and enable(), without reuse_forward."
            + see("trl")
        )
    forward = functools.partial(_remember, getattr(self, _FORWARD), name, self, inputs)
    return _with_attributes(self, {_FORWARD: forward}, method, self, model, inputs)


def _with_attributes(trainer: Any, attributes: dict[str, Any], method: Callable[..., Any], *arguments: Any) -> Any:
    replaced = Replaced()
    replaced.add(Found(trainer, *attribute) for attribute in attributes.items())
    try:
        return method(*arguments)
    finally:
        replaced.restore()


def _refuses(trainer: Any, name: str) -> bool:
    """Whether TRL's forward runs, for reasons that are said once."""
    steps, accumulated = trainer.args.steps_per_generation, trainer.args.gradient_accumulation_steps
    reasons = []
    if accumulated % steps:
        reasons.append(f"gradient_accumulation_steps={accumulated} is no multiple of steps_per_generation={steps}")
    if name == "old_logps" and trainer.beta:
        reasons.append(f"beta={trainer.beta} adds log-probabilities to the rewards, before the loss")
    for method in ("_compute_loss", "_generate_and_score_completions"):
        if not getattr(type(trainer), method).__module__.startswith("trl."):
            reasons.append(f"{type(trainer).__name__} has a {method} that is not TRL's")
    mode = getattr(trainer, "vllm_importance_sampling_mode", MODES[0])
    if mode not in MODES:
        reasons.append(f"vllm_importance_sampling_mode={mode!r} is not known")
    if reasons and not getattr(trainer, "_liger_losses_said_forward", False):
        trainer._liger_losses_said_forward = True
        warn(
            f"enable(reuse_forward=True): this {type(trainer).__name__} runs TRL's forward for old log-probabilities: "
            f"{', '.join(reasons)}." + see("trl"),
        )
    return bool(reasons)


def _check_dropout(model: nn.Module) -> None:
    for name, module in model.named_modules() if model.training else ():
        is_dropout = "Dropout" in type(module).__name__
        for key, value in vars(module).items():
            random = "drop" in key or "jitter" in key or (key == "p" and is_dropout)
            is_rate = isinstance(value, (int, float)) and value is not True
            if random and module.training and is_rate and value > 0:
                raise ValueError(
                    f"enable(reuse_forward=True) needs a model without dropout, got {name}.{key}={value}: old "
                    "log-probabilities would have the training forward's masks. Pass disable_dropout=True to the "
                    "trainer's configuration, set options of the model's configuration such as attention_dropout and "
                    "LoraConfig's lora_dropout to 0, or leave reuse_forward out." + see("trl")
                )


def _remember(
    forward: Callable[..., Any], name: str, trainer: Any, batch: dict[str, Any], *args: Any, **options: Any
) -> Any:
    """``forward``, whose log-probabilities the batch keeps as the old ones, with the ratios to the sampler's."""
    outputs = forward(*args, **options)
    logps = outputs[0].detach()
    batch[name] = logps if name == "old_per_token_logps" else (logps * batch["completion_mask"]).sum(1)
    if trainer.use_vllm and getattr(trainer, "vllm_importance_sampling_correction", False):
        batch[_RATIO] = _ratio(trainer, batch)
        batches = trainer._buffered_inputs if trainer.model.training else [batch]
        if all(_RATIO in other for other in batches):
            _log(trainer, batches)
    return outputs


def _mask(batch: dict[str, Any]) -> Tensor:
    return batch["completion_mask"] * batch.get("tool_mask", 1)


def _ratio(trainer: Any, batch: dict[str, Any]) -> Tensor:
    """TRL's ratios to the sampler's probabilities, within bounds: ``[B, T]``, 1 for padding, or ``[B, 1]``."""
    level, bound = trainer.vllm_importance_sampling_mode.split("_")
    low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
    mask = _mask(batch)
    log_ratio = ((batch["old_per_token_logps"] - batch["sampling_per_token_logps"]) * mask).nan_to_num(nan=0.0)
    ratio = LEVELS[level](log_ratio, log_ratio.sum(-1, keepdim=True), mask.sum(-1, keepdim=True)).exp()
    return BOUNDS[bound](ratio, float("-inf") if low is None else low, float("inf") if high is None else high)


def _log(trainer: Any, batches: Iterable[dict[str, Any]]) -> None:
    """TRL's metrics of a generation: of its tokens, and of its sequences where the ratios are theirs."""
    by_token = trainer.vllm_importance_sampling_mode.startswith("token")
    masks = [(batch, _mask(batch).bool()) for batch in batches]
    delta = torch.cat([(b["old_per_token_logps"] - b["sampling_per_token_logps"]).abs()[mask] for b, mask in masks])
    ratios = torch.cat([b[_RATIO][mask] if by_token else b[_RATIO].flatten() for b, mask in masks])
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    for name, values, statistics in (
        ("sampling_logp_difference", delta[~delta.isnan()], ("mean", "max")),
        (_RATIO, ratios, ("min", "mean", "max")),
    ):
        for statistic in statistics:
            of = getattr(torch, statistic)
            here = of(values) if values.numel() else values.new_zeros(())
            metrics[f"sampling/{name}/{statistic}"].append(of(trainer.accelerator.gather(here)).item())
