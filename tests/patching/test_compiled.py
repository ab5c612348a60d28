"""Compiled patched models: losses and gradients of the plain model, without logits in any graph; graphs are counted."""

import contextlib
import copy
import functools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.parallel import DistributedDataParallel

from liger_losses.patching.patch import patch

B, T = 2, 40
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


pytestmark = pytest.mark.usefixtures("nothing_compiled")


class Graphs:
    """A backend that counts the graphs that do anything, and knows the most entries of a tensor in any of them.

    Joint graphs are split into forward and backward, of which it sees both.
    """

    def __init__(self, backend="aot_eager"):
        self.count = self.entries = 0
        self.operators = []
        split = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(self.inspect(graph)))  # for the backward, too
        self.run = {"aot_eager": split, "eager": lambda graph, _: self.inspect(graph)}[backend]

    def __call__(self, graph, inputs):
        self.count += any(node.op.startswith("call") for node in graph.graph.nodes)
        return self.run(graph, inputs)

    def inspect(self, graph):
        for node in graph.graph.nodes:
            self.operators.append(str(node.target))
            for key in ("val", "example_value"):
                for value in torch.utils._pytree.tree_leaves(node.meta.get(key)):
                    if isinstance(value, torch.Tensor):
                        count = value.numel()  # int() of a symbol would bind the graph to one length
                        self.entries = max(self.entries, count if isinstance(count, int) else count.node.hint)
        return graph.forward


# --- What models do with their logits ---------------------------------------------------------------------------------

V, H = 11, 8


class Model(nn.Module):
    """What models do between hidden states and their loss."""

    def __init__(self, way, bias):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.lm_head, self.way = nn.Embedding(V, H), nn.Linear(H, V, bias=bias), way

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, ids, labels):
        return self.way(self.lm_head(torch.tanh(self.embedding(ids))), labels)


def cross_entropy(z, y, **options):
    return F.cross_entropy(z.float().reshape(-1, V), y.reshape(-1), **options)


#: Each is one graph: no operation needs the logits. Tracing a loss takes half a second, so that rows share losses.
WAYS = {
    "scales": lambda z, y: cross_entropy(2.5 * (z / 3.0) * 0.3, y),
    "soft-cap and options": lambda z, y: cross_entropy(
        torch.tanh(z / 2.0) * 2.0, y, weight=torch.linspace(0.5, 2, V), reduction="sum", label_smoothing=0.1
    ),
    "scaled soft-cap": lambda z, y: cross_entropy((0.7 * z / 2.0).tanh() * 2.0 * 1.5, y, ignore_index=-100),
    "shifted, per token": lambda z, y: (
        cross_entropy(z[..., :-1, :].contiguous(), y[..., 1:], reduction="none").square().sum()
    ),
    "some tokens": lambda z, y: cross_entropy(z[:, -3:, :], y[:, -3:]) + cross_entropy(z[0], y[0]),
    "their dtype and shape": lambda z, y: cross_entropy(z.to(y.device), y) * z.size(-1) * z.dim() + z.shape[-1],
}


def test_models_whose_logits_nobody_needs():
    """All ways in one graph, whose only tensors as wide as the vocabulary are the head and its gradient."""

    def way(z, y):
        return torch.stack([function(z, y) for function in WAYS.values()])

    model = Model(way, True)
    patched, graphs = copy.deepcopy(model), Graphs()
    patch(patched)
    compiled = torch.compile(patched, backend=graphs, fullgraph=True, dynamic=False)
    ids = torch.randint(V, (3, 12))
    labels = ids.masked_fill(torch.rand(3, 12) < 0.3, -100)
    pairs, weights = [], torch.arange(1.0, 1 + len(WAYS)).cos()
    for run, parameters in ((compiled, patched.parameters()), (model, model.parameters())):
        losses = run(ids, labels=labels)
        pairs.append((losses, *torch.autograd.grad(losses @ weights, parameters)))
    torch.testing.assert_close(*pairs, **TOLERANCE)
    assert graphs.count == 1
    assert graphs.entries < 12 * 3 * V
    # What is found in the plain model's graphs.
    plain = Graphs()
    model.way = WAYS["scales"]
    torch.compile(model, backend=plain, fullgraph=True, dynamic=False)(ids, labels)
    assert plain.entries >= 12 * 3 * V


def train_step(run, parameters, batch, context):
    """The output, and all gradients."""
    for p in parameters:
        p.grad = None
    with context():
        output = run(**batch)
    (getattr(output, "loss", output) * 1.5).backward()
    return output, [p.grad.clone() for p in parameters]


def check(compiled, patched, plain, batches, context=contextlib.nullcontext, tolerance=TOLERANCE):
    """Steps of the compiled patched model have the losses and gradients of the plain model's."""
    outputs = []
    for batch in batches:
        found, gradients = train_step(compiled, list(patched.parameters()), batch, context)
        expected, others = train_step(plain, list(plain.parameters()), batch, context)
        losses = [getattr(output, "loss", output) for output in (found, expected)]
        torch.testing.assert_close(*losses, **tolerance)
        torch.testing.assert_close(gradients, others, **{**tolerance, "rtol": 10 * tolerance["rtol"]})
        outputs.append((found, expected))
    return outputs


def test_operations_that_need_the_values_are_in_the_graph():
    model = Model(lambda z, y: z.softmax(-1).square().sum() + (z + 1.0).logsumexp(-1).sum() + z[..., 3].sum(), True)
    patched, graphs, ids = copy.deepcopy(model), Graphs("eager"), torch.randint(V, (3, 12))
    patch(patched)
    found = torch.compile(patched, backend=graphs, fullgraph=True)(ids, labels=ids)
    torch.testing.assert_close(found, model(ids, ids))
    assert graphs.count == 1


def test_a_thread_that_has_had_no_pending_logits():
    """It compiles a model as the first thing that it does."""
    model, texts = Model(WAYS["scales"], True), [torch.randint(V, (3, length)) for length in (12, 11)]
    patched = copy.deepcopy(model)
    patch(patched)
    compiled = torch.compile(patched, backend="eager", fullgraph=True)
    found = ThreadPoolExecutor(1).map(lambda ids: compiled(ids, labels=ids), texts)
    torch.testing.assert_close([*found], [model(ids, ids) for ids in texts])


LOSS = nn.CrossEntropyLoss()


@pytest.mark.parametrize("made", ["before", pytest.param("in the model", marks=pytest.mark.slow)])
def test_models_with_a_loss_module(made):
    """A module that is made while torch.compile traces becomes its own code for losses of tensors: the graph ends."""
    before, graphs = made == "before", Graphs()
    model = Model(lambda z, y: (LOSS if before else nn.CrossEntropyLoss())(z.view(-1, V), y.view(-1)), True)
    patched = copy.deepcopy(model)
    patch(patched)
    compiled = torch.compile(patched, backend=graphs, fullgraph=before)
    texts = [torch.randint(V, (3, length)) for length in (12, 11)]
    check(compiled, patched, model, [{"ids": ids, "labels": ids} for ids in texts])
    assert 0 < graphs.count <= (2 if before else 8)
    assert graphs.entries < 3 * 11 * V


# --- transformers' models ---------------------------------------------------------------------------------------------

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from benchmarks.coverage import model_zoo  # noqa: E402
from tests.models import ids_and_labels  # noqa: E402

SETTINGS = {"gemma2": {"final_logit_softcapping": 5.0, "layer_types": ["full_attention"]}}
SETTINGS["cohere"] = {"logit_scale": 0.3}


def pair(name="llama", dtype=torch.float32, **settings):
    """A plain model of one layer, and the same model patched."""
    settings |= SETTINGS.get(name, {})
    plain = model_zoo.build(name, num_hidden_layers=1, vocab_size=model_zoo.VOCABULARY, **settings)
    patched = copy.deepcopy(plain).to(dtype)
    patch(patched)
    return plain.to(dtype), patched


def inputs(tokens=T, seed=0):
    ids, labels = ids_and_labels(5, model_zoo.VOCABULARY, B, tokens, seed=seed)
    return {"input_ids": ids, "labels": labels, "use_cache": False}


@pytest.mark.slow
def test_graphs_are_few():
    """Without fullgraph, for several lengths, with and without gradients."""
    plain, patched = pair()
    graphs = Graphs("eager")
    compiled = torch.compile(patched, backend=graphs)
    for found, _ in check(compiled, patched, plain, [inputs(tokens, seed=1) for tokens in (T, 37, 34, 39)]):
        assert found.logits is None
    assert graphs.count <= 4
    assert graphs.entries < B * 33 * model_zoo.VOCABULARY
    trained = graphs.count
    compiled.eval(), plain.eval()
    with torch.no_grad():
        for tokens in (T, 37, 34):
            found, expected = compiled(**inputs(tokens)), plain(**inputs(tokens))
            torch.testing.assert_close(found.loss, expected.loss, **TOLERANCE)
            torch.testing.assert_close(found.logits, expected.logits, **TOLERANCE)
    assert 0 < graphs.count - trained <= 4


def compiled_in_place(model, backend):
    model.compile(backend=backend)
    return model


def checkpointed(model, backend):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return torch.compile(model, backend=backend)


in_one_graph = functools.partial(torch.compile, fullgraph=True)
#: How a model is compiled, how many graphs a length may have, the model's dtype, and autocast's.
HOW = {
    "model.compile()": (compiled_in_place, 2, torch.float32, None),
    "gradient checkpointing": (checkpointed, 3, torch.float32, None),
    "compiled DDP": (lambda model, **how: torch.compile(DistributedDataParallel(model), **how), 3, torch.float32, None),
    "in DDP": (lambda model, **how: DistributedDataParallel(torch.compile(model, **how)), 2, torch.float32, None),
    "autocast": (in_one_graph, 1, torch.float32, torch.bfloat16),
    "bf16": (in_one_graph, 1, torch.bfloat16, None),
}
#: Families that are compiled in one graph, and their norms; LayerNorm is an option of the same operator.
NORMS = {"gemma2": 5, "llama": 3, "cohere": 2}


@pytest.mark.parametrize("way", ["gemma2", *(pytest.param(way, marks=pytest.mark.slow) for way in (*NORMS, *HOW)[1:])])
def test_graphs_with_the_loss_and_without_logits(way, one_process):
    """Soft-cap and logit scale are the loss's; so are labels that the caller has shifted, which are other ones here."""
    how, most, dtype, cast = HOW.get(way, (in_one_graph, 1, torch.float32, None))
    plain, patched = pair(way if way in NORMS else "llama", dtype)

    autocast, graphs = functools.partial(torch.autocast, "cpu", torch.bfloat16, cast is not None), Graphs()
    exact = dtype == torch.float32 and cast is None
    tolerance = TOLERANCE if exact else {"rtol": 2e-2, "atol": 2e-2}
    batches = [inputs(), inputs(seed=1)][: 2 if exact and way in HOW else 1]
    if way == "gemma2":
        batches[0]["shift_labels"] = batches[0]["labels"].roll(2, 1)
    outputs = check(how(patched, backend=graphs), patched, plain, batches, autocast, tolerance)
    assert all(found.loss.dtype == expected.loss.dtype for found, expected in outputs)
    assert 0 < graphs.count <= most
    assert graphs.entries < B * (T - 1) * model_zoo.VOCABULARY
    if way in NORMS:
        calls = Counter(op.split(".")[1] for op in graphs.operators if op.startswith("liger_losses."))
        assert calls.items() >= {"chunked": 1, "glu": 1, "rms_norm": NORMS[way]}.items()
        assert "chunked_gradients" not in calls  # one pass
        assert "rope" not in calls  # torch.compile fuses it
