"""Options of losses: frozen and checked; another loss has other ones."""

import copy
import dataclasses
import inspect
import math
import pickle

import pytest
import torch
from torch import nn

import liger_losses
from liger_losses import DistillationLoss, Divergence, Head
from liger_losses.chunked.losses.base import LossOptions
from tests.losses import BCO, CE, CPO, DPO, GRPO, JSD, KL, KTO, ORPO, AlphaBeta, MiniLLM, SimPO
from tests.reference import tensors_of
from tests.results.losses import LOSSES, batch

D = batch(torch.float32)
HEAD, REF = Head(D["weight"]), Head(D["ref_weight"])


#: By the type of an option, values that it refuses.
OF_TYPES = {
    "FiniteFloat": ("x", True, math.nan, math.inf),
    "NonNegativeFloat": ("x", math.nan, math.inf, -0.1),
    "PositiveFloat": ("x", math.nan, math.inf, 0.0),
    "UnitFloat": ("x", math.nan, -0.1, 1.1),
    "bool": ("no", 1.0),
    "float": ("x", math.nan),
    "int": (0.5,),
    "str": ("no name",),
    "torch.dtype": (torch.bfloat16,),
}


@pytest.mark.parametrize("build", [CE, DPO, CPO, SimPO, ORPO, KTO, BCO, GRPO, JSD, KL, AlphaBeta, MiniLLM])
def test_every_option_refuses_what_is_not_of_its_type(build):
    needed = {AlphaBeta: {"alpha": 0.5}, GRPO: {"loss_type": "dr_grpo", "max_completion_length": 9}}.get(build, {})
    for option in dataclasses.fields(build.options_type):
        words = f"({option.name}|^k) must (be|lie)|unknown {option.name}|needs {option.name}"
        for wrong in OF_TYPES.get(str(option.type).partition(" | ")[0], ()):
            for call in (lambda **on: build(**{**needed, **on}), build(**needed).replace):
                with pytest.raises((TypeError, ValueError), match=words):
                    call(**{option.name: wrong})


def test_a_loss_is_frozen():
    loss = DPO(beta=0.3)
    names = ("transform", "options", "settings", "beta")
    for owner, name in (*((loss, name) for name in names), (loss.settings, "beta"), (JSD(), "divergence")):
        with pytest.raises(AttributeError):
            setattr(owner, name, None)
    assert (loss.beta, loss.settings.beta, loss.replace(beta=0.5).beta, loss.beta) == (0.3, 0.3, 0.5, 0.3)


def test_a_loss_is_a_module():
    """Its mode, hooks, buffers and submodules are as any module's, and so are a subclass's own attributes."""

    class Own(liger_losses.ChunkedLoss):
        def __init__(self, scale=1.0, **options):
            self.temperatures = 0.0
            super().__init__(**options)
            self.scale, self.layer = scale, nn.Linear(2, 2)
            self.register_buffer("seen", torch.zeros(()))

    loss = Own(2.0, backend="torch").eval()
    loss.register_forward_hook(lambda *_: None)
    loss.scale, loss.seen, loss.layer, loss._backend = 3.0, torch.ones(()), nn.Linear(3, 3), "a framework's"
    other = loss.replace(workspace=100, scale=4.0)
    other.seen, other.layer = torch.zeros(()), None
    assert (loss.scale, float(loss.seen), loss.layer.in_features, loss.workspace) == (3.0, 1.0, 3, None)
    assert (other.scale, other.backend, other.workspace, other.training) == (4.0, "torch", 100, False)
    assert len(other._forward_hooks) == 1


def test_what_is_printed_are_the_options_that_are_not_defaults():
    loss = DPO(beta=0.3, loss_type=["sigmoid", "sft"], use_ref_model=True)
    assert repr(loss) == "LigerFusedLinearDPOLoss(beta=0.3, loss_type=['sigmoid', 'sft'])"
    assert repr(CE()) == "LigerFusedLinearCrossEntropyLoss()"
    assert "divergence=" in repr(DistillationLoss(Divergence.forward_kl()))


def test_how_to_stream_is_an_option():
    assert CE().replace(accum_dtype=torch.float32).options.accum_dtype == torch.float32
    for loss in (DPO(chunk_size=1), GRPO(chunk_size=1)):  # liger-kernel's, of completions
        assert (loss.chunk_size, loss.options.chunk_size) == (1, None)


# --- Copies, signatures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss))])
@pytest.mark.parametrize("name", ["cross entropy", "DPO", "KTO", "BCO", "GRPO"])
def test_a_copy_has_options_of_its_own(name, copied):
    loss = LOSSES[name].made(D, temperature=0.7, backend="torch")
    other = copied(loss)
    assert (other.settings, repr(other)) == (loss.settings, repr(loss))
    assert other.state_dict().keys() == loss.state_dict().keys()
    other = other.replace(temperature=2.0)
    found, expected = LOSSES[name].call(other, HEAD, REF, D), LOSSES[name](HEAD, REF, D, temperature=2.0)
    torch.testing.assert_close(tensors_of(found), tensors_of(expected), rtol=0, atol=0, equal_nan=True)


def test_losses_of_tables_are_pickled():
    """Rows hold functions that no pickle can: options have their names."""
    for loss in [GRPO(loss_type=name) for name in ("cispo", "dppo_tv", "icepop")] + [DPO(loss_type="apo_down")]:
        assert pickle.loads(pickle.dumps(loss)).settings == loss.settings


def test_signatures_list_every_option():
    parameters = inspect.signature(DPO).parameters
    assert list(parameters)[:3] == ["ignore_index", "beta", "alpha"]
    assert (parameters["beta"].default, parameters["workspace"].default) == (0.1, None)
    assert parameters["workspace"].kind is inspect.Parameter.KEYWORD_ONLY
    assert next(iter(inspect.signature(DPO()).parameters)) != "ignore_index"

    class Own(JSD):
        def __init__(self, floor=0.0, **options):
            self.floor = floor
            super().__init__(**options)

    parameters = inspect.signature(Own).parameters
    assert next(iter(parameters)) == "floor"
    assert parameters["convention"].default == "gkd"


def test_options_may_be_decorated_and_do_not_change():
    class Plain(LossOptions):
        scale: float = 1.0

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Decorated(LossOptions):
        scale: float = 1.0

    for kind in (LossOptions, Plain, Decorated):
        options = kind(ignore_index=1)
        for name in ("ignore_index", "scale"):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(options, name, 2)
            with pytest.raises(dataclasses.FrozenInstanceError):
                delattr(options, name)
        assert (options, hash(options)) == (kind(ignore_index=1), hash(kind(ignore_index=1)))
        assert dataclasses.replace(options, ignore_index=3).ignore_index == 3
        if kind is not LossOptions:
            assert kind(scale=2.0).scale == 2.0


def test_a_subclass_adds_to_the_options_by_position():
    assert (*KL.positions, "softcap") == KL.positions + ("softcap",)
