"""Hidden states, attention weights and router logits that transformers records by hooks.

It installs them at the first call that asks for them (`output_hidden_states=True`, ...), behind a lock, which no tracer can follow. On the skeleton they are
there before it is traced; a hook that nobody asks does nothing.
"""

from __future__ import annotations

import sys

from torch import nn

_MODULE = "transformers.utils.output_capturing"


def install_recorders(skeleton: nn.Module) -> None:
    install = getattr(sys.modules.get(_MODULE), "maybe_install_capturing_hooks", None)
    modeling = sys.modules.get("transformers.modeling_utils")
    if install is None or modeling is None:
        return
    for m in skeleton.modules():  # the outermost first: it installs those of the models in it as they want them
        if isinstance(m, modeling.PreTrainedModel) and not getattr(m, "_output_capturing_hooks_installed", False):
            install(m)
