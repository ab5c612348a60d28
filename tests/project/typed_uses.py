"""What a type checker knows of losses and operations: mypy checks this file, and nothing runs it.

Each `type: ignore` is an error that a checker must find; one that it does not find is an error of its own.
"""

from typing import Any, TypeAlias

from torch import Tensor
from typing_extensions import assert_type

import liger_losses as ll

Preference: TypeAlias = tuple[Tensor, ll.PreferenceMetrics]
Distillation: TypeAlias = tuple[Tensor, ll.DistillationMetrics]
Policy: TypeAlias = tuple[Tensor, ll.PolicyMetrics | ll.PolicyMetricsWithoutKL]


def losses(head: Tensor, hidden: Tensor, labels: Tensor, chosen: ll.Completions, teacher: ll.Teacher) -> None:
    cross_entropy = ll.LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1)
    assert_type(cross_entropy(head, hidden, labels), Tensor)
    assert_type(cross_entropy(head=head, hidden_states=hidden, labels=labels), Tensor)
    assert_type(cross_entropy(lin_weight=head, _input=hidden, target=labels), Tensor)
    assert_type(cross_entropy([head, head], hidden, labels), tuple[Any, ll.ManyHeadsMetrics])
    output: ll.CrossEntropyOutput = ll.LigerFusedLinearCrossEntropyLoss(return_z_loss=True)(head, hidden, labels)
    print(output.z_loss)
    assert_type(ll.LigerFusedLinearDPOLoss(beta=0.1)(head, chosen, (hidden, labels)), Preference)
    assert_type(ll.LigerFusedLinearDPOLoss()(head=head, chosen=chosen, rejected=chosen, ref_weight=head), Preference)
    assert_type(ll.LigerFusedLinearDPOLoss()(head, hidden, labels, ref_input=hidden), Preference)
    assert_type(ll.LigerFusedLinearORPOLoss()(head, chosen, chosen), tuple[Tensor, ll.ORPOMetrics])
    assert_type(ll.LigerFusedLinearKTOLoss()(head, completions=chosen, kl=0.0), tuple[Tensor, ll.UnpairedMetrics])
    assert_type(ll.LigerFusedLinearJSDLoss(beta=0.5)(head, hidden, labels, teacher), Distillation)
    assert_type(ll.LigerFusedLinearMiniLLMLoss()(head, hidden, labels, teacher=teacher), Distillation)
    policy = ll.LigerFusedLinearGRPOLoss(loss_type="dapo", beta=0.0)
    assert_type(policy(hidden, head, labels, labels, hidden), Policy)
    policy(head, hidden, labels, labels, hidden, None, "ref_per_token_logps")  # type: ignore[arg-type]
    ll.LigerFusedLinearJSDLoss(beta=0.5)(hidden, head, hidden, head, labels, hidden, hidden)  # biases by position

    assert_type(cross_entropy([head, head], [hidden, hidden], labels), tuple[Any, ll.ManyHeadsMetrics])
    ll.LigerFusedLinearJSDLoss(0.0, 1.0, 0.3)
    ll.LigerFusedLinearAlphaBetaLoss(0.2, 0.7, 0.0)
    ll.LigerFusedLinearGRPOLoss(0.1)
    ll.LigerFusedLinearCrossEntropyLoss(hidden)
    ll.DistillationLoss(ll.Divergence.jsd(), 0.0, 1.0, top_k=3)
    assert_type(ll.LigerFusedLinearDPOLoss().replace(beta=0.2), ll.LigerFusedLinearDPOLoss)

    ll.LigerFusedLinearKTOLoss(loss_weights=1)  # type: ignore[call-arg]
    ll.LigerFusedLinearGRPOLoss(epsilon=0.2)  # type: ignore[call-arg]
    ll.DistillationLoss()  # type: ignore[call-arg]
    ll.PreferenceLoss(alfa=0.2)  # type: ignore[call-arg]
    ll.LigerFusedLinearMiniLLMLoss(top_k=3)  # type: ignore[call-arg]
    ll.LigerFusedLinearORPOLoss()(head, hidden)  # type: ignore[call-overload]
    ll.LigerFusedLinearJSDLoss(beta=0.5, foo=3)  # type: ignore[call-arg]
    ll.LigerFusedLinearDPOLoss(label_smooting=0.1)  # type: ignore[call-arg]
    ll.LigerFusedLinearDPOLoss(beta="0.1")  # type: ignore[arg-type]
    ll.LigerFusedLinearCrossEntropyLoss(reduction="sum", smoothing=0.1)  # type: ignore[call-overload]
    cross_entropy(head, hidden)  # type: ignore[call-overload]
    ll.LigerFusedLinearDPOLoss()(head, chosen, rejcted=chosen)  # type: ignore[call-overload]


def operations(head: Tensor, hidden: Tensor, labels: Tensor, teacher: ll.Teacher) -> None:
    assert_type(ll.linear_logps(hidden, head, labels), Tensor)
    assert_type(ll.linear_logps(hidden_states=hidden, head=head, labels=labels, shift=True), Tensor)
    assert_type(ll.linear_logps(hidden, head, labels, entropy=True), ll.Statistics)
    assert_type(ll.linear_logps([hidden, hidden], head, labels), list[Any])
    assert_type(ll.linear_statistics(hidden, head, labels, ("logp", "entropy")), ll.Statistics)
    assert_type(ll.linear_divergence(hidden, head, labels, teacher, ll.Divergence.reverse_kl()), ll.Statistics)
    assert_type(ll.functional.dpo_loss(hidden, hidden, hidden, hidden, beta=0.1), Tensor)
    dpo = ll.functional.dpo_loss
    assert_type(dpo(hidden, hidden, hidden, hidden, chosen_lengths=labels, loss_type=["ipo"]), Tensor)
    named = dpo(chosen_logps=hidden, rejected_logps=hidden, ref_chosen_logps=hidden, ref_rejected_logps=hidden)
    assert_type(named, Tensor)
    assert_type(ll.functional.grpo_loss(hidden, hidden, hidden, old_logps=hidden, loss_type="dapo", beta=0.0), Tensor)
    ll.functional.dpo_loss(hidden, hidden, hidden, hidden, bta=0.1)  # type: ignore[call-arg]
    ll.functional.grpo_loss(hidden, hidden, hidden, epsilon=0.1)  # type: ignore[call-arg]
    ll.linear_logps(hidden, head, labels, temprature=1.0)  # type: ignore[call-overload]


class Own(ll.PreferenceLoss):
    """A loss of one's own."""

    def __init__(self, power: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.power = power

    def pair_loss(self, pairs: ll.Pairs) -> Tensor:
        return (pairs.chosen_logratios - pairs.rejected_logratios).abs() ** self.power


class OwnOfTokens(ll.ChunkedLoss):
    """Another, which reads an input of its own."""

    def loss(self, statistics: ll.Statistics, mask: Tensor, scale: float = 1.0) -> Tensor:
        return -scale * statistics.logp.sum() / mask.sum()
