"""Distill a model into a shallow copy of itself with the Jensen-Shannon divergence: a plain loop, no trainer.

The student has the teacher's embeddings and a few of its layers, evenly spaced. Prints the loss of every step, and the
perplexity of held-out text before and after training.

    python examples/distill.py

With the teacher in another process, or in an earlier run, its head and its hidden states come from files:

    python examples/distill.py --save-teacher runs/teacher
    python examples/distill.py --teacher runs/teacher
"""

from __future__ import annotations

import argparse
import copy
import json
import pathlib

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_dpo import BUNDLED, HERE, prepare_model

from liger_losses import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearJSDLoss,
    Teacher,
    TeacherFiles,
    TeacherWriter,
    loss_inputs,
)


def shallow_copy_of(teacher, layers):
    """A model of so many of the teacher's layers, the first and the last among them."""
    student = copy.deepcopy(teacher)
    decoder = student.get_decoder()
    last = len(decoder.layers) - 1
    layers_kept = [decoder.layers[round(i * last / (layers - 1))] for i in range(layers)]
    for i, layer in enumerate(layers_kept):
        layer.self_attn.layer_idx = i
    decoder.layers = nn.ModuleList(layers_kept)
    student.config.num_hidden_layers = layers
    return student


def inputs_of(model, rows, device):
    """The head, hidden states ``[B, T, H]`` and shifted labels ``[B, T]`` of encoded rows."""
    ids = pad_sequence(rows, batch_first=True).to(device)
    labels = pad_sequence(rows, batch_first=True, padding_value=-100).to(device)
    # Padding is on the right, where causal attention never looks at it.
    return loss_inputs(model, input_ids=ids, labels=labels, use_cache=False)


def batches(rows, args):
    """The rows of each step, and a name for them: later steps repeat earlier ones."""
    for step in range(args.steps):
        start = step * args.batch_size % (len(rows) - args.batch_size + 1)
        yield start, rows[start : start + args.batch_size]


@torch.no_grad()
def save_teacher(teacher, rows, args, device):
    """Write the teacher's head, and its hidden states of every batch."""
    writer = None
    for name, batch in batches(rows, args):
        head, states, _ = inputs_of(teacher, batch, device)
        writer = writer or TeacherWriter(args.save_teacher, head)
        writer.write(name, states)
    print(
        f"saved the teacher in {args.save_teacher}: its head, {head.weight.nbytes / 2**20:.0f} MiB, and "
        f"{2 * states.shape[-1]} bytes a token, where logits in fp32 take {4 * head.vocab_size}"
    )


@torch.no_grad()
def perplexity(model, rows, device):
    """Of all tokens but each row's first."""
    return LigerFusedLinearCrossEntropyLoss()(*inputs_of(model.eval(), rows, device)).exp().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUNDLED)
    parser.add_argument("--dataset", default=str(HERE / "data" / "preferences.jsonl"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--beta", type=float, default=0.5)
    parser.add_argument(
        "--hard", type=float, default=0.2, help="weight of cross-entropy; 1 - this is the weight of the divergence"
    )
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--save-teacher", metavar="DIR", help="write the teacher's hidden states and head, and stop")
    parser.add_argument("--teacher", metavar="DIR", help="take the teacher from these files, also while it is written")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for each of the teacher's files")
    parser.add_argument("--output", default="runs/distill")
    args = parser.parse_args()
    if args.layers < 2:
        raise SystemExit("--layers: the first and the last layer are kept; give at least 2.")

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = prepare_model(args.model, pathlib.Path(args.output) / "start")
    tokenizer = AutoTokenizer.from_pretrained(path)
    teacher = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
    student = shallow_copy_of(teacher, args.layers).train()

    pairs = [json.loads(line) for line in pathlib.Path(args.dataset).read_text(encoding="utf-8").splitlines()]
    texts = [tokenizer.apply_chat_template([*pair["prompt"], *pair["chosen"]], tokenize=False) for pair in pairs]
    rows = [torch.tensor(tokenizer(text).input_ids[: args.max_length]) for text in texts]
    rows, held_out = rows[:-16], rows[-16:]
    if args.batch_size > len(rows):
        raise SystemExit(f"--batch-size: there are {len(rows)} texts to train on.")
    if args.save_teacher:
        save_teacher(teacher, rows, args, device)
        return
    print(f"teacher's perplexity of held-out text {perplexity(teacher, held_out, device):.1f}")
    before = perplexity(student, held_out, device)
    student.train()
    files = None
    if args.teacher:
        del teacher
        files = TeacherFiles(args.teacher, device=device, dtype=torch.float32, timeout=args.timeout)

    loss_function = LigerFusedLinearJSDLoss(args.hard, 1 - args.hard, args.beta)
    optimizer = torch.optim.AdamW(student.parameters(), lr=args.learning_rate)
    for step, (name, batch) in enumerate(batches(rows, args)):
        if files is not None:
            source = files.teacher(name)
        else:
            with torch.no_grad():
                head, states, _ = inputs_of(teacher, batch, device)
            source = Teacher(states, head)
        head, states, labels = inputs_of(student, batch, device)
        loss, metrics = loss_function(head, states, labels, source)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1:3}  loss {loss.item():.4f}  divergence {metrics.soft_loss.item():.4f}", flush=True)

    after = perplexity(student, held_out, device)
    print(f"student's perplexity of held-out text: {before:.1f} before, {after:.1f} after")


if __name__ == "__main__":
    main()
