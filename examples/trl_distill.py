"""TRL's DistillationTrainer with this library's loss head and kernels, which ``enable()`` installs.

The student is a shallow copy of the teacher, as in ``distill.py``, and learns on completions that it samples. Prints
the loss of every step, and the perplexity of held-out text before and after training.

    python examples/trl_distill.py
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time

import torch
from datasets import Dataset
from distill import perplexity, shallow_copy_of
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import DistillationConfig, DistillationTrainer
from trl_dpo import BUNDLED, HERE, prepare_model
from trl_grpo import ShowSteps

from liger_losses.trl import enable

HELD_OUT = 16


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUNDLED)
    parser.add_argument("--dataset", default=str(HERE / "data" / "preferences.jsonl"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument(
        "--beta", type=float, default=0.0, help="0: KL(teacher, student); 1: KL(student, teacher); between: JSD"
    )
    parser.add_argument("--output", default="runs/trl_distill")
    args = parser.parse_args()

    gpu = torch.cuda.is_available()
    # The one change: trainers that are built from here on use this library's head, and on a GPU their models use its
    # kernels. On a CPU the kernels' reference implementations are no faster.
    enable(kernels=gpu)

    path = prepare_model(args.model, pathlib.Path(args.output) / "start")
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    teacher = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    pairs = [json.loads(line) for line in pathlib.Path(args.dataset).read_text(encoding="utf-8").splitlines()]
    texts = [tokenizer.apply_chat_template([*pair["prompt"], *pair["chosen"]], tokenize=False) for pair in pairs]
    held_out = [torch.tensor(tokenizer(text).input_ids[:128]) for text in texts[-HELD_OUT:]]
    trainer = DistillationTrainer(
        model=shallow_copy_of(teacher, args.layers),
        teacher_model=teacher,
        args=DistillationConfig(
            output_dir=args.output,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            max_completion_length=args.new_tokens,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant",
            beta=args.beta,
            gradient_checkpointing=False,
            bf16=gpu,
            dataloader_pin_memory=gpu,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": pair["prompt"]} for pair in pairs[:-HELD_OUT]]),
        processing_class=tokenizer,
        callbacks=[ShowSteps("loss", "entropy")],
    )
    trainer.remove_callback(PrinterCallback)  # which shows everything
    device = trainer.accelerator.device
    before, start = perplexity(trainer.model, held_out, device), time.perf_counter()
    trainer.train()
    seconds, after = time.perf_counter() - start, perplexity(trainer.model, held_out, device)
    print(f"student's perplexity of held-out text: {before:.1f} before, {after:.1f} after; {seconds:.0f} s")


if __name__ == "__main__":
    main()
