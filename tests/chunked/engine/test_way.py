"""How long the way of a call is through the package's files."""

import sys
from pathlib import Path

import pytest
import torch

import liger_losses
from liger_losses import Teacher
from liger_losses.kernels._triton import INTERPRETED, triton
from tests.losses import CE, DPO, JSD

ROOT = Path(liger_losses.__file__).parent
#: How many files of the package a call is to pass, and how often it is to cross from one of them into another, forth
#: and back. A goal that holds is an error here: its mark goes then.
GOALS = {"cross-entropy": (16, 110), "DPO": (20, 280), "JSD": (20, 200)}


def loss_calls():
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape):
        return (torch.randn(*shape, generator=generator) * 0.3).to(torch.bfloat16).requires_grad_()

    weight, ref_weight, hidden, ref_hidden = tensor(70, 32), tensor(70, 32).detach(), tensor(40, 32), tensor(40, 32)
    labels = torch.randint(70, (40,), generator=generator)
    labels[:5] = -100
    pairs, ref_pairs = (hidden.view(4, -1, 32), labels.view(4, -1)), ref_hidden.detach().view(4, -1, 32)
    teacher, options = Teacher(ref_hidden.detach(), ref_weight), {"backend": "triton"}
    dpo = DPO(**options, workspace=2**18)
    return {
        "cross-entropy": lambda: CE(**options)(weight, hidden, labels),
        "DPO": lambda: dpo(weight, *pairs, None, ref_pairs, ref_weight)[0],
        "JSD": lambda: JSD(**options, chunk_size=8)(weight, hidden, labels, teacher)[0],
    }


@pytest.mark.skipif(not INTERPRETED or triton is None, reason="needs Triton's interpreter")
@pytest.mark.xfail(reason="calls pass more files than they should", strict=True, raises=AssertionError)
@pytest.mark.parametrize("name", list(GOALS))
def test_a_call_passes_few_files(name, monkeypatch):
    from triton.runtime.interpreter import GridExecutor

    call, root = loss_calls()[name], str(ROOT)
    files, stack = list[str](), list[str]()

    def trace(frame, event, _):
        if event[0] == "c" and event != "call":  # of a C function: by far the most
            return
        file = frame.f_code.co_filename
        if not file.startswith(root):
            return
        if event == "call":
            stack.append(file)
        elif stack:
            stack.pop()
        if stack and (not files or files[-1] != stack[-1]):
            files.append(stack[-1])

    def launch(*arguments, run=GridExecutor.__call__, **keywords):
        sys.setprofile(None)  # what the interpreter does is no part of a launch, and takes long to follow
        run(*arguments, **keywords)
        sys.setprofile(trace)

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    call().backward()  # compiles and fills caches
    sys.setprofile(trace)
    try:
        call().backward()
    finally:
        sys.setprofile(None)
    most_files, most_crossings = GOALS[name]
    assert len({*files}) <= most_files, sorted(Path(file).relative_to(ROOT) for file in {*files})
    assert len(files) - 1 <= most_crossings
