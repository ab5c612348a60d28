"""The callback of transformers' trainer."""

import pickle

from tests.integrations.models import is_patched, llama


def test_trainer_callback(tmp_path):
    model = llama()
    from transformers import Trainer, TrainingArguments

    from liger_losses.integrations.trainer import PatchCallback

    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    trainer = Trainer(model, arguments, callbacks=[PatchCallback(rope=False)])
    assert is_patched(model)
    trainer.model = trainer.callback_handler.model = llama()  # as train() does with model_init=
    trainer.callback_handler.on_train_begin(arguments, trainer.state, trainer.control)
    assert is_patched(trainer.model)
    assert pickle.loads(pickle.dumps(PatchCallback(rope=False))).options == {"rope": False}
