"""The command `elastic-peft`.

Installed as a package of its own, `elastic_peft_cli`, because importing `elastic_peft` takes seconds, and `--help` and
completion in a shell must not. The commands import what they need when they run.
"""

from __future__ import annotations

from typing import Any


try:
    import typer
    from typer.core import TyperGroup
except ModuleNotFoundError as error:
    if error.name != "typer":
        raise
    raise SystemExit("Error: `elastic-peft` needs typer: pip install 'elastic_peft[cli]'.") from error

from . import adapters, bench, route


class OneLineErrors(TyperGroup):
    """Prints what users can put right in one line, with exit code 1; anything else is a fault of ours."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except (ValueError, OSError, ImportError, RuntimeError) as error:
            typer.echo(f"Error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    name="elastic-peft",
    help="Adapters that decide, head by head and input by input, between full and sparse attention.",
    epilog="Example: elastic-peft inspect user/adapter. Exit codes: 0 done, 1 refused or failed, 2 wrong usage. "
    "`--install-completion` completes commands and options in your shell.",
    cls=OneLineErrors,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
convert = typer.Typer(
    help="Turn foreign formats into adapters.",
    epilog="Example: elastic-peft convert paper Elastic-Qwen3-4B adapter",
    no_args_is_help=True,
)
app.command(epilog="Example: elastic-peft inspect user/adapter --json")(adapters.inspect)
app.command(
    epilog="Example: elastic-peft route --model Qwen/Qwen3-4B --adapter user/adapter --prompt-file prompt.txt "
    "--html routing.html"
)(route.route)
app.add_typer(convert, name="convert")
convert.command(epilog="Example: elastic-peft convert paper Elastic-Qwen3-4B adapter --base-model Qwen/Qwen3-4B")(
    adapters.paper
)
convert.command(
    epilog="Example: elastic-peft convert duo full_attention_heads.tsv adapter "
    "--base-model meta-llama/Llama-3.1-8B-Instruct --sparsity 0.5"
)(adapters.duo)
app.command(epilog="Example: elastic-peft card adapter")(adapters.card)
app.command(epilog="Example: elastic-peft bench prefill --length 8192 --length 131072")(bench.bench)
