"""Pictures of what the jobs measured, one PNG a question and all in one page.

    cd recipes
    python -m reproduction.pictures --output ../out/reproduction

Writes `{output}/pictures/*.png` and `{output}/pictures.html`, which needs no other file. A picture whose jobs have not
run yet is left out.
"""

import argparse
import base64
import html
import inspect
from pathlib import Path

from reproduction.charts import CHARTS
from reproduction.results import read_all


PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Reproduction on SmolLM2-135M-Instruct</title>
<style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }}
body {{ max-width: 72rem; margin: 2rem auto; padding: 0 1rem }}
figure {{ margin: 2rem 0 }}
img {{ max-width: 100%; background: white; border-radius: 4px }}
</style>
<h1>Reproduction on SmolLM2-135M-Instruct</h1>
{figures}
</html>
"""
FIGURE = """\
<figure>
<img alt="{caption}" src="data:image/png;base64,{picture}">
<figcaption>{caption}</figcaption>
</figure>"""


def main(arguments: list[str] | None = None) -> None:
    """Draws every picture whose jobs have run; see the module's description and `--help`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    args = parser.parse_args(arguments)
    results = read_all(args.output)
    folder = args.output / "pictures"
    folder.mkdir(exist_ok=True)
    figures = []
    for name, (needs, draw) in CHARTS.items():
        if not all(need in results for need in needs):
            continue
        file = folder / f"{name}.png"
        draw(results).savefig(file, dpi=150)
        caption = html.escape(inspect.getdoc(draw) or name)
        figures.append(FIGURE.format(caption=caption, picture=base64.b64encode(file.read_bytes()).decode("ascii")))
        print(file)
    (args.output / "pictures.html").write_text(PAGE.format(figures="\n".join(figures)), encoding="utf-8")


if __name__ == "__main__":
    main()
