"""Patches a tiny model of every causal language model type, and compares it with itself.

    python -m benchmarks.coverage.patches [--image-text] [--device DEVICE] [--output FOLDER] [TYPES...]

With `--image-text`, the types that have an image-text model instead: about half of them with an image in each row,
the others on text alone.
Each type runs in a process of its own, one after the other. Loss and the gradients of all parameters must be those of
the unpatched model, and again those to the bit after unpatching.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch

from benchmarks.coverage import model_zoo
from benchmarks.coverage.processes import in_processes
from liger_losses.patching.patch import patch, unpatch

#: Of the loss, relative; of a parameter's gradient, relative to its largest entry, and to the largest of all.
LOSS_TOLERANCE, GRAD_TOLERANCE, GRAD_FLOOR = 1e-5, 1e-4, 1e-6


def loss_of(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The model's own loss."""
    loss: torch.Tensor | None = model(**inputs).loss
    if loss is None:
        raise ValueError("its forward computes no loss")
    return loss


def loss_and_grads(model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One step's loss and gradients, from the same random numbers each time."""
    torch.manual_seed(5)
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, inputs)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def difference(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest error of a gradient as a multiple of what is allowed, and whose it is."""
    if actual.keys() != expected.keys():
        return float("inf"), str(sorted(actual.keys() ^ expected.keys())[:3])
    largest = max((float(g.abs().max()) for g in expected.values() if g.numel()), default=0.0)
    worst = 0.0, ""
    for name, grad in expected.items():
        if grad.numel():
            allowed = GRAD_TOLERANCE * float(grad.abs().max()) + GRAD_FLOOR * largest
            error = float((actual[name] - grad).abs().max()) / max(allowed, 1e-30)
            worst = max(worst, (error if error == error else float("inf"), name))
    return worst


def check(model_type: str, device: str = "cpu", image_text: bool = False) -> dict[str, Any]:
    """Compare a type's model patched, unpatched and untouched."""
    model = model_zoo.build(model_type, image_text=image_text).to(device)
    inputs = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in model_zoo.inputs_of(model).items()
    }
    loss, grads = loss_and_grads(model, inputs)
    state = list(model.state_dict())
    start = time.perf_counter()
    report = patch(model, loss_head=False)
    seconds = time.perf_counter() - start
    patched_loss, patched_grads = loss_and_grads(model, inputs)
    error, parameter = difference(patched_grads, grads)
    same_state = list(model.state_dict()) == state
    unpatch(model)
    restored_loss, restored = loss_and_grads(model, inputs)
    again_loss, again = loss_and_grads(model, inputs)
    result: dict[str, Any] = {
        "loss": float(loss),
        "loss_error": abs(float(patched_loss - loss)) / max(abs(float(loss)), 1e-30),
        "grad_error": error,
        "grad_error_of": parameter,
        "images": any("pixel" in name or "patches" in name for name in inputs),
        "same_state": same_state,
        "restored": _equal((restored_loss, restored), (loss, grads)),
        "deterministic": _equal((restored_loss, restored), (again_loss, again)),
        "patch_seconds": round(seconds, 2),
        "replaced": report.counts,
        "left": sorted({f"{entry.class_name}: {entry.reason}" for entry in report.left}),
    }
    for kind in ("norm", "glu", "rope"):
        result[kind] = sum(kind in str(entry.replaced_by) for entry in report.replaced)
    good = result["loss_error"] <= LOSS_TOLERANCE and error <= 1 and same_state
    result["status"] = "ok" if good and (result["restored"] or not result["deterministic"]) else "wrong"
    return result


def _equal(
    one: tuple[torch.Tensor, dict[str, torch.Tensor]], other: tuple[torch.Tensor, dict[str, torch.Tensor]]
) -> bool:
    return torch.equal(one[0], other[0]) and all(torch.equal(one[1][name], grad) for name, grad in other[1].items())


def sweep(types: Iterable[str], device: str = "cpu", image_text: bool = False) -> dict[str, dict[str, Any]]:
    """Check types."""
    results: dict[str, dict[str, Any]] = {}
    for model_type, result in in_processes(types, lambda name: check(name, device, image_text)):
        results[model_type] = result if "status" in result else {"status": "broken", **result}
        print(row(model_type, results[model_type]), flush=True)
    return results


def row(model_type: str, result: dict[str, Any]) -> str:
    """One line of the table."""
    if result["status"] == "broken":
        return f"{model_type:26} broken  {result['error']}"
    left = "; ".join(result["left"])
    return (
        f"{model_type:26} {result['status']:7} {result['norm']:5} {result['glu']:5} {result['rope']:5} "
        f"{result['loss_error']:8.1e} {result['grad_error']:8.1e}  {left}"
    ).rstrip()


def summary(results: dict[str, dict[str, Any]]) -> str:
    """How many types are right, and for how many each kind was recognised."""
    ran = [result for result in results.values() if result["status"] != "broken"]
    counts = {kind: sum(bool(result[kind]) for result in ran) for kind in ("norm", "glu", "rope")}
    wrong = [name for name, result in results.items() if result["status"] == "wrong"]
    broken = [name for name, result in results.items() if result["status"] == "broken"]
    return (
        f"{len(results)} types, {len(ran) - len(wrong)} right, wrong {wrong or 'none'}, not run {broken or 'none'}; "
        f"types with norms replaced {counts['norm']}, gated MLPs {counts['glu']}, rotary embedding {counts['rope']}; "
        f"run with images {sum(result['images'] for result in ran)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="all of them by default")
    parser.add_argument("--image-text", action="store_true", help="image-text models")
    parser.add_argument("--output", type=pathlib.Path, help="writes patch_coverage[_image_text].json and .txt there")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    header = f"{'type':26} {'status':7} norms  glus ropes loss err grad err  left"
    print(header)
    results = sweep(options.types or model_zoo.names(options.image_text), options.device, options.image_text)
    print(summary(results))
    if options.output:
        import transformers

        options.output.mkdir(parents=True, exist_ok=True)
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        lines = [header, *(row(name, result) for name, result in results.items()), summary(results), str(versions)]
        text = json.dumps({"versions": versions, "summary": summary(results), "types": results}, indent=1)
        name = "patch_coverage_image_text" if options.image_text else "patch_coverage"
        (options.output / f"{name}.json").write_text(text + "\n")
        (options.output / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return int(any(result["status"] == "wrong" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
