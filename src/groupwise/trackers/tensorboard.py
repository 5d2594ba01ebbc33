"""TensorBoard: an event file in the run folder; `tensorboard --logdir RUN/tensorboard` draws it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Classes of generated protobuf modules exist at run time only.
from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoard:
    """An event file; its numbers are float32."""

    def __init__(self, folder: Path) -> None:
        self._writer = EventFileWriter(str(folder))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self._writer.close()


def open_tracker(folder: Path, config: Mapping[str, Any]) -> TensorBoard:
    """See `groupwise.trackers.open_trackers`; the settings are in config.yaml beside the event file."""
    return TensorBoard(folder / "tensorboard")
