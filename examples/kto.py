"""Fine-tune with KTO on single completions, each marked desirable or undesirable: a plain loop, no trainer.

Uses one completion of each bundled preference pair. Prints the loss and the estimate of the KL divergence of every
step, and the implicit rewards of held-out completions before and after training.

    python examples/kto.py
"""

from __future__ import annotations

import argparse
import json
import pathlib

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_dpo import BUNDLED, HERE, prepare_model

from liger_losses import Completions, LigerFusedLinearKTOLoss, linear_logps, loss_inputs


def encode(tokenizer, prompt, completion, max_length):
    """Ids and labels ``[T]`` of a prompt and a completion; the prompt's labels are masked."""
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    start = tokenizer(text, add_special_tokens=False).input_ids
    end = tokenizer(completion[0]["content"] + tokenizer.eos_token, add_special_tokens=False).input_ids
    ids = torch.tensor((start + end)[:max_length])
    return ids, ids.masked_fill(torch.arange(len(ids)) < len(start), -100)


def inputs_of(model, rows, device):
    """The head, hidden states ``[B, T, H]`` and shifted labels ``[B, T]`` of encoded rows."""
    ids = pad_sequence([ids for ids, _ in rows], batch_first=True).to(device)
    labels = pad_sequence([labels for _, labels in rows], batch_first=True, padding_value=-100).to(device)
    # Padding is on the right, where causal attention never looks at it.
    return loss_inputs(model, input_ids=ids, labels=labels, use_cache=False)


@torch.no_grad()
def logps(model, rows, device):
    """Log-probabilities ``[B]`` of completions."""
    training = model.training
    head, hidden, labels = inputs_of(model.eval(), rows, device)
    model.train(training)
    return linear_logps(hidden, head, labels).sum(-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUNDLED)
    parser.add_argument("--dataset", default=str(HERE / "data" / "preferences.jsonl"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--max-length", type=int, default=160)
    parser.add_argument("--output", default="runs/kto")
    args = parser.parse_args()
    if args.batch_size < 2:
        raise SystemExit(
            "--batch-size: the divergence takes completions of other prompts in the batch; give at least 2."
        )

    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = prepare_model(args.model, pathlib.Path(args.output) / "start")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).train()

    lines = pathlib.Path(args.dataset).read_text(encoding="utf-8").splitlines()
    pairs = [json.loads(line) for line in lines]
    good = [i % 2 == 0 for i in range(len(pairs))]
    texts = [
        (pair["prompt"], pair["chosen" if wanted else "rejected"]) for pair, wanted in zip(pairs, good, strict=True)
    ]
    rows = [encode(tokenizer, *text, args.max_length) for text in texts]
    needed = args.steps * args.batch_size
    if needed + 16 > len(rows):
        raise SystemExit(
            f"{args.steps} steps of {args.batch_size} need {needed} completions and 16 held out; "
            f"there are {len(rows)}. Lower --steps or --batch-size."
        )
    held_out, marks = rows[-16:], torch.tensor(good[-16:], device=device)
    before = logps(model, held_out, device)

    loss_function = LigerFusedLinearKTOLoss(beta=args.beta, use_ref_model=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    # The reference is the initial model; its log-probability of each completion is computed once.
    chunks = [slice(i, i + args.batch_size) for i in range(0, needed, args.batch_size)]
    reference = [logps(model, rows[chunk], device) for chunk in chunks]
    # Each prompt with the completion of the prompt before it in its batch: mismatched completions for the KL term.
    shifted = []
    for chunk in chunks:
        batch = texts[chunk]
        others = [(batch[i][0], batch[i - 1][1]) for i in range(len(batch))]
        shifted.append([encode(tokenizer, *text, args.max_length) for text in others])
    kl_reference = [logps(model, batch, device) for batch in shifted]

    for step, chunk in enumerate(chunks):
        kl = (logps(model, shifted[step], device) - kl_reference[step]).mean().clamp(min=0)
        head, hidden, labels = inputs_of(model, rows[chunk], device)
        loss, _ = loss_function(
            head,
            Completions(hidden, labels, ref_logps=reference[step]),
            preference_labels=torch.tensor(good[chunk], device=device),
            kl=kl,
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1:3}  loss {loss.item():.4f}  kl {kl.item():.4f}", flush=True)

    rewards = args.beta * (logps(model, held_out, device) - before)
    means = f"{rewards[marks].mean():+.4f} for good ones, {rewards[~marks].mean():+.4f} for bad ones"
    print(f"mean reward of held-out completions: {means} (0 before)")


if __name__ == "__main__":
    main()
