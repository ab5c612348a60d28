"""What TRL has is here."""

import pytest

from liger_losses.chunked.losses.dpo import DPO_LOSSES

pytestmark = pytest.mark.peers


def test_every_dpo_loss_type_of_trl_is_here():
    dpo_config = pytest.importorskip("trl", reason="TRL is not installed").DPOConfig
    text = dpo_config.__dataclass_fields__["loss_type"].metadata["help"]
    named = {name for name in DPO_LOSSES if f"`'{name}'`" in text}
    assert named == set(DPO_LOSSES), set(DPO_LOSSES) - named
    mentioned = {part.split("`")[0].strip("'") for part in text.split("`'")[1:]}
    assert mentioned <= set(DPO_LOSSES), mentioned - set(DPO_LOSSES)
