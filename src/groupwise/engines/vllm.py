"""Sampling with vLLM, over HTTP: what `engine.sampler: vllm` can be told, and how a server is started."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field

from groupwise.demands import Demands, Remarks
from groupwise.engines import Serving
from groupwise.engines.vllm_sampler import VllmSampler
from groupwise.engines.vllm_server import SIDE, WORKER, Client, Found, Started
from groupwise.errors import ConfigError
from groupwise.model import context_length, sketch
from groupwise.slots import Slot, changed

PYTHON = ".venv-vllm/bin/python"
PYTHON_VARIABLE = "GROUPWISE_VLLM_PYTHON"
FINDS_VLLM = "from importlib.util import find_spec; raise SystemExit(find_spec('vllm') is None)"
SERVER_MODULE = "vllm.entrypoints.openai.api_server"  # the console script of the CPU wheel looks for another name
STARTS_A_SERVER = {"python", "dtype", "max_sequences", "arguments", "environment"}
"""Settings that its command line is made of."""
BATCHED_TOKENS = 16384
OF_RANKS = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
"""Variables by which the processes of a learner find each other; vLLM would look for its own there."""
CPU_BLOCK = 32
"""Tokens of a block of keys and values on a CPU, the fewest: only whole blocks of a prompt are shared."""


class Vllm(Slot):
    """A vLLM server, started with the run or found at a URL, that takes new weights in place after each step."""

    type: Literal["vllm"] = "vllm"
    url: str | None = Field(default=None, pattern=r"^https?://")
    """Of a server that runs already, such as `http://127.0.0.1:8000`; null starts one."""
    python: str | None = None
    """Interpreter of the environment that has vLLM; null is $GROUPWISE_VLLM_PYTHON, or .venv-vllm/bin/python."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the server's weights and activations; `auto` is bfloat16 where `engine.dtype` is, or is mixed on a GPU."""
    max_sequences: int = Field(default=256, ge=1)
    """Most completions that the server writes at a time."""
    arguments: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """More of the server's command line, such as `--tensor-parallel-size=2`."""
    environment: dict[str, str] = Field(default={})
    """Variables for the server, such as `CUDA_VISIBLE_DEVICES: "1"`."""
    folder: str | None = None
    """Where weights are handed over, which the server has to see, too; null is the run folder, /dev/shm is faster."""
    restarts: int = Field(default=2, ge=0)
    """How often in a run a server that was lost is started again, or waited for; its groups are sampled anew."""
    startup_seconds: float = Field(default=600.0, gt=0)
    """How long the server may take until it answers."""
    timeout_seconds: float = Field(default=1800.0, gt=0)
    """How long a group may take; a server that takes longer is lost."""
    tolerance: float | None = Field(default=None, gt=0)
    """The run stops when sampler and learner disagree by more on the same weights (mean, nats a token); null is 1e-4,
    or 0.05 where one of them computes in bfloat16."""

    def __call__(self, serving: Serving) -> VllmSampler:
        outline = sketch(serving.model)
        command = self.command(serving, context_length(outline))

        def connect(log: Path) -> Client:
            home = Found(self.url) if self.url else Started(command, self.variables(serving), log)
            return Client(home, timeout_seconds=self.timeout_seconds, startup_seconds=self.startup_seconds)

        return VllmSampler(
            serving,
            outline,
            connect,
            how_to_start=f"VLLM_SERVER_DEV_MODE=1 PYTHONPATH={SIDE} {' '.join(command)}",
            restarts=self.restarts,
            folder=self.folder,
            tolerance=self.tolerance,
        )

    def refusals(self, demands: Demands) -> Remarks:
        """Requests that are too large, and entropies; see `Refuses.refusals`."""
        yield (
            self.url is None and self.max_sequences < demands.largest_request,
            f"engine.sampler.max_sequences: {self.max_sequences}; a group is one request: set it to at least "
            f"{demands.largest_request}, the larger of group_size and evaluation.samples",
        )
        for path in demands.entropies:
            yield (
                True,
                f"{path}: needs the entropies of what was sampled, which engine.sampler: vllm does not report; leave "
                "it out, or sample in this process with engine.sampler: none",
            )

    def cautions(self, demands: Demands) -> Remarks:
        """Of a limit that is another's, and of a server that others have started; see `Cautions.cautions`."""
        yield (
            demands.sample_tokens > 0,
            "engine.sample_tokens has no effect with engine.sampler: vllm: its server holds as many keys and values as "
            "engine.sampler.arguments or engine.sampler.environment say",
        )
        for name in sorted(STARTS_A_SERVER & changed(self)):
            yield (
                self.url is not None,
                f"engine.sampler.{name} has no effect with url: whoever starts that server decides",
            )

    def check(self) -> None:
        """Look for what a server is started with.

        Raises:
            ConfigError: there is no such interpreter, or it has no vLLM.
        """
        if self.url is not None:
            return
        accepted = (
            "accepted: the Python of an environment with vLLM; docs/scaling.md says how to make one, and "
            f"engine.sampler.python or {PYTHON_VARIABLE} where it is"
        )
        try:
            code = subprocess.run([self.interpreter, "-c", FINDS_VLLM], capture_output=True, timeout=120).returncode
        except OSError as error:
            raise ConfigError(
                f"engine.sampler.python: {self.interpreter}; cannot be run: {error.strerror}; {accepted}"
            ) from error
        if code:
            raise ConfigError(f"engine.sampler.python: {self.interpreter}; it has no vLLM; {accepted}")

    @property
    def interpreter(self) -> str:
        """What runs the server."""
        return self.python or os.environ.get(PYTHON_VARIABLE) or PYTHON

    def server_dtype(self, serving: Serving) -> torch.dtype:
        """The dtype of a server that is started."""
        if self.dtype != "auto":
            return getattr(torch, self.dtype)
        rounded = serving.dtype == torch.bfloat16 or (serving.mixed and serving.device.type == "cuda")
        return torch.bfloat16 if rounded else torch.float32

    def command(self, serving: Serving, context: int | None) -> list[str]:
        """What starts a server, but for where it listens."""
        dtype = str(self.server_dtype(serving)).removeprefix("torch.")
        model = str(Path(serving.model).resolve()) if Path(serving.model).is_dir() else serving.model
        command = [self.interpreter, "-m", SERVER_MODULE, "--model", model, "--dtype", dtype]
        command += ["--tokens-only", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "0"]
        command += ["--worker-extension-cls", WORKER, "--max-num-seqs", str(self.max_sequences)]
        command += ["--generation-config", "vllm", "--disable-uvicorn-access-log"]
        command += [] if context is None else ["--max-model-len", str(context)]
        if serving.device.type == "cpu":
            # A prompt cut into chunks and a seed together end the engine on a CPU; compiling gains nothing there.
            batched = max(BATCHED_TOKENS, context or 0)
            command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(batched)]
            command += ["--enforce-eager", "--block-size", str(CPU_BLOCK)]
        return [*command, *self.arguments]

    def variables(self, serving: Serving) -> dict[str, str]:
        """The environment of a server; on a CPU it holds 1 GiB of keys and values unless told otherwise."""
        usual = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if serving.device.type == "cpu":
            usual |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            usual |= {"OMP_NUM_THREADS": str(serving.threads)}
        ours = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(SIDE), "PYTHONSAFEPATH": "1"}
        around = {name: value for name, value in os.environ.items() if not OF_RANKS.fullmatch(name)}
        return {**usual, **around, **ours, **self.environment}
