"""Wrong inputs of the public API: each is an error before any work that says what was given and what was expected."""

import math
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import liger_losses as ll
from liger_losses import (
    Completions,
    Divergence,
    Head,
    LogitTransform,
    Teacher,
    TeacherLogits,
    TeacherTopK,
    TokenSupport,
    assert_no_logits,
    linear_logps,
    linear_statistics,
    linear_token_loss,
    register_statistic,
    workspace,
)
from liger_losses import functional as F
from tests.losses import BCO, CE, CPO, DPO, GRPO, JSD, KL, KTO, ORPO, AlphaBeta, Cosine, MiniLLM, SimPO
from tests.reference import Int8Weight, problem
from tests.results.losses import LOSSES, OPERATIONS, batch, case_of
from tests.seam import BACKENDS, LowRank

NAN, PER_TOKEN, ONES = math.nan, torch.zeros(4, 5), torch.ones(4)
MASK, ZEROS, EACH = torch.ones(4, 5, dtype=torch.bool), torch.zeros(2), torch.ones(4, 5)
HIDDEN, WEIGHT, LABELS, _ = problem(shape=(4, 5), masked=0.2)
ALONE, CAPPED = DPO(use_ref_model=False), partial(Head, transform=LogitTransform(softcap=3.0))


def of_class(**attributes):
    """A module of a class with these attributes."""
    return type("Made", (nn.Module,), attributes)()


def policy(h, w, y, advantages=ONES, beta=0.0, **options):
    return GRPO(beta=beta)(h, w, y.clamp(min=0), MASK, advantages, **options)


CENTERS = {"beta": 0.0, "sampler_term": "score_centering"}
of_logps = partial(F.grpo_loss, PER_TOKEN, ONES, MASK, beta=0.0)


def sampled(h, w, y, topk, **options):
    return GRPO(**CENTERS, **options)(h, w, y.clamp(min=0), MASK, ONES, sampler_topk=topk)


def marked(h, w, y, loss=KTO(), **options):
    return loss(w, (h, y), **{"preference_labels": ONES > 0, "kl": 0.0, **options})


def shifted(h, w, y, **options):
    return BCO(use_ref_model=False)(w, (h, y), preference_labels=ONES > 0, **options)


def taught(h, w, y, teacher, **options):
    return JSD(**options)(w, h, y, teacher)


def weighted(h, w, y, **weights):
    return ll.linear_divergence_loss(h, w, y, Teacher(h, w), Divergence.forward_kl(), weights)


def top(h, w, added=0):
    """The three largest log-probabilities of each token, and their columns."""
    logps, indices = (h @ w.T).log_softmax(-1).topk(3)
    return logps, indices + added


def kept(y):
    """The label of each token and two other columns."""
    return (y.clamp(min=0)[..., None] + torch.arange(3)) % 61


def scored(h, w, y, *support, **options):
    """Of all tokens over kept columns, by both backends, which say the same."""
    given, labels = TokenSupport(*support, **options), y.clamp(min=0)
    for backend in BACKENDS[1:]:
        with pytest.raises(ValueError, match=r"\S") as error:
            linear_logps(h, w, labels, support=given)
        with pytest.raises(ValueError, match=f"^{re.escape(str(error.value))}$"):
            linear_logps(h, w, labels, support=given, backend=backend)
    return linear_logps(h, w, labels, support=given)


def offsets(*changes):
    """Of three columns of each token, but for (place, value)."""
    found = torch.arange(21) * 3
    for place, value in changes:
        found[place] = value
    return found


def tempered(h, w, y, temperature):
    return linear_logps(h, w, y.clamp(min=0), temperature=temperature)


def of_pairs(h, w, y, function, **methods):
    """A loss on pairs of a user's own."""
    return type("Mine", (ll.PreferenceLoss,), {"pair_loss": lambda self, pairs: function(pairs), **methods})()(w, h, y)


def of_statistics(h, w, y, function):
    """A loss of tokens of a user's own."""
    return type("Mine", (ll.ChunkedLoss,), {"loss": lambda self, s, mask: function(s, mask)})()(w, h, y)


def of_inputs(h, w, y, *inputs):
    """A loss of two targets that have an input each."""
    targets = [h[:, :2], h], w, [y[:, :2], y]
    return linear_token_loss(*targets, lambda s, y, u: u, token_inputs={"u": [*inputs]})


def of_tokens(h, w, y, function):
    """A loss per token in two passes, and in one, which say the same."""
    with pytest.raises((ValueError, AttributeError)) as error:
        linear_token_loss(h, w.detach(), y, function)
    with pytest.raises(type(error.value), match=f"^{re.escape(str(error.value))}$"):
        linear_token_loss(h, w, y, function)
    raise error.value


#: A call with hidden states, weight and labels, and what its error says.
WRONG = [
    # options
    (lambda h, w, y: ll.EngineOptions(keep=-1), "keep must be a number of bytes"),
    (lambda h, w, y: ll.EngineOptions(strategy="two_pass", keep=100), "'two_pass' keeps no blocks, got keep=100"),
    (lambda h, w, y: DPO(shift=[1, 2]), "shift=.1, 2. needs lists of hidden states"),
    (lambda h, w, y: ll.ChunkedLoss(shift=2)(w, h, y, rewards=PER_TOKEN), r"one value per token, \(4, 5\).*shift the"),
    (lambda h, w, y: DPO(loss_weights=[NAN]), "each of loss_weights must be a finite number, got nan"),
    (lambda h, w, y: Divergence("kl"), r"unknown divergence 'kl'; use a constructor.*reverse_kl\(\)"),
    (lambda h, w, y: Divergence.mixture(NAN, 1, 1), "parameters of a divergence must be finite"),
    (lambda h, w, y: Head(w, transform=0.7), r"must be a liger_losses.LogitTransform\(...\)"),
    (lambda h, w, y: linear_statistics(h, w, y, options={}), r"must be liger_losses.EngineOptions\(...\)"),
    *(
        (lambda h, w, y, size=size: ll.set_default_workspace(size), words)
        for size, words in ((0, "positive"), ("0", "positive"), ("many", "300MiB"), ("3 parsecs", "2GiB"))
    ),
    *((lambda h, w, y, size=size: workspace(size).__enter__(), "number of bytes") for size in (True, 1.5, [1])),
    (
        lambda *_: assert_no_logits(0).__enter__(),
        "vocabulary must be the vocabulary size, a model, or its head, got 0",
    ),
    (lambda *_: assert_no_logits("x").__enter__(), "got 'x'"),
    (lambda *_: assert_no_logits(61, 0).__enter__(), "limit must be positive, got 0"),
    (lambda *_: assert_no_logits(61, "much").__enter__(), "limit must be a number of bytes"),
    (lambda *_: DPO(loss_type="robust", label_smoothing=0.5), "below 0.5"),
    (lambda *_: DPO(loss_type="exo_pair"), "above 0 .*1e-3"),
    (lambda *_: DPO(loss_type=["sigmoid", "sft"], loss_weights=[1.0]), "one entry per loss_type"),
    (lambda *_: DPO(loss_type="nca_pair", f_divergence_type="forward_kl"), "sigmoid, sigmoid_norm"),
    (lambda *_: DPO(loss_type="aot", use_weighting=True), "no pairs to weight"),
    (lambda *_: DPO(loss_type="ipo", average_log_prob=True), "divide by lengths already"),
    (lambda *_: CPO(use_ref_model=True), "leave out use_ref_model"),
    (lambda *_: GRPO(loss_type="sapo", importance_sampling_level="sequence"), "defined for tokens"),
    (lambda *_: GRPO(loss_type="gmpo", importance_sampling_level="sequence"), "of the level 'geometric'"),
    (lambda *_: GRPO(loss_type="dro"), "log_ratio_penalty="),
    (lambda *_: GRPO(top_entropy_quantile=0.0), "top_entropy_quantile"),
    (lambda *_: GRPO(shift=True), "has no shift"),
    (lambda *_: GRPO(ignore_index=0), "must not be a token id"),
    (lambda *_: GRPO(normalizer="limit"), "max_completion_length"),
    (lambda *_: JSD(beta=1.1), "beta must lie in"),
    (lambda *_: KL(skew=1.0), "must"),
    (lambda *_: KL(entry_limit=0.1, skew=0.1), "take a limit"),
    (lambda *_: AlphaBeta(alpha=0.0, beta=0.0), "must"),
    (lambda *_: MiniLLM(temperature=2.0), "temperature must be"),
    (lambda *_: DPO().__setattr__("beta", 0.2), r"beta is an option.* frozen: loss\.replace\(beta=\.\.\.\)"),
    (lambda *_: CE(ce_weight=ONES).__setattr__("ce_weight", ONES), "ce_weight is an option"),
    (lambda *_: DPO().__setattr__("betta", 0.5), "'betta': did you mean the option 'beta'"),
    (lambda *_: DPO().bta, "has no attribute 'bta'"),
    (lambda *_: DPO().replace(betta=0.5), r"no option 'betta' \(did you mean 'beta'\?\)"),
    (lambda *_: type("Mine", (JSD,), {"temperature": 2.0}), r"Mine\.temperature hides the option temperature"),
    (lambda *_: type("Mine", (CE,), {"ce_weight": None}), r"Mine\.ce_weight hides the option ce_weight"),
    (lambda *_: ORPO(group="cp"), r"mesh\['cp'\]\.get_group\(\)"),
    # tensors
    (lambda h, w, y: CE()(w, h.numpy(), y), r"hidden_states must be a tensor, got ndarray; pass torch.as_t"),
    (lambda h, w, y: CE()(w, torch.nested.nested_tensor([h[0], h[1]]), y), "pass hidden_states.to_padded_tensor"),
    (lambda h, w, y: CE()(w, h, y, token_weights=PER_TOKEN * 1j), "one real number per label"),
    (lambda h, w, y: linear_statistics(h, w, y, 3), r"names, such as \('logp', 'entropy'\); got 3"),
    (lambda h, w, y: CE(ce_weight=torch.ones(60))(w, h, y), r"ce_weight must be \[61\]"),
    (lambda h, w, y: CE(reduction="sum")(w, h, y, num_items_in_batch=3), "the reduction is 'sum'"),
    (lambda h, w, y: CE()(w, h, y, token_weights=[1.0]), "token_weights must be a tensor, got"),
    (lambda h, w, y: policy(h, w, y, temperature=0.7), r"constructor, .*GRPOLoss\(temperature=0.7\)"),
    (lambda h, w, y: linear_statistics(h, w, y, selected=kept(y).to("meta")), "selected is on meta, the label on cpu"),
    (lambda h, w, y: linear_token_loss(h, w, y, None), "token_loss must be a function"),
    (lambda h, w, y: linear_token_loss(h, w, y, lambda s, l: None), "got NoneType"),
    (lambda h, w, y: weighted(h, w, y), "weights must be a dictionary such as"),
    (lambda h, w, y: JSD()(w, h, y, TeacherLogits([1.0])), r"takes logits \[..., Vt\].*got list"),
    (lambda h, w, y: JSD()(w, h, y, TeacherLogits(ONES[0])), "got Tensor without dimensions"),
    (lambda h, w, y: KL()(w, None, y, Teacher(h, w)), "hidden_states must be a tensor, got NoneType"),
    (lambda h, w, y: KL(top_k=62)(w, h, y, Teacher(h, w)), "at most the 61 columns of the head, got 62"),
    (lambda h, w, y: JSD()(w, h, y, Teacher(h, w, columns_correspond="no")), "must be True or False, got 'no'"),
    (lambda h, w, y: JSD()(w, h, y, TeacherLogits(h @ w.T, columns_correspond="no")), "True or False, got 'no'"),
    (lambda h, w, y: JSD()(w, h, y, TeacherLogits(lambda at: at, "61")), "needs columns="),
    (lambda h, w, y: DPO()(w, *[Completions(h, y, ref_logps=ONES.long())] * 2), "of the chosen .* floating .*int64"),
    (lambda h, w, y: KTO()(w, (h, y), preference_labels=ONES > 0, kl_completions=h), "must be Completions"),
    (lambda h, w, y: policy(h, w, y, ONES * 1j), "advantages must be floating point"),
    (lambda h, w, y: linear_logps(w, h, y), r"\(4, 5, 24\); were .* swapped\? .* take hidden_states, lm_head"),
    (lambda h, w, y: linear_logps(torch.nn.Linear(24, 61), w, y), "got Linear; a layer .*take hidden_states, lm_head"),
    (lambda h, w, y: DPO()(w, (h, y), (h, y), ref_weight=w), "ref_weight=, but no hidden .*; give them to Completions"),
    (lambda h, w, y: DPO()(w, *[Completions(h, y[:, :3], h)] * 2, ref_weight=w), r"need .*5\), got \(4, 3\)\. Give"),
    (lambda h, w, y: CE()(w, h, y[:, 1:]), r"got \(4, 4\)\. Shorten neither: with shift=True, each position"),
    # names
    (lambda h, w, y: DPO(loss_type="sigmoidd"), r"'sigmoidd' \(did you mean 'sigmoid'\?\); it must be"),
    (lambda h, w, y: GRPO(loss_type="gspo"), "'gspo'; use importance_sampling_level='sequence' with"),
    (lambda h, w, y: DPO(loss_type="kto_pair"), "use LigerFusedLinearKTOLoss, of single"),
    (lambda h, w, y: ll.patch(w, mlp=True), r"no mlp= \(did you mean 'mlps'\?\); its arguments are model,"),
    (lambda h, w, y: ll.patch(w, kernel=True), "no kernel=; its arguments .* kernels= is an argument of .*enable"),
    # functions
    (lambda h, w, y: F.dpo_loss([1.0], ONES, ONES, ONES), "chosen_logps must be a tensor, got list"),
    (lambda h, w, y: F.dpo_loss(ONES, ONES[:2], ONES, ONES), r"rejected_logps must be \[4\], as chosen_logps"),
    (
        lambda *_: F.dpo_loss(*[ONES] * 4, loss_type="ipo", chosen_lengths=[1], rejected_lengths=[1]),
        "chosen_lengths must be a tensor",
    ),
    (lambda h, w, y: F.cpo_loss(ONES, ONES, beta=-1), r"beta must lie in \(0.0, inf\), got -1"),
    (lambda h, w, y: F.kto_loss(ONES, ONES, ONES), "desirable must be bool, .*got torch.float32; pass desirable =="),
    (lambda h, w, y: F.kto_loss(ONES, ONES, ONES > 0, -1.0), r"kl must lie in \[0.0, inf\)"),
    (lambda h, w, y: F.bco_loss(ONES, ONES, ONES[:2] > 0), r"desirable must be \[4\], as rewards, got \[2\]"),
    (lambda h, w, y: F.sequence_logps(PER_TOKEN, MASK[:, 1:]), r"mask must be \[4, 5\], as logps"),
    (lambda *_: of_logps(acting=PER_TOKEN), "bool or integers, got torch.float32"),
    (lambda *_: of_logps(group="cp"), "group must be a torch.distributed"),
    (lambda h, w, y: F.high_entropy_mask(PER_TOKEN, MASK, 2.0), r"share must lie in \(0.0, 1.0\]"),
    (lambda h, w, y: F.cross_entropy(ONES, label_smoothing=0.1), "needs mean_logps="),
    (lambda h, w, y: F.dpo_loss(*[ONES] * 4, loss_type="ipo"), "chosen_lengths="),
    (lambda h, w, y: F.dpo_loss(*[ONES] * 4, loss_type="sft"), "chosen_nll="),
    (lambda h, w, y: F.divergence(PER_TOKEN, PER_TOKEN, Divergence.cosine()), "cosine similarity needs"),
    (lambda h, w, y: F.alpha_beta_divergence(PER_TOKEN, PER_TOKEN, -1.0, 0.5), r"must lie in \[0\.0"),
    (lambda h, w, y: F.alpha_beta_divergence(PER_TOKEN, PER_TOKEN, 0.5, -1.0), r"must lie in \[0\.0"),
    (lambda *_: F.sampler_weights(PER_TOKEN, PER_TOKEN, PER_TOKEN, "tis"), "unknown kind 'tis'"),
    (lambda *_: F.sampler_weights(PER_TOKEN, PER_TOKEN, PER_TOKEN, low=3.0), "high must lie in"),
    (lambda h, w, y: F.minillm_returns(PER_TOKEN, MASK, 2.0), r"gamma must lie in \[0.0, 1.0\]"),
    (lambda h, w, y: F.forward_kl(PER_TOKEN, PER_TOKEN[:, 1:]), r"log_q must be \[4, 5\], as log_p"),
    (lambda h, w, y: F.divergence(PER_TOKEN, PER_TOKEN, "kl"), "must be a Divergence, such"),
    (lambda h, w, y: F.sparse_divergence(PER_TOKEN, PER_TOKEN, Divergence.forward_kl(), "x"), "tail 'x'; .*bucket"),
    # calls with arguments in another order, of another kind or value
    (lambda h, w, y: linear_logps(h, w, y, bias=torch.zeros(60)), r"bias must be \[61\]"),
    (lambda h, w, y: linear_logps(h, w, y, workspace=100), r"=100 bytes is too small.*give at least \d+ bytes"),
    (lambda h, w, y: linear_statistics(h, w, y, ("logit",)), "unknown differentiable statistic 'logit'.*logp, entropy"),
    (lambda h, w, y: linear_statistics(h, w, y, metrics="selected_logps"), "use statistics='selected_.*selected="),
    (lambda h, w, y: CPO(loss_type="orpo"), "loss_type 'orpo'.*simpo"),
    (lambda h, w, y: DPO(f_divergence_type="kl"), "f_divergence_type.*js_divergence"),
    (lambda h, w, y: CPO(loss_type="alphapo"), r"reward_alpha.*0\.25"),
    (lambda h, w, y: ALONE(w, h[:3], y[:3]), r"got \[3\] rows, which are an odd number"),
    (lambda h, w, y: ALONE(w, (h[:2], y[:2]), (h[2:3], y[2:3])), "as many chosen as rejected"),
    (lambda h, w, y: ALONE(w, (h, y, h), (h, y)), "chosen must be Completions.*got tuple of 3"),
    (lambda h, w, y: ALONE(w, h, (h, y)), "labels must be a tensor"),
    (lambda h, w, y: ALONE(w, h.reshape(20, 24), y.reshape(20)), r"must be \[batch, tokens, hidden_size\] and labels"),
    (lambda h, w, y: ORPO()(w, h, y, None, y[:, :3]), r"must be \[2, 5\] or \[4, 5\], one per .*, got \[4, 3\]"),
    (lambda h, w, y: DPO()(w, h, y, None, [h], w), r"ref_input must be a tensor, got list of 1; .*hidden_states\[-1\]"),
    (lambda h, w, y: CE()(w, h, [y]), r"got list; pass torch.stack\(labels\)"),
    (lambda h, w, y: ALONE(w, h, y, temperature=0.5), r"one number .* constructor, \w+\(temperature=0.5\)"),
    (lambda h, w, y: DPO()(w, h, y), r"chosen completions have none.*ref_logps.*use_ref_model=False"),
    (lambda h, w, y: DPO()(w, h, y, None, h), "no ref_weight="),
    (lambda h, w, y: DPO()(w, h, y, None, h, w, ref_chosen_logps=ZEROS, ref_rejected_logps=ZEROS), "both ref_hidden"),
    (lambda h, w, y: DPO()(w, h, y, ref_chosen_logps=torch.zeros(3), ref_rejected_logps=ZEROS), r"\[2, 5\].*got \[3"),
    (lambda h, w, y: ALONE(w, *[Completions(h, y, h)] * 2, ref_weight=w), "built without one"),
    (
        lambda h, w, y: DPO()(w, Completions(h, y, h), Completions(h, y, ref_logps=ONES), ref_weight=w),
        "for both the chosen and the rejected",
    ),
    (lambda h, w, y: DPO()(w, (h[:2], y[:2]), (h[2:], y[2:]), ref_input=h), "give the reference in Completions"),
    (lambda h, w, y: ALONE(w, h, y, gold=(h, y)), "gold= are the completions of the likelihood"),
    (lambda h, w, y: CPO()(w, h, y, nll_target=y[:2], gold=(h, y)), "gold= are the completions of the likelihood"),
    (lambda h, w, y: linear_logps(h, w, y, ignore_index=None), "ignore_index must be an integer"),
    (lambda h, w, y: linear_logps(h, w.to(torch.uint8), y), "weight must be floating point.*dequantize"),
    (lambda h, w, y: DPO()(w, h, y, ref_chosen_logps=[1.0]), "of the chosen completions must be a tensor"),
    (lambda h, w, y: CE(ce_weight=[1.0]), "must be a tensor"),
    (lambda h, w, y: ll.ChunkedLoss()(w, h, y), "must define loss"),
    (lambda h, w, y: linear_token_loss(h, w, y, lambda s, y: s.logp.sum()), r"one value per token, .*\(\). Return it"),
    (lambda h, w, y: CE()(w, y, h), "hidden_states must be floating point.*token ids go into labels"),
    (lambda h, w, y: ALONE(w, (y, h), (y, h)), r"completions are \(hidden_states, labels\)"),
    (lambda h, w, y: CE()(w, h, y, nn.Linear(24, 61)), "such as model.lm_head goes where the weight"),
    (lambda h, w, y: JSD()(w, h, y, h @ w.t()), r"TeacherLogits\(logits\).*got Tensor"),
    (lambda h, w, y: ll.linear_divergence(h, w, y, h @ w.t(), Divergence.forward_kl()), r"\(logits\), got Tensor"),
    (lambda h, w, y: CE()(w.detach().to_sparse(), h, y), r"weight is a sparse.*weight.to_dense\(\)"),
    (lambda h, w, y: CE()(w, h @ w.t(), y), r"look like logits: pass the last hidden states; loss_inputs"),
    (lambda h, w, y: CE()(w, (h, h, h), y), r"a tuple of 3 .*hidden_states\[-1\]; for .* pass a list"),
    (lambda h, w, y: ALONE(w, ((h, h), y), (h, y)), r"outputs.hidden_states\[-1\]"),
    (lambda h, w, y: CE()(w, SimpleNamespace(last_hidden_state=h), y), r"pass its .last_hidden"),
    (lambda h, w, y: CE()(w, SimpleNamespace(logits=h), y), "loss_inputs.* gives head, hidden"),
    (lambda h, w, y: ALONE(w, h, h), r"labels must be token ids.* Completions\(hidden_"),
    (lambda h, w, y: DPO()(w, h, y, None, h, w[:20]), r"^of the reference model.* labels must be in \[0, 20\)"),
    (lambda h, w, y: linear_statistics([], w, []), "empty sequence; pass at least one tensor"),
    # shapes, dtypes and devices
    (lambda h, w, y: linear_logps(h, w.t(), y), r"hidden_states must be \[..., 61\]"),
    (lambda h, w, y: linear_logps(h, w, y.flatten()), r"Give both flat, or both \[4, 5\]"),
    (lambda h, w, y: linear_logps(h, w, y.float()), r"must be int64.*token ids.*\.long\(\)"),
    (lambda h, w, y: linear_logps(h.bfloat16(), w, y), "hidden_states torch.bfloat16, weight torch.float32.*cast"),
    (lambda h, w, y: linear_logps(h, w, y.masked_fill(y < 0, -1), compact=False), "from -1"),
    (lambda h, w, y: linear_logps(h, w, y.tolist()), r"got list; pass torch.tensor\(labels\)"),
    (lambda h, w, y: linear_logps(h[0, 0], w, y[0, 0]), r"hidden_states\[None\].*\[1, 24\].*labels"),
    (lambda h, w, y: linear_logps(h, w, y.to("meta")), "labels is on meta, the weight on cpu"),
    (lambda h, w, y: linear_logps(h, Head(w, adapters=(LowRank(w[:2, :8], w[:, :2]),)), y), r"a \(2, 8\) .*\(61, 24\)"),
    (lambda h, w, y: Head(Int8Weight(w), group="tp"), "ProcessGroup"),
    (lambda h, w, y: ll.register_quantized_weight(3, print), "a type"),
    (lambda h, w, y: ll.QuantizedWeight((3,), torch.float32, "cpu"), "vocab_size, hidden_size"),
    # heads
    (lambda *_: Head.of(of_class(get_output_embeddings=print)), r"whole model.*model\.get_output_embeddings\(\)"),
    (lambda *_: Head.of(of_class(base_layer=None)), "adapter around the head.*merged_weight"),
    (lambda *_: Head.of(nn.LayerNorm(8)), "LayerNorm, which is no nn.Linear"),
    (lambda *_: Head.of([1.0]), "weight must be a tensor"),
    (lambda h, w, y: Head(w[:0]), "must not be empty"),
    (lambda h, w, y: Head.of(Head(w, w[:, 0]), w[:, 0]), "bias was given twice"),
    (lambda h, w, y: Head.of(CAPPED(w), transform=LogitTransform(softcap=4.0)), "twice: the head has 3.0, and 4.0"),
    # how a loss is built, and how it is called
    (lambda h, w, y: DPO(*[1] * 12), "DPOLoss: too many positional arguments; its options are ignore_index, beta"),
    (lambda h, w, y: DPO(-100, ignore_index=-1), "multiple values for argument 'ignore_index'"),
    (lambda h, w, y: DPO(rpo_alpha=1.0), r"'rpo_alpha' \(use compute_nll_loss=True, and alpha="),
    (lambda h, w, y: DPO(0.1), r"ignore_index must be an integer, got 0\.1: .*, such as beta=0\.1"),
    (lambda h, w, y: CE(w, h), r"option ce_weight \(\[.*torch.float32\).*; add \(\), LigerFused"),
    (lambda h, w, y: CE().replace(ce_weight=torch.ones(3, 3)), "a tensor or a head as its option ce_weight"),
    (lambda h, w, y: CE()(h @ w.t(), y), r"'labels'; call it as loss\(head, hidden_.*no logits"),
    (lambda h, w, y: CE()(w, h, targets=y), r"it has no targets= \(did you mean 'labels'\?\); call .*, target"),
    (lambda h, w, y: CE()(w, h, y, head=w), "multiple values for argument 'head'; call it as"),
    (lambda h, w, y: CE()(lin_weight=w, head=w, hidden_states=h, labels=y), "two of .* labels= are the same argument"),
    (lambda h, w, y: DPO()(w, chosen=(h, y), hidden_states=h), "two of chosen=.*or of two forms"),
    (lambda h, w, y: DPO()(w, h), r"DPOLoss.*'rejected'.*\(head, chosen, rejected\)"),
    (lambda h, w, y: ll.ChunkedLoss()(w, h), r"'labels'; call it as loss\(head, hidden_states, labels\)"),
    (lambda h, w, y: DPO()(w, h, y, ref_model=w), r"no ref_model=; of .* loss_inputs\(ref_model"),
    (lambda h, w, y: DPO()(w, h, y, beta=0.1), r"no beta=; options go .* LigerFusedLinearDPOLoss\(beta=\.\.\.\)"),
    (
        lambda h, w, y: CE()(w, h, y, temperature=2.0, label_smoothing=0.1, x=1),
        r"no temp.*, x=; options go .*\(temperature=\.\.\., label_sm[^x]*; call",
    ),
    (lambda h, w, y: DPO(bta=1), "DPOLoss has no option 'bta' .*'beta'.*; its options are .*group"),
    (lambda h, w, y: linear_logps(h, w, y, tmperature=2.0), r"linear_logps: .* \(did you mean 'temper.* are hidden_"),
    (lambda h, w, y: F.dpo_loss(*[h[0, 0]] * 4, bta=1), r"^dpo_loss .*'beta'\?\); its .*chosen_nll, beta, "),
    (lambda h, w, y: AlphaBeta(), "^Liger.*: missing .*: 'alpha'; .* are alpha, beta"),
    (
        lambda *_: of_logps(epsilon=1),
        r"^grpo_loss has no argument 'epsilon' \(use epsilon_low.* logps, advantages, mask, .*beta, loss_type",
    ),
    (lambda h, w, y: ll.split_by_coefficient(len, [1.0]), r"such as torch.tensor\(advan.*got builtin_.* and list"),
    (lambda h, w, y: ll.split_by_coefficient(h, len), r"a function of indices .* \(4, 5, 24\) and builtin"),
    (lambda h, w, y: ll.split_by_coefficient(len, h, mask=y), "it has no mask=; its arguments are forward, coeff"),
    # several heads
    (lambda h, w, y: CE()([w] * 3, [h, h], y), "2 of hidden states, 3 of heads"),
    (lambda h, w, y: CE()([], [h], y), "0 of heads"),
    (lambda h, w, y: CE()([w, w], h, y, token_weights=[y]), "1 of token_weights"),
    (lambda h, w, y: CE()([w, w], h, y, token_weights=y[0]), "token_weights must be .*, one per label"),
    (lambda h, w, y: CE(shift=[1])([w, w], h, y), "1 of shift"),
    (lambda h, w, y: CE(shift=[1])(w, h, y), "are for K heads: give a list"),
    (lambda h, w, y: CE(head_weights=[1.0])([w, w], h, y), "1 of head_"),
    (lambda h, w, y: CE(head_weights=0.8), "a list of one number for each"),
    (lambda h, w, y: CE(head_weights=[-1.0]), "must lie in"),
    (lambda h, w, y: CE(shift=[1, -1]), "must not be negative"),
    (lambda h, w, y: CE(shift=[0.5]), "shift must be a number of positions"),
    (lambda h, w, y: linear_logps(h, [w, w], y, shift=[1]), "1 of shift"),
    (lambda h, w, y: linear_logps(h, [w, w], y, support=1), "support= does not work with l"),
    (lambda h, w, y: CE()([w, w.to("meta")], h, y), "of head 1 is on meta"),
    (lambda *t: of_inputs(*t, EACH, EACH[:, :2]), r"u must be \[4, 2\] or .*, one per label"),
    (lambda *t: of_inputs(*t, EACH[:, :2]), r"1 of token_inputs\['u'\]"),
    (lambda *t: of_inputs(*t, EACH[:, :2], None), "u must be a tensor, got NoneType"),
    (lambda h, w, y: linear_statistics([h, h], w, [y, y], "selected_logps", selected=[kept(y)]), "1 of selected:"),
    # losses on completions, and temperatures of theirs
    (lambda h, w, y: KTO()(w, (h, y), preference_labels=ONES > 0), "give one of kl_completions="),
    (lambda h, w, y: marked(h, w, y, kl_completions=(h[:1, 0], y[:1, 0])), "give one of kl_completions="),
    (lambda h, w, y: marked(h, w, y, kl=torch.zeros(3)), r"one number or \[4\]"),
    (lambda h, w, y: marked(h, w, y, preference_labels=None), "which completions are desirable"),
    (lambda h, w, y: marked(h, w, y, preference_labels=ONES[:2] > 0), r"must be \[4\], one per completion, got \[2\]"),
    (lambda h, w, y: marked(h, w, y, preference_labels=2 * ONES.int() - 3), "preference_labels must be bool"),
    (lambda h, w, y: marked(h, w, y, preference_labels=MASK.to("meta")[:, 0]), "on meta"),
    (lambda h, w, y: marked(h, w, y, loss=KTO(loss_type="apo_zero_unpaired")), "no divergence term"),
    (lambda h, w, y: shifted(h, w, y, sample_weights=torch.ones(2)), "sample_weights must .*, one per completion"),
    (lambda h, w, y: KTO()(w, (h, y), (h, y), preference_labels=ONES > 0, kl=0.0), "and not both"),
    (lambda h, w, y: ALONE(w, (h, y), (h, y), temperature=EACH), "give the reference in .* temperature in Compl"),
    (lambda h, w, y: ALONE(Head(w, transform=LogitTransform(2.0)), h, y, temperature=EACH), "given twice: with the"),
    # teachers
    (lambda h, w, y: taught(h, w, y, ll.Teachers([Teacher(h, w)] * 2, 0 * y + 2)), r"which must be in \[0, 2\)"),
    (lambda h, w, y: taught(h, w, y, ll.Teachers([Teacher(h, w)] * 2, 0 * y[:2])), "which must be integers"),
    (lambda h, w, y: taught(h, w, y, ll.Teachers([h], 0 * y)), "takes a list of Teacher"),
    (lambda h, w, y: ll.projected_teacher(h, w, torch.ones(61, 61)), "sparse tensor"),
    (lambda h, w, y: ll.projected_teacher(h, w, torch.ones(61, 60).to_sparse()), r"61\], of this teacher"),
    (lambda h, w, y: taught(h, w, y, Teacher(h, w), token_scaling="entropy"), "token_scaling="),
    (lambda h, w, y: taught(h, w, y, Teacher(h, w), token_scaling="probability", top_k=3), "token_scaling="),
    (lambda h, w, y: taught(h, w, y, Teacher(h, w), token_scaling="probability", weight_hard_loss=0.0), "token_scal"),
    (lambda h, w, y: CE(use_token_scaling=True, token_scaling="entropy"), "leave one of them out"),
    (lambda h, w, y: ll.linear_labels_loss(h, w, y[..., None], EACH), "weights must be"),
    (lambda h, w, y: linear_logps(h, w, torch.stack([y.clamp(min=0), torch.full_like(y, -5)], -1)), r"-5"),
    (lambda h, w, y: taught(h, w, y, Teacher(h[:, :-1], w)), "one per hidden state of the student"),
    (lambda h, w, y: Teacher(h, w, w[:-1, 0]), "bias must be"),
    (lambda h, w, y: taught(h, w, y, Teacher(h.long(), w)), "floating point"),
    (lambda h, w, y: taught(h, w, y, TeacherLogits((h @ w.T)[:, 1:])), "one per hidden state of the student"),
    (lambda h, w, y: taught(h, w, y, TeacherLogits(lambda at: ZEROS[None], columns=61)), "must return logits"),
    (lambda h, w, y: taught(h, w, y, TeacherTopK(*top(h, w, 61))), "indices must be in"),
    (lambda h, w, y: taught(h, w, y, TeacherTopK(top(h, w)[0], kept(y)[..., :1].expand(4, 5, 3))), "twice"),
    (lambda h, w, y: taught(h, w, y, TeacherTopK(-top(h, w)[0], kept(y))), "at most 0"),
    (lambda h, w, y: taught(h, w, y, TeacherTopK(top(h, w)[0], kept(y).int())), "int64"),
    (lambda h, w, y: taught(h, w, y, TeacherTopK(*top(h, w), tail="lump")), "'lump'; use 'bucket'"),
    (lambda h, w, y: taught(h, w, y, TeacherTopK(*(part[1:] for part in top(h, w)))), "one per hidden state of the"),
    (lambda h, w, y: Teacher(Head(w), h), r"got Head first: of head, states, labels = .*Teacher\(states, head\)"),
    (lambda h, w, y: ll.DistillationLoss(Divergence.jsd), r"Loss\(Divergence.reverse_kl\(\)\), got a function; call"),
    (lambda h, w, y: JSD()(w, h, y, Teacher(h, w), y), "with a teacher, the call is"),
    (lambda h, w, y: JSD()(w, h, y), "there is no teacher"),
    (lambda h, w, y: JSD()(w, h, y, Teacher(h, w), teacher=Teacher(h, w)), "given twice"),
    (lambda h, w, y: Cosine()(w, h, y, TeacherTopK(*top(h, w))), "cosine needs"),
    (lambda h, w, y: weighted(h, w, y, divergence=ONES), "divergence must be .*, one per label"),
    # policies
    (lambda *_: of_logps(loss_type="ref_kl"), "learns from a reference"),
    (lambda *_: of_logps(loss_type="a2po"), "learns from log-ratios to an old policy"),
    (lambda *_: of_logps(loss_type="icepop"), "pass the sampler's log-probabilities"),
    (lambda *_: of_logps(token_mask="kpop"), "pass the sampler's log-probabilities"),
    (lambda *_: of_logps(loss_type="real"), "needs prompts="),
    (lambda *_: of_logps(normalizer="prompt_mean"), "needs prompts="),
    (lambda h, w, y: policy(h, w, y, ref_per_token_logps=torch.ones(4, 4), beta=0.1), "ref_per_token_logps must be"),
    (lambda h, w, y: policy(h, w, y, beta=0.1), "weighs the divergence .* none. Pass ref_per_token_logps=, or .*ref_"),
    (lambda h, w, y: policy(h, w, y, prompts=ONES), "prompts must be integers"),
    (lambda h, w, y: policy(h, w, y, None), "advantages must be a tensor"),
    (lambda h, w, y: policy(h, w, y.flatten()), "labels must have one entry per hidden .*, one row per completion"),
    (lambda h, w, y: sampled(h, w, y, None), "give both, or none"),
    (lambda h, w, y: policy(h, w, y, sampler_topk=TeacherTopK(*top(h, w))), "give both, or none"),
    (lambda h, w, y: sampled(h, w, y, TeacherTopK(*top(h, w))), "old_per_token_logps"),
    (lambda h, w, y: sampled(h, w, y, None, importance_sampling_level="sequence"), "needs an objective of single tok"),
    (lambda h, w, y: sampled(h, w, y, top(h, w)), "must be a TeacherTopK"),
    (lambda h, w, y: sampled(h, w, y, TeacherTopK(*top(h, w), "none")), "leave tail="),
    (lambda h, w, y: sampled(h, w, y, TeacherTopK(*top(h, w, 61))), "of sampler_topk .*indices"),
    (lambda *_: of_logps(**CENTERS, old_logps=PER_TOKEN, sampler_topk_logps=EACH), "topk_logps must be a tensor"),
    # kept columns
    (lambda h, w, y: scored(h, w, y, kept(y).where(torch.arange(60).view(4, 5, 3) != 12, -1)), "token 4 .*add_label="),
    (lambda h, w, y: scored(h, w, y, kept(y)[..., [0, 1, 1]]), "twice: token .* pad with -1"),
    *(
        (lambda h, w, y, of=of: scored(h, w, y, kept(y).masked_fill(torch.arange(3) == 1, of)), r"must be in \[0, 61\)")
        for of in (61, -2, 2**33)
    ),
    (
        lambda h, w, y: scored(h, w, y, kept(y).flatten().index_fill(0, torch.tensor(7), -1), offsets()),
        r"in \[0, 61\), the rows of the weight \(offsets need no padding\); token 2 .* from -1 to",
    ),
    (lambda h, w, y: scored(h, w, y, kept(y)[:3]), r"ids must be \[4, 5, 3\], one per label"),
    (lambda h, w, y: scored(h, w, y, kept(y).flatten(), offsets()[1:]), r"offsets must be \[21\]"),
    *(
        (lambda h, w, y, at=(place, value): scored(h, w, y, kept(y).flatten(), offsets(at)), "rise from 0 to 60")
        for place, value in ((20, 59), (0, 1), (3, 2))
    ),
    (lambda h, w, y: TokenSupport(kept(y), add_label=2), "must be True or False, got 2"),
    (lambda h, w, y: TokenSupport(kept(y), offsets()), r"takes ids \[P\]"),
    (lambda h, w, y: TokenSupport(EACH), "int64 or int32"),
    (lambda h, w, y: scored(h[:0], w, y[:0], kept(y).flatten(), offsets()[:1]), "60 ids, but there are no labels"),
    (lambda h, w, y: linear_logps(h, w, y, support=kept(y)), "must be a TokenSupport"),
    (lambda h, w, y: scored(h, w, y + 61, kept(y)), r"in \[0, 61\).*found the label"),
    (lambda h, w, y: scored(h, w * 1, y, kept(y), sparse_grad=True), "sparse_grad=True.* weight that is a parameter"),
    (lambda h, w, y: ll.linear_topk(h, w, 0, y), "positive integer"),
    (lambda h, w, y: ll.linear_topk(h, w, 62, y), "at most the 61"),
    # temperatures of tokens
    (lambda h, w, y: tempered(h, w, y, EACH[:3]), r"one for each hidden state, \[4, 5\], got shape \[3, 5\]"),
    (lambda h, w, y: tempered(h, w, y, EACH.long()), "floating-point tensor with one for each token"),
    (lambda h, w, y: tempered(h, w, y, EACH.clone().requires_grad_()), r"pass temperature.detach\(\)"),
    (lambda h, w, y: tempered(h, w, y, EACH.masked_fill(torch.arange(5) == 2, 0.0)), "finite for .*got 0.0 for 4 of"),
    (
        lambda h, w, y: linear_statistics([h, h[:3]], w, [y, y[:3]], transform=LogitTransform(EACH.flatten())),
        r"got shape \[20\].* of several tensors of hidden states, \[T\] has all of their tokens",
    ),
    (lambda h, w, y: tempered(h, Head(w, transform=LogitTransform(0.5)), y, EACH), "temperature was given twice"),
    (
        lambda h, w, y: GRPO(temperature=0.5)(h, w, y, MASK, ONES, temperature=EACH),
        "built with 0.5, and the call has one per token",
    ),
    (lambda h, w, y: JSD()(w, h, y, Teacher(h, Head(w.detach(), transform=LogitTransform(EACH)))), "per token, .*be 1"),
    # statistics and losses of a user's own
    (lambda *_: register_statistic("logp", torch.exp), "already"),
    (lambda *_: register_statistic("a b", torch.exp), "identifier"),
    (lambda *_: register_statistic("mine", lambda x: x.exp().sum(-1)), "one value per entry"),
    (lambda *_: register_statistic("mine", lambda x: x.exp() / x.exp().sum()), "elementwise"),
    (lambda *_: register_statistic("mine", lambda x: 1 / (x + 1e4)), "not finite"),
    (lambda *t: of_pairs(*t, lambda pairs: pairs.chosen_logps.mean()), r"one .* per pair, .*\[2\].*float64.*\(\)"),
    (lambda *t: of_pairs(*t, lambda pairs: None), r"Mine.pair_loss must return .*, got NoneType"),
    (lambda *t: of_pairs(*t, lambda pairs: pairs.chosen_logps > 0), r"return .*, got torch.bool of shape \(2,\)"),
    (lambda *t: of_pairs(*t, lambda pairs: pairs.chosen_logp), r"no 'chosen_logp' \(did you .*'\?\); they have"),
    (
        lambda *t: of_pairs(*t, lambda p: p.chosen_logps, sequence_weight=lambda self, s, mask: s.entropy.sum(-1)),
        "Mine.sequence_weight reads .*entropy, .* only logp, mean_logit. Add 'entropy' to the metrics that Mine names",
    ),
    (lambda *t: of_statistics(*t, lambda s, mask: mask.sum()), "return .* one floating-point .*, got torch.int64"),
    (lambda *t: of_statistics(*t, lambda s, mask: -s.logp), r"Mine.loss must .* one floating-point .* \(4, 5\)"),
    (lambda *t: of_statistics(*t, lambda s, mask: -s.logp.sum() + 0.1 * s.entropy.sum()), "reads .*Add 'entropy'"),
    (lambda *t: of_tokens(*t, lambda s, y: -s.logp + s.entropy), r"reads .*entropy, .*Add 'entropy' to statistics="),
    (lambda *t: of_tokens(*t, lambda s, y: s.selected_logps.sum(-1)), r"Use statistics='selected_.*selected=\.$"),
    (lambda *t: of_tokens(*t, lambda s, y: s.argmax.float()), "only logp. Use metrics='argmax', which has no"),
    (lambda *t: of_tokens(*t, lambda s, y: s.entropi), "no statistic 'entropi'; it must be one of logp, entropy"),
    (lambda h, w, y: F.grpo_loss(h[..., 0], ONES, y[:, 1:]), r"must both be \[B, T\], got \(4, 5\) and \(4, 4\)"),
    *(
        (lambda *_, name=name: of_logps(**{name: torch.ones(3)}), f"^{name} must be")
        for name in ("old_logps", "ref_logps", "sampling_logps", "is_ratio")
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_wrong_inputs_are_named(call, message):
    with pytest.raises((TypeError, ValueError, NotImplementedError, AttributeError), match=message):
        call(HIDDEN.detach(), WEIGHT, LABELS)


class NoProducts(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        assert function.overloadpacket.__name__ not in ("mm", "addmm", "bmm", "baddbmm"), "the projection was computed"
        return function(*arguments, **(keywords or {}))


#: Inputs of a policy's tokens.
OF_TOKENS = ("advantages", "old_per_token_logps", "sampling_per_token_logps", "vllm_is_ratio", "mask")


def test_bad_input_is_found_before_any_projection():
    ids, given = LABELS.clamp(min=0), {"advantages": ONES, "mask": MASK}
    reference = {"ref_input": HIDDEN.detach(), "ref_weight": WEIGHT.detach()}
    outside = LABELS.index_fill(0, torch.tensor([0]), 61)
    for call, message in (
        (lambda: linear_logps(HIDDEN, WEIGHT, outside), "labels must be in"),
        (lambda: CE(ce_weight=torch.ones(61))(WEIGHT, HIDDEN, outside), "labels must be in"),
        (lambda: DPO(use_ref_model=False)(WEIGHT, HIDDEN, outside), "labels must be in"),
        (lambda: CE()([WEIGHT] * 3, HIDDEN, [LABELS, LABELS, outside]), r"labels must be in \[0, 61\)"),
        (lambda: Cosine(top_k=3)(WEIGHT, HIDDEN, LABELS, Teacher(HIDDEN, WEIGHT)), "cosine needs all logits"),
        (
            lambda: DPO()(WEIGHT, HIDDEN, LABELS, None, HIDDEN, torch.randn(61, 7)),
            r"of the reference model.*hidden_states must be \[..., 7\]",
        ),
        *(
            (partial(GRPO(), HIDDEN, WEIGHT, ids, **{**given, name: torch.ones(4, 6)}, **reference), f"{name} must be")
            for name in OF_TOKENS
        ),
    ):
        with NoProducts(), pytest.raises(ValueError, match=message):
            call()
    with NoProducts(), pytest.raises(AssertionError, match="was computed"):
        linear_logps(HIDDEN, WEIGHT, LABELS)


@pytest.mark.parametrize("items", [torch.tensor([3, 4]), -1, -2.0, torch.tensor(-1), float("nan"), [3], True])
def test_num_items_in_batch_is_one_number_that_is_not_negative(items):
    given, mask = {"num_items_in_batch": items}, LABELS >= 0
    for call in (
        lambda: CE()(WEIGHT, HIDDEN, LABELS, **given),
        lambda: JSD()(WEIGHT, HIDDEN, LABELS, Teacher(HIDDEN, WEIGHT), **given),
        lambda: GRPO(beta=0.0)(HIDDEN, WEIGHT, LABELS, mask, ONES, **given),
        lambda: F.grpo_loss(HIDDEN[..., 0], ONES, mask, **given),
    ):
        with pytest.raises((TypeError, ValueError), match="num_items_in_batch must (be|lie)"):
            call()
    same = [CE()(WEIGHT, HIDDEN, LABELS, num_items_in_batch=n) for n in (7, np.int64(7), torch.tensor([[7]]))]
    assert torch.equal(same[0], same[1])
    assert torch.equal(same[0], same[2])


def test_a_weight_of_which_there_is_a_part_is_refused(one_process):
    part = distribute_tensor(WEIGHT.detach(), init_device_mesh("cpu", (1,)), [Shard(0)])
    for call in (lambda: CE()(part, HIDDEN, LABELS), lambda: linear_logps(HIDDEN, part, LABELS)):
        with pytest.raises(TypeError, match=r"weight is a DTensor.*liger_losses.patch.*weight.full_tensor\(\)"):
            call()
    CE()(part.full_tensor(), HIDDEN, LABELS)


def test_temperatures_of_another_shape_where_ranks_share_the_vocabulary(one_process):
    """Ranks compare temperatures before they are gathered."""
    head = Head(WEIGHT, group=dist.group.WORLD)
    for wrong in (torch.ones(len(LABELS)), torch.ones(LABELS.numel() + 1), torch.ones(LABELS.shape, device="meta")):
        with pytest.raises(ValueError, match="temperature (must be a number, or a tensor|is on meta)"):
            linear_logps(HIDDEN, head, LABELS, temperature=wrong)
    negative, group = Head(WEIGHT, transform=LogitTransform(-EACH)), dist.group.WORLD
    for call in (
        lambda: KL(group=group)(WEIGHT, HIDDEN, LABELS, Teacher(HIDDEN, WEIGHT), temperature=-EACH),
        lambda: CE(group=group)(negative, HIDDEN, LABELS),
        lambda: SimPO(group=group)(negative, HIDDEN, LABELS),
    ):
        with pytest.raises(ValueError, match="positive and finite"):
            call()


def test_numbers_of_numpy_are_numbers_and_bools_are_not():
    for number in (np.float32(0.5), np.float64(0.5)):
        for build in (
            lambda x: DPO(use_ref_model=False, beta=x, softcap=x)(WEIGHT, HIDDEN, LABELS)[0],
            lambda x: CE(label_smoothing=x, temperature=x)(WEIGHT, HIDDEN, LABELS),
            lambda x: JSD(beta=x)(WEIGHT, HIDDEN, LABELS, Teacher(HIDDEN, WEIGHT))[0],
            lambda x: linear_logps(HIDDEN, WEIGHT, LABELS, logit_scale=x, chunk_size=np.int64(2)),
            lambda x: F.grpo_loss(HIDDEN[..., 0], ONES, LABELS >= 0, beta=x, epsilon_low=x),
        ):
            torch.testing.assert_close(build(number), build(0.5))
    for name in ("softcap", "temperature", "logit_scale"):
        with pytest.raises(TypeError, match=f"{name} must be a number, got True"):
            linear_logps(HIDDEN, WEIGHT, LABELS, **{name: True})


def test_what_is_right_stays_right():
    assert torch.isfinite(F.dpo_loss(ONES, ONES, ONES[0] * 0, ONES[0] * 0)).all()
    assert torch.isfinite(policy(HIDDEN, WEIGHT, LABELS, ONES.long())[0])
    assert linear_logps(HIDDEN, WEIGHT, LABELS, shift=1).shape == LABELS.shape
    logits, types, weights = torch.zeros(4, 5, 61), np.array(["sigmoid", "hinge"]), np.array([1.0, 0.5])
    JSD()(WEIGHT, HIDDEN, LABELS, TeacherLogits(lambda at: logits.flatten(0, 1)[: len(at)], np.int64(61)))
    DPO(shift=np.int64(1), compact=np.True_, loss_type=types, loss_weights=weights)
    linear_logps(HIDDEN, WEIGHT, LABELS, shift=np.int64(1))
    assert torch.equal(F.sequence_logps(PER_TOKEN, 3 * MASK.int()), F.sequence_logps(PER_TOKEN, MASK))
    acted = [F.grpo_loss(PER_TOKEN, ONES, MASK, acting=acting) for acting in (MASK, MASK.int())]
    assert torch.equal(*acted)


def test_values_expand_to_the_shape_of_the_first():
    logps, teacher = torch.randn(4, 5), torch.randn(5).log_softmax(-1)
    for weights in (torch.rand(5), torch.rand(4, 1), MASK):
        found = F.sequence_logps(logps, MASK[0], weights=weights, average=True)
        torch.testing.assert_close(found, (logps * weights).mean(1), check_dtype=False)
    everything = torch.tensor(True)
    torch.testing.assert_close(F.sequence_logps(logps, everything, average=True), logps.mean(1), check_dtype=False)
    torch.testing.assert_close(F.kto_loss(ONES, ONES, ONES > 0, ONES[:1]), F.kto_loss(ONES, ONES, ONES > 0, 1.0))
    torch.testing.assert_close(F.forward_kl(logps, teacher), F.forward_kl(logps, teacher.expand(4, 5)))
    with pytest.raises(ValueError, match=r"ref_logps must be \[4\], as logps, got \[4, 1\]"):
        F.bco_loss(ONES, ONES[:, None], ONES > 0)


def test_numbers_may_be_on_the_cpu():
    rewards = torch.ones(4, device="meta")
    assert F.bco_loss(rewards, rewards, rewards > 0, torch.tensor(0.5)).device == rewards.device
    with pytest.raises(ValueError, match="shift is on cpu, rewards on meta"):
        F.bco_loss(rewards, rewards, rewards > 0, ONES)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: CE()(x.new_ones(5, 4), x, torch.ones(3, dtype=torch.int64)),
        lambda x: linear_logps(x, x.new_ones(5, 4), torch.ones(3, dtype=torch.int64)).sum(),
    ],
)
def test_functional_transforms_say_that_they_are_not_supported(transform, function):
    inputs = torch.ones(2, 3, 4) if transform is torch.func.vmap else torch.ones(3, 4)
    with pytest.raises(RuntimeError, match="torch.autograd.grad, called for one"):
        transform(function)(inputs)


@pytest.mark.parametrize("name", [*LOSSES, *OPERATIONS])
def test_tensors_without_values(name):
    def call(without_values):
        d = {key: without_values(value) for key, value in batch(torch.float32).items()}
        case_of(name)(Head(d["weight"]), Head(d["ref_weight"]), d)

    with pytest.raises(ValueError, match=r"on the meta device, where tensors have a shape and no values.*to_empty"):
        call(lambda value: value.to("meta"))
    said = pytest.raises(ValueError, match="of FakeTensorMode, whose tensors have a shape and no values")
    with FakeTensorMode(allow_non_fake_inputs=True), said:
        call(lambda value: torch.empty(value.shape, dtype=value.dtype, device="meta"))
