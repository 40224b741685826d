"""Pictures of what the jobs measured, one PNG a question, and a page with all of them and the tables.

    cd recipes
    python -m reproduction.pictures --output ../out/reproduction

Writes `{output}/pictures/*.png` and `{output}/reproduction.html`, which needs no other file. A picture whose jobs have
not run yet is left out.
"""

import argparse
import html
import inspect
from pathlib import Path

from reproduction.charts import CHARTS
from reproduction.collect import all_tables
from reproduction.results import read_all

from elastic_peft.report import html_page, html_picture, html_table


def main(arguments: list[str] | None = None) -> None:
    """Draws every picture whose jobs have run; see the module's description and `--help`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    args = parser.parse_args(arguments)
    results = read_all(args.output)
    folder = args.output / "pictures"
    folder.mkdir(exist_ok=True)
    parts = []
    for name, (needs, draw) in CHARTS.items():
        if not all(need in results for need in needs):
            continue
        file = folder / f"{name}.png"
        draw(results).savefig(file, dpi=150)
        parts.append(html_picture(file.read_bytes(), inspect.getdoc(draw) or name))
        print(file)
    for title, rows in all_tables(results).items():
        parts.append(f"<h2>{html.escape(title)}</h2>\n{html_table(rows)}")
    page = args.output / "reproduction.html"
    page.write_text(html_page("Reproduction on SmolLM2-135M-Instruct", parts), encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
