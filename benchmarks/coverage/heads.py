"""Loss heads on a tiny model of every causal language model type, compared with the model's own logits.

    python -m benchmarks.coverage.heads [--image-text] [--output FOLDER] [TYPES...]

With `--image-text`, the types that have an image-text model instead: about half of them with an image in each row,
the others on text alone.
`patched`: the model's own loss and all gradients. `TRL`: the log-probabilities of TRL's head contract, and all
gradients of their weighted sum. Neither may need the values of the logits. Each type runs in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.coverage import model_zoo
from benchmarks.coverage.patches import LOSS_TOLERANCE, difference, loss_of
from benchmarks.coverage.processes import in_processes
from liger_losses.patching.patch import patch, unpatch
from liger_losses.trl.fused_head import add_fused_lm_head

#: Of a log-probability.
LOGP_TOLERANCE = 1e-3


def gradients(model: Any, call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[str]]:
    """A scalar, the gradients of all parameters, and what needed the logits."""
    torch.manual_seed(5)
    model.zero_grad(set_to_none=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = call()
        value.backward()
    messages = [str(w.message) for w in caught]
    needed = [
        m.split(", needs")[0].split("See docs")[0] for m in messages if "are computed now" in m or "its logits," in m
    ]
    return value.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, needed


def compare(model: Any, calls: tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]) -> str:
    """`ok`, or what is wrong with the second."""
    (value, grads, _), (other, others, needed) = (gradients(model, call) for call in calls)
    error = abs(float(other - value)) / max(abs(float(value)), 1e-6)
    worst, parameter = difference(others, grads)
    if needed:
        return f"needs the logits: {'; '.join(needed)}"
    return "ok" if error <= 10 * LOSS_TOLERANCE and worst <= 10 else f"off by {error:.1e}, {worst:.1e} at {parameter}"


def check(model_type: str, image_text: bool = False) -> dict[str, str]:
    """One type's row."""
    model = model_zoo.build(model_type, image_text=image_text)
    inputs = model_zoo.inputs_of(model)
    head = model.get_output_embeddings()
    if isinstance(getattr(head, "weight", None), torch.Tensor):
        with torch.no_grad():
            head.weight.mul_(5)  # so that soft-caps and scales matter
    own = gradients(model, lambda: loss_of(model, inputs))
    left = patch(model, norms=False, mlps=False, rope=False).left
    if left:
        patched = f"left: {left[0].reason}"
    else:
        found = gradients(model, lambda: loss_of(model, inputs))
        error, (worst, parameter) = abs(float(found[0] - own[0])), difference(found[1], own[1])
        fine = error <= LOSS_TOLERANCE * max(abs(float(own[0])), 1e-2) and worst <= 10
        patched = "ok" if fine else f"off by {error:.1e}, {worst:.1e} at {parameter}"
        patched = f"needs the logits: {'; '.join(found[2])}" if found[2] else patched
    unpatch(model)
    return {"patched": patched, "TRL": check_trl(model, inputs)}


def check_trl(model: Any, inputs: dict[str, Any]) -> str:
    """The contract of TRL's head, or the words of the refusal."""
    labels = inputs["labels"]
    rest = {name: value for name, value in inputs.items() if name != "labels"}
    logps: list[torch.Tensor] = []

    def plain() -> torch.Tensor:
        target = labels[:, 1:]
        found = model(**rest).logits.float()[:, :-1].log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
        logps.append(found.detach() * (target != -100))
        return weighted(found * (target != -100))

    def fused() -> torch.Tensor:
        found = model(**rest, labels=labels, fused_lm_head=True).log_probs
        logps.append(found.detach())
        return weighted(found)

    def weighted(found: torch.Tensor) -> torch.Tensor:
        return (torch.linspace(0.5, 1.5, found.numel()).view_as(found) * found).sum()

    if model.config.is_encoder_decoder:
        return "not tried: an encoder with a decoder, where the contract is a decoder's"
    add_fused_lm_head(model)
    try:
        result = compare(model, (plain, fused))
    except (TypeError, ValueError, RuntimeError) as error:
        return f"refused: {' '.join(str(error).split())[:120]}"
    largest = float((logps[0] - logps[1]).abs().max())
    return result if largest <= LOGP_TOLERANCE else f"log-probabilities off by {largest:.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="all of them by default")
    parser.add_argument("--image-text", action="store_true", help="image-text models")
    parser.add_argument("--output", type=pathlib.Path, help="writes head_coverage[_image_text].json and .txt there")
    options = parser.parse_args()
    importlib.import_module("trl.trainer.utils")  # once for all processes
    types, results = options.types or model_zoo.names(options.image_text), {}
    for model_type, result in in_processes(types, lambda name: check(name, options.image_text)):
        error = result.get("error", "")[:200]
        results[model_type] = {"patched": f"broken: {error}", "TRL": "broken"} if error else result
        print(f"{model_type:26} {results[model_type]['patched']:60} {results[model_type]['TRL']}", flush=True)
    counts = {kind: sum(result[kind] == "ok" for result in results.values()) for kind in ("patched", "TRL")}
    line = (
        f"{len(results)} types; the model's own loss without logits: {counts['patched']}; TRL's head: {counts['TRL']}"
    )
    print(line)
    if options.output:
        import transformers

        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        text = json.dumps({"versions": versions, "summary": line, "types": results}, indent=1)
        name = "head_coverage_image_text" if options.image_text else "head_coverage"
        (options.output / f"{name}.json").write_text(text + "\n")
        rows = [f"{kind:26} {row['patched']:60} {row['TRL']}".rstrip() for kind, row in results.items()]
        (options.output / f"{name}.txt").write_text("\n".join([*rows, line, str(versions)]) + "\n")
    wrong = [n for n, r in results.items() if any(v.startswith(("off", "log-prob")) for v in r.values())]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
