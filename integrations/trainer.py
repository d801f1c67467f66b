"""A callback for transformers' Trainer: megasoftmax while it trains.

    trainer = Trainer(model, ..., callbacks=[MegasoftmaxCallback()])

When training begins the model is patched, and the report is logged at level INFO of this module's
logger; when it ends the model is what it was. Where training ends with an exception the model stays
patched, until the callback's next training or `callback.unpatch()`.
"""

import logging
from typing import Any

from transformers import TrainerCallback

from megasoftmax.integrations.patching import PatchedModel, patch_model

_LOGGER = logging.getLogger(__name__)


class MegasoftmaxCallback(TrainerCallback):
    """`patch_model` when training begins, `unpatch` when it ends.

    Args:
        options: those of `patch_model`.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._patched: PatchedModel | None = None
        self._has_logged = False

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Raises what `patch_model` raises."""
        self.unpatch()
        self._patched = patch_model(model, **self._options)
        if not self._has_logged and state.is_world_process_zero:
            _LOGGER.info("megasoftmax:\n%s", self._patched)
            self._has_logged = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.unpatch()

    def unpatch(self) -> None:
        """Give the model back what it was; harmless where nothing is patched."""
        if self._patched is not None:
            self._patched.unpatch()
            self._patched = None
