"""Builds of the kernels as kernel-builder lays them out for the Kernel Hub."""

import json
import tomllib
from pathlib import Path

from elastic_peft import operators


KERNELS = Path(__file__).parents[2] / "kernels"
SETTINGS = tomllib.loads((KERNELS / "build.toml").read_text(encoding="utf-8"))
PACKAGE = KERNELS / "torch-ext" / operators.NAME.replace("-", "_")


def build_files(unique_id, **metadata):
    """Path in the repository to content, for every backend; `metadata` changes what a build says about itself."""
    general = SETTINGS["general"]
    files = {}
    for backend in general["backends"]:
        folder = f"build/torch-{backend}"
        for source in PACKAGE.rglob("*.py"):
            files[f"{folder}/{source.relative_to(PACKAGE)}"] = source.read_bytes()
        described = {
            "name": general["name"],
            "id": f"_{PACKAGE.name}_{backend}_{unique_id}",
            "version": general["version"],
            "license": general["license"],
            "python-depends": [],
            "backend": {"type": backend},
            **metadata,
        }
        files[f"{folder}/metadata.json"] = json.dumps(described).encode()
    return files


def write_build(folder, unique_id, **metadata):
    """Writes a build below `folder`."""
    for path, content in build_files(unique_id, **metadata).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
