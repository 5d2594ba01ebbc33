"""Whether this machine has a bubblewrap that may make namespaces; tested without any code of ours."""

from __future__ import annotations

import shutil
import subprocess

import pytest


def _why_not() -> str:
    if shutil.which("bwrap") is None:
        return "no bwrap here, so no sandbox: apt install bubblewrap"
    shares = ["--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc"]
    tried = subprocess.run(["bwrap", *shares, "--ro-bind", "/", "/", "true"], capture_output=True, text=True)
    return f"bwrap may not make namespaces here, so no sandbox: {tried.stderr.strip()}" if tried.returncode else ""


WHY_NOT = _why_not()
NEEDS_BWRAP = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
