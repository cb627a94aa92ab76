"""A callback of Hugging Face's Trainer that watches its steps (`autopar.monitor`)."""

from __future__ import annotations

from typing import Any

from autopar.watch.monitor import Monitor, Writer, monitor


def monitor_callback(writer: Writer | None = None, *, every: int = 10, prefix: str = "autopar/") -> object:
    """A TrainerCallback, for `callbacks=[...]` of a trainer that `autopar.trainer` made. Reports go to the writer, and to the trainer's log history; evaluation and saves between
    steps are no part of them. Arguments are those of `autopar.monitor`."""
    from transformers import TrainerCallback

    class Watches(TrainerCallback):  # type: ignore[misc]  # transformers' types are not read
        monitor: Monitor | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.monitor = monitor(model, writer, every=every, prefix=prefix)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert self.monitor is not None
            self.monitor.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert self.monitor is not None
            self.monitor.steps = state.global_step - 1
            report = self.monitor.step()
            if report is not None:
                state.log_history.append({"step": state.global_step, **{prefix + n: v for n, v in report.numbers().items()}})

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert self.monitor is not None
            self.monitor.close()

    made: object = Watches()
    return made
