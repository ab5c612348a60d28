"""TRL's trainers, whose own ``compute_loss`` benchmarks differentiate. Nothing is generated, and no reference runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import IGNORED


def trainer_of(task: str, model: Any, reference: Any, folder: str, length: int, **others: Any) -> Any:
    """The trainer of ``"NLL"`` (SFT), ``"DPO"`` or ``"GRPO"``. Its data set and its rewards are never read.

    Args:
        task: which trainer.
        model: the trained model, with gradient checkpointing set as it is to be.
        reference: DPO's, of any size: its log-probabilities are among the inputs.
        folder: where the trainer may write.
        length: the most tokens of a completion.
        others: of GRPO's configuration.
    """
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    options: dict[str, Any] = {
        "bf16": model.dtype == torch.float32,
        "gradient_checkpointing": False,
        "report_to": "none",
    }
    options |= {"output_dir": folder, "per_device_train_batch_size": 2, "use_cpu": not torch.cuda.is_available()}
    given: dict[str, Any] = {"processing_class": tokenizer}
    if task == "NLL":
        rows: list[dict[str, Any]] = [{"input_ids": [1, 1], "labels": [1, 1]}]
        args: Any = trl.SFTConfig(**options, max_length=None, dataset_kwargs={"skip_prepare_dataset": True})
        trainer = trl.SFTTrainer(model, args=args, train_dataset=Dataset.from_list(rows), **given)
    elif task == "DPO":
        rows = [{"prompt": "<eos>", "chosen": "<eos>", "rejected": "<eos>"}]
        args = trl.DPOConfig(**options)
        trainer = trl.DPOTrainer(model, reference, args=args, train_dataset=Dataset.from_list(rows), **given)
        trainer.precompute_ref_logps = True
    else:
        args = trl.GRPOConfig(**{**options, "num_generations": 2, "max_completion_length": length, **others})
        rows = [{"prompt": "<eos>"}] * 2
        rewards = lambda completions, **_: [0.0] * len(completions)  # noqa: E731
        trainer = trl.GRPOTrainer(model, rewards, args=args, train_dataset=Dataset.from_list(rows), **given)
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def inputs_of(task: str, ids: Tensor, labels: Tensor, vocab_size: int) -> dict[str, Any]:
    """What the trainer's collator makes of ``[B, T]`` tokens and labels; all sequences have prompts of one length.

    DPO's reference gives each token 1.01 times the log-probability of the uniform distribution.
    """
    mask, everywhere = (labels != IGNORED).long(), torch.ones_like(ids)
    if task == "NLL":
        return {"input_ids": ids, "attention_mask": everywhere, "labels": labels}
    if task == "DPO":
        chosen, rejected = (-1.01 * math.log(vocab_size) * mask[:, 1:].sum(-1)).chunk(2)
        inputs = {"input_ids": ids, "attention_mask": everywhere, "completion_mask": mask}
        return {**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    prompt = int((mask[0] == 0).sum())
    inputs = {"prompt_ids": ids[:, :prompt], "prompt_mask": everywhere[:, :prompt]}
    inputs |= {"completion_ids": ids[:, prompt:], "completion_mask": mask[:, prompt:]}
    advantages = torch.linspace(-1, 1, len(ids), device=ids.device)
    return {**inputs, "advantages": advantages, "num_items_in_batch": mask.sum()}


def add_plain_head(model: nn.Module, forward: Callable[..., Any]) -> None:
    """In place of TRL's head, log-probabilities of all logits; what is only a metric is 0.

    Args:
        model: a model whose forward the trainer has replaced.
        forward: the model's forward before.
    """
    from trl.trainer.utils import FusedCausalLMOutput

    def fused_forward(*, labels: Tensor, fused_lm_head: bool, **inputs: Any) -> Any:
        target = labels[:, 1:]
        mask, logits = target != IGNORED, forward(**inputs).logits[:, :-1]
        logps = logits.float().log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0] * mask
        zeros = torch.zeros_like(logps.detach())
        metrics = {"entropy": zeros, "mean_logits": zeros, "is_top1": zeros.bool()}
        return FusedCausalLMOutput(loss=None, log_probs=logps, label_mask=mask, aux_loss=None, **metrics)

    model.forward = fused_forward
