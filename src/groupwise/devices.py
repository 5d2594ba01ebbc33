"""Where tensors live: a device by the name that a setting gives it."""

from __future__ import annotations

import torch

from groupwise.errors import ConfigError


def find_device(name: str, setting: str) -> torch.device:
    """The device of this name; `auto` is the first CUDA GPU if there is one, else the CPU.

    `setting` is the path of the setting, for the message.

    Raises:
        ConfigError: there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{setting}: {name}; no such device; accepted: auto, cpu, cuda, cuda:0, ...") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"{setting}: {name}; torch sees {torch.cuda.device_count()} CUDA devices here; use auto or cpu"
        )
    return device
