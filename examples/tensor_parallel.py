"""Train a model whose weights are split over processes (tensor parallelism): steps of SFT, then a step of DPO.

Each process has some rows of lm_head, and computes the losses without the logits. All processes take the same batch.
Without --model, a tiny model with random weights reads the bytes of the text.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
    torchrun --nproc-per-node 8 examples/tensor_parallel.py --model Qwen/Qwen3-8B --batch-size 4
"""

import argparse
import json
import os
import pathlib
import tempfile

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import liger_losses
from liger_losses import Completions, Head, LigerFusedLinearDPOLoss, linear_logps

PAIRS = pathlib.Path(__file__).parent / "data" / "preferences.jsonl"


def load(name):
    """A model that is split over all processes, and a function from text to its tokens."""
    split = DistributedConfig(tp_plan="auto")  # also starts torch.distributed, with NCCL on GPUs and gloo on CPUs
    if name is not None:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, distributed_config=split)
        return model.train(), AutoTokenizer.from_pretrained(name).encode
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)  # each process saves the same model
        # transformers 5.17 splits only vocabularies that the number of processes divides.
        config = LlamaConfig(vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        LlamaForCausalLM(config).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=split)
    return model.train(), lambda text: list(text.encode())


def batch_of(pairs, side, encode, device):
    """Token ids ``[B, T]``, padded on the right, and labels, which leave out prompts and padding."""
    rows = [(encode(pair["prompt"][0]["content"] + "\n"), encode(pair[side][0]["content"])) for pair in pairs]
    ids = [torch.tensor((prompt + answer)[:256]) for prompt, answer in rows]
    labels = [torch.tensor(([-100] * len(prompt) + answer)[:256]) for prompt, answer in rows]
    return pad_sequence(ids, True, 0).to(device), pad_sequence(labels, True, -100).to(device)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, help="default: 1e-5; for the tiny model 1e-2")
    args = parser.parse_args()

    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        raise SystemExit("Start this with torchrun: torchrun --nproc-per-node 2 examples/tensor_parallel.py")
    model, encode = load(args.model)
    say = print if dist.get_rank() == 0 else lambda text: None
    say(liger_losses.patch(model))
    rate = args.learning_rate or (1e-5 if args.model else 1e-2)
    # Some parameters are DTensors and some are not, which foreach implementations do not mix.
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)

    pairs = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    for step in range(args.steps):
        batch = pairs[step * args.batch_size :][: args.batch_size]
        ids, labels = batch_of(batch, "chosen", encode, model.device)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss  # no logits are computed
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(f"step {step} loss {loss.item():.4f}")

    # Every loss takes a head whose rows the processes of a group share.
    weight = model.get_output_embeddings().weight
    head = Head(weight.to_local(), group=weight.device_mesh.get_group())
    completions = []
    for side in ("chosen", "rejected"):
        ids, labels = batch_of(batch, side, encode, model.device)
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        reference = linear_logps(hidden.detach(), head.detach(), labels, shift=True).sum(-1)  # before this step
        completions.append(Completions(hidden, labels, ref_logps=reference))
    chosen, rejected = completions
    loss, _ = LigerFusedLinearDPOLoss(beta=0.1, shift=True)(head, chosen, rejected)
    loss.backward()
    optimizer.step()
    say(f"DPO loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
