"""The API reference as pages for a browser, made of the docstrings by pdoc.

    python recipes/reference.py  # or `make docs`; then open out/reference/index.html

pdoc comes with `pip install -e '.[docs]'`.
"""

import argparse
import warnings
from importlib import import_module
from pathlib import Path


MODULES = [
    "elastic_peft",
    "elastic_peft.card",
    "elastic_peft.convert",
    "elastic_peft.report",
    "elastic_peft.similarity",
    "elastic_kernels",
]


def main(arguments: list[str] | None = None) -> None:
    """Writes the pages; see the module's description and `--help`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("out"))
    folder = parser.parse_args(arguments).output_dir / "reference"

    import pdoc

    for name in MODULES:
        module = import_module(name)
        # pdoc looks for names among a module's attributes only, and some come to be on first use.
        vars(module).update({public: getattr(module, public) for public in getattr(module, "__all__", ())})
    # A package stands for all of its modules; the names that it exports are its reference.
    packages = [name for name in MODULES if "." not in name]
    modules = [name for name in MODULES if "." in name]
    pdoc.render.configure(docformat="google", include_undocumented=False, show_source=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning, module="pdoc")  # a name that pdoc cannot show
        pdoc.pdoc(*packages, *(rf"!{name}\." for name in packages), *modules, output_directory=folder)
    print(f"Written: {folder / 'index.html'}")


if __name__ == "__main__":
    main()
