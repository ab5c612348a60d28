"""TRL's GRPOTrainer with this library's loss head and kernels, which ``enable()`` installs.

The reward is the share of a completion's words that begin with the letter s, as in ``grpo.py``. Prints the loss and the
mean reward of every step, and the mean reward of the first and of the last steps.

    python examples/trl_grpo.py
"""

from __future__ import annotations

import argparse
import pathlib
import time

import torch
from datasets import Dataset
from grpo import PROMPTS, reward
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_dpo import BUNDLED, prepare_model

from liger_losses.trl import enable


class ShowSteps(TrainerCallback):
    """Prints some of what the trainer logs of every step."""

    def __init__(self, *names):
        self.names = names

    def on_log(self, args, state, control, logs=None, **_):
        if logs and "loss" in logs:
            values = "  ".join(f"{name} {float(logs[name]):+.4f}" for name in self.names)
            print(f"step {state.global_step:3}  {values}", flush=True)


def rule(completions, **_):
    """The reward of each completion, a list of messages."""
    return [reward(messages[0]["content"]) for messages in completions]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUNDLED)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--group", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--output", default="runs/trl_grpo")
    args = parser.parse_args()

    gpu = torch.cuda.is_available()
    # All that is needed: trainers that are built from here on have this library's head, and their models its kernels.
    # On a CPU the kernels' reference implementations would run, which are no faster.
    enable(kernels=gpu)

    path = prepare_model(args.model, pathlib.Path(args.output) / "start")
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        reward_funcs=rule,
        args=GRPOConfig(
            output_dir=args.output,
            max_steps=args.steps,
            per_device_train_batch_size=args.group * len(PROMPTS),
            num_generations=args.group,
            max_completion_length=args.new_tokens,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            bf16=gpu,
            dataloader_pin_memory=gpu,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for prompt in PROMPTS]}),
        processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
        callbacks=[ShowSteps("loss", "reward", "entropy")],
    )
    trainer.remove_callback(PrinterCallback)  # which shows everything
    start = time.perf_counter()
    trainer.train()

    rewards = [row["reward"] for row in trainer.state.log_history if "loss" in row]
    first, last = (sum(part) / len(part) for part in (rewards[:3], rewards[-3:]))
    seconds = time.perf_counter() - start
    print(f"mean reward of the first three steps {first:.3f}, of the last three {last:.3f}; {seconds:.0f} s")


if __name__ == "__main__":
    main()
