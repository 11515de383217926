"""The peers' own environments, one each, because their requirements contradict one another."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent / ".peers"
"""Ignored by git; delete it to install anew."""

# Each inner tuple is one call of pip. PyTorch goes first, so that gpytorch takes the build that is
# there; to have one without CUDA, point pip to such builds before the first run.
REQUIREMENTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "gpy": (("GPy==1.15.0",),),
    "gpytorch": (("torch==2.13.0",), ("gpytorch==1.15.2",)),
    "gpjax": (("gpjax==1.0.0", "jax==0.10.2", "jaxlib==0.10.2"),),
    # BayesNewton needs an old JAX (0.4.24 works), and objax imports six without requiring it.
    "bayesnewton": (
        (
            "bayesnewton==1.3.4",
            "objax==1.8.0",
            "jax==0.4.24",
            "jaxlib==0.4.24",
            "numpy<2",
            "scipy<1.13",
            "numba",
            "six",
        ),
    ),
}


class NotInstalled(Exception):
    """The environment of a peer is missing or could not be made; the message says which."""


def _python(name: str) -> Path:
    scripts = ("Scripts", "python.exe") if sys.platform == "win32" else ("bin", "python")
    return ROOT.joinpath(name, *scripts)


def without_addresses(text: str) -> str:
    """The text without web addresses and absolute paths, fit for a results file."""
    text = re.sub(r"\w+://\S+", "(address)", text)
    return re.sub(r"(?<![\w.])(/[\w.+-]+){2,}", "(path)", text)


def create(name: str) -> None:
    """Make the environment unless it is complete; raises NotInstalled with pip's reason."""
    complete = ROOT / name / "complete"
    if complete.exists():
        return
    print(f"Installing {name} in an environment of its own.", flush=True)
    venv.create(ROOT / name, with_pip=True, clear=True)
    for step in REQUIREMENTS[name]:
        pip = [str(_python(name)), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        done = subprocess.run([*pip, *step], capture_output=True, text=True)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            reason = errors[-1].removeprefix("ERROR:").strip() if errors else "no reason given"
            raise NotInstalled(f"does not install: {without_addresses(reason)}")
    complete.touch()


def interpreter(name: str | None, may_create: bool) -> str:
    """The Python that a contender runs in."""
    if name is None:
        return sys.executable
    if may_create:
        create(name)
    if not (ROOT / name / "complete").exists():
        raise NotInstalled("not installed; --peers installs it")
    return str(_python(name))
