"""What a type checker knows of losses and operations: mypy checks this file, and nothing runs it.

Each `type: ignore` is an error that a checker must find; one that it does not find is an error of its own.
"""

from typing import Any, TypeAlias

from torch import Tensor
from typing_extensions import assert_type

from liger_losses import (
    ChunkedLoss,
    Completions,
    CrossEntropyOutput,
    DistillationLoss,
    DistillationMetrics,
    Divergence,
    LigerFusedLinearAlphaBetaLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearMiniLLMLoss,
    LigerFusedLinearORPOLoss,
    ManyHeadsMetrics,
    ORPOMetrics,
    Pairs,
    PolicyMetrics,
    PolicyMetricsWithoutKL,
    PreferenceLoss,
    PreferenceMetrics,
    Statistics,
    Teacher,
    UnpairedMetrics,
    functional,
    linear_divergence,
    linear_logps,
    linear_statistics,
)

Preference: TypeAlias = tuple[Tensor, PreferenceMetrics]


def losses(head: Tensor, hidden: Tensor, labels: Tensor, chosen: Completions, teacher: Teacher) -> None:
    cross_entropy = LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1)
    assert_type(cross_entropy(head, hidden, labels), Tensor)
    assert_type(cross_entropy(head=head, hidden_states=hidden, labels=labels), Tensor)
    assert_type(cross_entropy(lin_weight=head, _input=hidden, target=labels), Tensor)
    assert_type(cross_entropy([head, head], hidden, labels), tuple[Any, ManyHeadsMetrics])
    output: CrossEntropyOutput = LigerFusedLinearCrossEntropyLoss(return_z_loss=True)(head, hidden, labels)
    print(output.z_loss)
    assert_type(LigerFusedLinearDPOLoss(beta=0.1)(head, chosen, (hidden, labels)), Preference)
    assert_type(LigerFusedLinearDPOLoss()(head=head, chosen=chosen, rejected=chosen, ref_weight=head), Preference)
    assert_type(LigerFusedLinearDPOLoss()(head, hidden, labels, ref_input=hidden), Preference)
    assert_type(LigerFusedLinearORPOLoss()(head, chosen, chosen), tuple[Tensor, ORPOMetrics])
    assert_type(LigerFusedLinearKTOLoss()(head, completions=chosen, kl=0.0), tuple[Tensor, UnpairedMetrics])
    assert_type(LigerFusedLinearJSDLoss(beta=0.5)(head, hidden, labels, teacher), tuple[Tensor, DistillationMetrics])
    assert_type(
        LigerFusedLinearMiniLLMLoss()(head, hidden, labels, teacher=teacher), tuple[Tensor, DistillationMetrics]
    )
    policy = LigerFusedLinearGRPOLoss(loss_type="dapo", beta=0.0)
    assert_type(policy(hidden, head, labels, labels, hidden), tuple[Tensor, PolicyMetrics | PolicyMetricsWithoutKL])
    policy(head, hidden, labels, labels, hidden, None, "ref_per_token_logps")  # type: ignore[arg-type]
    LigerFusedLinearJSDLoss(beta=0.5)(hidden, head, hidden, head, labels, hidden, hidden)  # biases by position

    assert_type(cross_entropy([head, head], [hidden, hidden], labels), tuple[Any, ManyHeadsMetrics])
    LigerFusedLinearJSDLoss(0.0, 1.0, 0.3)
    LigerFusedLinearAlphaBetaLoss(0.2, 0.7, 0.0)
    LigerFusedLinearGRPOLoss(0.1)
    LigerFusedLinearCrossEntropyLoss(hidden)
    DistillationLoss(Divergence.jsd(), 0.0, 1.0, top_k=3)
    assert_type(LigerFusedLinearDPOLoss().replace(beta=0.2), LigerFusedLinearDPOLoss)

    LigerFusedLinearKTOLoss(loss_weights=1)  # type: ignore[call-arg]
    LigerFusedLinearGRPOLoss(epsilon=0.2)  # type: ignore[call-arg]
    DistillationLoss()  # type: ignore[call-arg]
    PreferenceLoss(alfa=0.2)  # type: ignore[call-arg]
    LigerFusedLinearMiniLLMLoss(top_k=3)  # type: ignore[call-arg]
    LigerFusedLinearORPOLoss()(head, hidden)  # type: ignore[call-overload]
    LigerFusedLinearJSDLoss(beta=0.5, foo=3)  # type: ignore[call-arg]
    LigerFusedLinearDPOLoss(label_smooting=0.1)  # type: ignore[call-arg]
    LigerFusedLinearDPOLoss(beta="0.1")  # type: ignore[arg-type]
    LigerFusedLinearCrossEntropyLoss(reduction="sum", smoothing=0.1)  # type: ignore[call-overload]
    cross_entropy(head, hidden)  # type: ignore[call-overload]
    LigerFusedLinearDPOLoss()(head, chosen, rejcted=chosen)  # type: ignore[call-overload]


def operations(head: Tensor, hidden: Tensor, labels: Tensor, teacher: Teacher) -> None:
    assert_type(linear_logps(hidden, head, labels), Tensor)
    assert_type(linear_logps(hidden_states=hidden, head=head, labels=labels, shift=True), Tensor)
    assert_type(linear_logps(hidden, head, labels, entropy=True), Statistics)
    assert_type(linear_logps([hidden, hidden], head, labels), list[Any])
    assert_type(linear_statistics(hidden, head, labels, ("logp", "entropy")), Statistics)
    assert_type(linear_divergence(hidden, head, labels, teacher, Divergence.reverse_kl()), Statistics)
    assert_type(functional.dpo_loss(hidden, hidden, hidden, hidden, beta=0.1), Tensor)
    assert_type(
        functional.dpo_loss(
            chosen_logps=hidden,
            rejected_logps=hidden,
            ref_chosen_logps=hidden,
            ref_rejected_logps=hidden,
            chosen_lengths=labels,
            loss_type=["ipo"],
        ),
        Tensor,
    )
    assert_type(functional.grpo_loss(hidden, hidden, hidden, old_logps=hidden, loss_type="dapo", beta=0.0), Tensor)
    functional.dpo_loss(hidden, hidden, hidden, hidden, bta=0.1)  # type: ignore[call-arg]
    functional.grpo_loss(hidden, hidden, hidden, epsilon=0.1)  # type: ignore[call-arg]
    linear_logps(hidden, head, labels, temprature=1.0)  # type: ignore[call-overload]


class Own(PreferenceLoss):
    """A loss of one's own."""

    def __init__(self, power: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.power = power

    def pair_loss(self, pairs: Pairs) -> Tensor:
        return (pairs.chosen_logratios - pairs.rejected_logratios).abs() ** self.power


class OwnOfTokens(ChunkedLoss):
    """Another, which reads an input of its own."""

    def loss(self, statistics: Statistics, mask: Tensor, scale: float = 1.0) -> Tensor:
        return -scale * statistics.logp.sum() / mask.sum()
