"""Pictures of what the jobs measured, one PNG a question.

    cd recipes
    python -m reproduction.pictures --output ../out/reproduction

Writes `{output}/pictures/*.png`. A picture whose jobs have not run yet is left out.
"""

import argparse
from pathlib import Path

from reproduction.charts import CHARTS
from reproduction.results import read_all


def main(arguments: list[str] | None = None) -> None:
    """Draws every picture whose jobs have run; see the module's description and `--help`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    args = parser.parse_args(arguments)
    results = read_all(args.output)
    folder = args.output / "pictures"
    folder.mkdir(exist_ok=True)
    for name, (needs, draw) in CHARTS.items():
        if all(need in results for need in needs):
            draw(results).savefig(folder / f"{name}.png", dpi=150)
            print(folder / f"{name}.png")


if __name__ == "__main__":
    main()
