"""Reads the imports of every source file and holds the package's one direction of flow."""

import ast
from pathlib import Path

import pytest

from elastic_peft.operators import OPERATORS


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "elastic_peft"
KERNELS = ROOT / "kernels" / "torch-ext" / "elastic_kernels"
SOURCES = sorted([*PACKAGE.rglob("*.py"), *KERNELS.rglob("*.py")])

# A module imports only modules on lines above its own.
ORDER = [
    ["checks", "operators", "printable"],
    ["config", "precision", "counterfactual", "gating", "router", "families", "sequences", "sparsity"],
    ["context", "ragged_store", "static_router"],
    ["cache", "convert", "report_figures", "report_page"],
    ["report"],
    ["mode_pairs"],
    ["attention"],
    ["layer"],
    ["hooks"],
    ["attachment", "calibration", "similarity"],
    ["standardization"],
    ["model"],
    ["registration"],
    ["data", "trainer_config"],
    ["trainer"],
    ["results", "saved"],
    ["card"],
    ["hub"],
    ["__init__"],
    ["run"],
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}

HEAVY = {"trl", "datasets", "triton", "matplotlib", "kernels"}
TRAINING = {"data", "trainer_config", "trainer"}  # imported on first use only, see `elastic_peft.__getattr__`


def relative(path):
    return str(path.relative_to(ROOT))


def imported(tree):
    """Absolute names of everything that `tree` imports, with relative imports seen from `elastic_peft`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = "elastic_peft" if node.level else None
            name = ".".join(filter(None, [package, node.module]))
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)


def imported_at_once(tree):
    """The same, of what runs when the module is imported: outside functions and `if TYPE_CHECKING`."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield from imported(node)


def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def test_every_module_has_its_place():
    assert {path.stem for path in PACKAGE.glob("*.py")} == set(RANK)


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_imports_flow_one_way(path):
    modules = {name.split(".")[1] for name in imported(parse(path)) if name.startswith("elastic_peft.")} & set(RANK)
    against = sorted(name for name in modules if RANK[name] >= RANK[path.stem])
    assert not against, f"{path.stem} must not import {against}, which do not come before it"


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=relative)
def test_kernels_do_not_know_the_adapter(path):
    names = [name for name in imported(parse(path)) if name.split(".")[0] in ("peft", "transformers")]
    names += ["elastic_peft"] if "elastic_peft" in path.read_text(encoding="utf-8") else []
    assert not names, f"elastic_kernels must not import {names}"


def test_only_routers_and_attention_call_the_kernels():
    users = {p.stem for p in PACKAGE.rglob("*.py") if any(n.startswith("elastic_kernels") for n in imported(parse(p)))}
    assert users == {"attention", "counterfactual", "mode_pairs", "ragged_store", "router"}


def test_only_one_module_knows_where_operators_come_from():
    nodes = [(path.stem, node) for path in PACKAGE.rglob("*.py") for node in ast.walk(parse(path))]
    imports = [pair for pair in nodes if isinstance(pair[1], ast.ImportFrom) and not pair[1].level]
    imports = [(stem, alias.name) for stem, node in imports for alias in node.names if "kernels" in node.module]
    taken = [(stem, name) for stem, name in imports if name in OPERATORS]
    assert not taken, "an operator is an attribute of `elastic_peft.operators`"


def test_only_the_registration_extends_peft_type():
    owners = [relative(path) for path in SOURCES if "_member_map_" in path.read_text(encoding="utf-8")]
    assert owners == ["elastic_peft/registration.py"]


def files_imported_at_once(path):
    """Files of `elastic_kernels` that `path` imports with relative imports when it is imported itself."""
    for node in parse(path).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            targets = [folder, *(folder / alias.name for alias in node.names)]
            yield from (target.with_suffix(".py") for target in targets)
            yield from (target / "__init__.py" for target in targets)


def find_kernel_files():
    """Files that import Triton or another such file at once: nothing else may import them before a kernel runs."""
    files = set(KERNELS.rglob("*.py"))
    found = {path for path in files if "triton" in {name.split(".")[0] for name in imported_at_once(parse(path))}}
    while True:
        users = {path for path in files - found if found.intersection(files_imported_at_once(path))}
        if not users:
            return found
        found |= users


KERNEL_FILES = find_kernel_files()


def test_the_operators_do_not_need_triton():
    assert not {path for path in KERNEL_FILES if path.name in ("__init__.py", "api.py", "dispatch.py", "reference.py")}


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if path.stem not in TRAINING and path not in KERNEL_FILES], ids=relative
)
def test_heavy_packages_are_imported_on_use(path):
    heavy = {name.split(".")[0] for name in imported_at_once(parse(path))} & HEAVY
    training = {name for name in imported_at_once(parse(path)) if name.split(".")[:1] == ["elastic_peft"]}
    training = {name.split(".")[1] for name in training if "." in name} & TRAINING
    assert not heavy | training, f"import {sorted(heavy | training)} inside the function that needs it"


def test_the_package_does_not_know_its_recipes():
    users = [relative(p) for p in SOURCES if any(n.split(".")[0] in ("recipes", "tests") for n in imported(parse(p)))]
    assert users == []


@pytest.mark.parametrize("folder", ["kernels", "kernels/torch-ext", "recipes", "tests"])
def test_folders_that_are_no_packages(folder):
    tops = [ROOT / folder / "__init__.py"] if folder.startswith("kernels") else (ROOT / folder).rglob("__init__.py")
    found = [relative(path) for path in tops if path.exists()]
    assert found == [], "an `__init__.py` here would shadow an installed package of the same name"
