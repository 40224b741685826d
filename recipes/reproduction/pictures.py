"""Pictures of what the jobs measured, one PNG a question, and a page with all of them and the tables.

    cd recipes
    python -m reproduction.pictures --output ../out/reproduction

Writes `{output}/pictures/*.png`, `{output}/reproduction.html`, which needs no other file, and for the cards
`{output}/{pair}/routing.png`. A picture whose jobs have not run yet is left out.
"""

import argparse
import html
import inspect
from pathlib import Path

from reproduction.charts import CHARTS
from reproduction.charts_routing import routing_of
from reproduction.collect import all_tables, trained_pairs
from reproduction.results import read_all
from reproduction.tables import trainings

from elastic_peft.card import PICTURE_NAME
from elastic_peft.report import html_page, html_picture, html_table
from elastic_peft.report_figures import DPI


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
        draw(results).savefig(file, dpi=DPI)
        parts.append(html_picture(file.read_bytes(), inspect.getdoc(draw) or name))
        print(file)
    for pair in trained_pairs(results):
        (args.output / pair).mkdir(exist_ok=True)
        routing_of(trainings(results, pair)[0]).savefig(args.output / pair / PICTURE_NAME, dpi=DPI)
    for title, shows, rows in all_tables(results):
        parts.append(f"<h2>{html.escape(title)}</h2>\n<p>{html.escape(shows)}</p>\n{html_table(rows)}")
    page = args.output / "reproduction.html"
    page.write_text(html_page("Reproduction on SmolLM2-135M-Instruct", parts), encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
