"""environment.json: what a run ran on and with, so that it can be told later why two runs differ."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("groupwise", "torch", "transformers", "tokenizers", "safetensors", "numpy", "datasets", "pydantic")
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "HF_HUB_OFFLINE")
"""The only environment variables that are kept: none of them can hold a secret."""


def write_environment(folder: Path) -> None:
    """Write environment.json to a run folder."""
    (folder / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n")


def environment() -> dict[str, Any]:
    """Versions, hardware, threads, the git commit of the working directory, and the command line."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    installed = {distribution.name: distribution.version for distribution in metadata.distributions()}
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: installed[name] for name in PACKAGES if name in installed},
        "cuda": torch.version.cuda,
        "cpu": platform.processor() or platform.machine(),
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [{"name": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1)} for gpu in gpus],
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def git_commit() -> str | None:
    """The commit that is checked out where the run was started; None outside a repository."""
    if shutil.which("git") is None:
        return None
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
