"""The operators that run kernels: of the installed `elastic_kernels`, or of a build of it on the Kernel Hub.

    ELASTIC_PEFT_KERNELS=hub:owner/repository@commit

takes them from that commit. Kernels are a property of the machine, so an adapter saves nothing about them;
`last_routing(model).implementation` says which ones ran. The variable is read once, when the first adapter is added or
the first operator called. What it names is used or refused: the installed kernels never stand in for it.

Code from the Hub runs with the rights of the process, as that of any package does. Only a commit is accepted, because
what a branch or a tag names can change.
"""

from __future__ import annotations

import os
import pkgutil
import re
import threading
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download


VARIABLE = "ELASTIC_PEFT_KERNELS"

# As kernels/build.toml has them; a change of what this package calls is a new version.
NAME, VERSION = "elastic-kernels", 1

# Attributes of this module: operator -> its place in the package.
OPERATORS = {
    "append_tokens": ".routed_decode.storage:append_tokens",
    "block_selection": ":block_selection",
    "routed_attention": ":routed_attention",
    "routed_decode": ":routed_decode",
    "router": ":router",
}

_loading = threading.RLock()

#: Where the operators came from once they are loaded: `"owner/repository@commit"`, `None` for the installed package.
origin: str | None = None


def __getattr__(name: str) -> Any:
    if name not in OPERATORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    load()
    return globals()[name]


def load() -> None:
    """Makes the operators attributes of this module, once, whichever threads call it.

    Raises:
        ValueError: `ELASTIC_PEFT_KERNELS` is malformed, cannot be loaded, or names no build of these kernels.
        ImportError: it names a build, and the package kernels is missing or too old.
    """
    with _loading:
        if OPERATORS.keys() <= globals().keys():
            return
        source = os.environ.get(VARIABLE)
        package = load_from_hub(source) if source else "elastic_kernels"
        try:
            found = {name: pkgutil.resolve_name(package + path) for name, path in OPERATORS.items()}
        except (AttributeError, ImportError) as error:
            raise ValueError(f"`{VARIABLE}` must name a build with every operator, got {source!r}: {error}") from error
        # A thread that finds an operator also finds where it came from.
        globals().update({"origin": source.removeprefix("hub:") if source else None, **found})


def describe(implementation: str) -> str:
    """What an operator ran on, with where it came from unless that is the installed package."""
    return implementation if origin is None else f"{implementation} of {origin}"


def load_from_hub(source: str) -> str:
    """Downloads and imports a build of the kernels.

    Args:
        source: `"hub:owner/repository@commit"`, a commit of 40 hexadecimal digits.

    Returns:
        The name under which it was imported, which is its own.

    Raises:
        ValueError: `source` is malformed, cannot be loaded, or names no build of these kernels.
        ImportError: the package kernels is missing or too old.
    """
    match = re.fullmatch(r"hub:([\w.-]+/[\w.-]+)@([0-9a-f]{40})", source)
    if match is None:
        raise ValueError(
            f"`{VARIABLE}` must be hub:owner/repository@commit, with all 40 digits of the commit, got {source!r}."
        )
    repo_id, commit = match.groups()
    try:
        from kernels import get_loaded_kernels, get_local_kernel
    except ImportError as error:
        raise ImportError(
            f"`{VARIABLE}` needs the package kernels 0.14 or newer: pip install 'elastic_peft[hub-kernels]'."
        ) from error
    try:
        folder = snapshot_download(repo_id, repo_type="kernel", revision=commit, allow_patterns="build/*")
        module = get_local_kernel(Path(folder))
    except Exception as error:  # whatever its code raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"`{VARIABLE}` must name kernels that can be loaded, got {source!r}: {reason}") from error
    loaded = next(kernel for kernel in get_loaded_kernels() if kernel.module is module)
    if (str(loaded.metadata.name), loaded.metadata.version) != (NAME, VERSION):
        raise ValueError(
            f"`{VARIABLE}` must name a build of {NAME} version {VERSION}, got {source!r}, "
            f"a build of {loaded.metadata.name} version {loaded.metadata.version}."
        )
    return module.__name__
