"""A callback for transformers' Trainer: megasoftmax while it trains.

    trainer = Trainer(model, ..., callbacks=[MegasoftmaxCallback()])

When training begins the model is patched, and the report is printed where the Trainer prints its
losses; when it ends, with an exception too, the model is what it was.
"""

import functools
from typing import Any

import torch
from tqdm import tqdm
from transformers import Trainer, TrainerCallback

from megasoftmax.integrations.patching import PatchedModel, patch_model


class MegasoftmaxCallback(TrainerCallback):
    """`patch_model` when training begins, `unpatch` when it ends.

    Transformers has no event for an exception. So the first callback that is made wraps
    `Trainer.train`: an exception unpatches the model and goes on.

    Args:
        options: those of `patch_model`.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._patched: PatchedModel | None = None
        self._has_printed = False
        _unpatch_after_exceptions()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Raises what `patch_model` raises."""
        self.unpatch()
        self._patched = patch_model(model, **self._options)
        if not self._has_printed and state.is_world_process_zero:
            dtype = torch.bfloat16 if args.bf16 else torch.float16
            with torch.autocast(args.device.type, dtype, enabled=args.bf16 or args.fp16):
                report = str(self._patched)  # of calls in the types that training has
            tqdm.write(f"megasoftmax:\n{report}")  # as losses are, beside a bar
            self._has_printed = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.unpatch()

    def unpatch(self) -> None:
        """Give the model back what it was; harmless where nothing is patched."""
        if self._patched is not None:
            self._patched.unpatch()
            self._patched = None


def _unpatch_after_exceptions() -> None:
    train = Trainer.train
    if hasattr(train, "unpatches"):
        return

    @functools.wraps(train)
    def train_and_unpatch(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        try:
            return train(self, *args, **kwargs)
        except BaseException:
            for callback in reversed(self.callback_handler.callbacks):
                if isinstance(callback, MegasoftmaxCallback):
                    callback.unpatch()
            raise

    train_and_unpatch.unpatches = True  # type: ignore[attr-defined]
    Trainer.train = train_and_unpatch
