"""On-policy distillation: a small student learns from a larger teacher on text that the student samples. A plain loop.

Both models are trained on the texts in data/ first (models of single bytes, half a minute on two cores), so that
nothing is downloaded: the teacher has four layers, the student one. In each step, the student writes and the teacher
reads the student's text. The loss needs only the teacher's hidden states and head: the logits of neither model are in
memory. Prints a line per step and the perplexity of held-out text before and after training, and saves a plot of both
losses.

    python examples/on_policy_distillation.py
    python examples/on_policy_distillation.py --divergence entropy        # forward KL too where the teacher is unsure
    python examples/on_policy_distillation.py --top-k 16 --tail none      # over the student's 16 likeliest tokens
"""

from __future__ import annotations

import argparse
import json
import pathlib

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from liger_losses import DistillationLoss, Divergence, LigerFusedLinearCrossEntropyLoss, Teacher, loss_inputs

HERE = pathlib.Path(__file__).parent
DIVERGENCES = {
    "reverse": Divergence.reverse_kl(),
    "forward": Divergence.forward_kl(),
    "jsd": Divergence.mixture(0.5, 0.5, 0.5),
    "entropy": Divergence.kl_by_entropy(threshold=0.8),
    "limited": Divergence.reverse_kl().limited(0.05),
}


def read_texts(path):
    """Questions and answers, as bytes; 0 ends a text."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    texts = [f"Q: {row['prompt'][0]['content']}\nA: {row['chosen'][0]['content']}" for row in rows]
    return [torch.tensor([*text.encode(), 0]) for text in texts]


def model_of(layers, size, seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def teacher_of(model, ids):
    """Hidden states ``[B, T, Ht]`` and head, which are all that a loss needs of the teacher."""
    head, hidden, _ = loss_inputs(model, input_ids=ids, use_cache=False)
    return Teacher(hidden, head)


def batch_of(texts, count, length, generator):
    """Pieces of random texts, ``[count, length + 1]``."""
    stream = torch.cat(texts)
    starts = torch.randint(len(stream) - length - 1, (count,), generator=generator)
    return torch.stack([stream[start : start + length + 1] for start in starts.tolist()])


def pretrain(model, texts, steps, args, generator):
    optimizer, loss_function = torch.optim.AdamW(model.parameters(), lr=2e-3), LigerFusedLinearCrossEntropyLoss()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps)
        ids = batch_of(texts, args.batch_size, args.length, generator)
        loss = loss_function(*loss_inputs(model, input_ids=ids, use_cache=False))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def perplexity(model, ids):
    loss_function = LigerFusedLinearCrossEntropyLoss()
    return loss_function(*loss_inputs(model, input_ids=ids, use_cache=False)).exp().item()


@torch.no_grad()
def divergence_on(student, teacher, ids, divergence):
    """The mean divergence on given texts."""
    loss_function = DistillationLoss(divergence, weight_hard_loss=0.0, weight_soft_loss=1.0)
    student_inputs = loss_inputs(student, input_ids=ids, use_cache=False)
    return loss_function(*student_inputs, teacher_of(teacher, ids))[0].item()


def draw(curve, path):
    """The curve as text, and as a picture where matplotlib is installed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(curve))
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return
    figure, axes = plt.subplots(figsize=(6, 3.2))
    axes.plot(curve["loss"], alpha=0.4, label="loss on the student's own texts")
    axes.plot(curve["steps"], curve["held_out"], "o-", label="KL(student, teacher), held-out texts")
    axes.set(xlabel="step", ylabel="nats per token", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--divergence", choices=DIVERGENCES, default="reverse")
    parser.add_argument("--top-k", type=int, default=None, help="compare only the student's k most likely tokens")
    parser.add_argument("--tail", default="bucket", help="how to treat all other tokens: bucket, renormalize, none")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pretraining", type=int, default=240, help="steps of the teacher; the student has a third")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument(
        "--length", type=int, default=72, help="tokens of a piece of text, of which a third is a prompt"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--output", default="runs/on_policy_distillation")
    args = parser.parse_args()

    texts = read_texts(HERE / "data" / "preferences.jsonl")
    texts, held_out = texts[:-40], batch_of(texts[-40:], 32, args.length, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(0)
    teacher = pretrain(model_of(4, 128, 0), texts, args.pretraining, args, generator).requires_grad_(False)
    student = pretrain(model_of(1, 64, 1), texts, args.pretraining // 3, args, generator)
    reverse = Divergence.reverse_kl()
    start = divergence_on(student, teacher, held_out, reverse)
    print(f"perplexity of held-out text: teacher {perplexity(teacher, held_out):.2f}, student ", end="")
    print(f"{perplexity(student, held_out):.2f}; KL(student, teacher) {start:.3f}", flush=True)

    loss_function = DistillationLoss(
        DIVERGENCES[args.divergence], weight_hard_loss=0.0, weight_soft_loss=1.0, top_k=args.top_k, tail=args.tail
    )
    optimizer = torch.optim.AdamW(student.parameters(), lr=args.learning_rate)
    curve = {"loss": [], "steps": [0], "held_out": [start]}
    prompt = args.length // 3
    for step in range(args.steps):
        prompts = batch_of(texts, args.batch_size, prompt, generator)[:, :prompt]
        with torch.no_grad():
            # The student writes; ids[:, prompt:] are the tokens that it sampled.
            ids = student.generate(prompts, do_sample=True, max_new_tokens=args.length - prompt, eos_token_id=None)
            taught = teacher_of(teacher, ids)  # the teacher reads
        labels = ids.clone()
        labels[:, :prompt] = -100  # no loss on prompts
        loss, _ = loss_function(*loss_inputs(student, input_ids=ids, labels=labels, use_cache=False), taught)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve["loss"].append(loss.item())
        if (step + 1) % 10 == 0 or step + 1 == args.steps:
            curve["steps"].append(step + 1)
            curve["held_out"].append(divergence_on(student, teacher, held_out, reverse))
            print(f"step {step + 1:3}  loss {loss.item():.4f}  held out {curve['held_out'][-1]:.4f}", flush=True)

    draw(curve, pathlib.Path(args.output) / "curve")
    print(f"KL(student, teacher) on held-out text: {start:.3f} before, {curve['held_out'][-1]:.3f} after; ", end="")
    print(f"student's perplexity {perplexity(student, held_out):.2f}")


if __name__ == "__main__":
    main()
