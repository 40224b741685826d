"""What the demo's examples are made of: the modules of the Python that runs it, read as text and never imported."""

import ast
import inspect
import re
import sysconfig
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path


# Tests, generated tables and what was installed later.
SKIPPED = {
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
# A sentence that starts with a capital and ends the paragraph's first thought; signatures and headings do not match.
SENTENCE = re.compile(r"[A-Z][^`\n]{19,159}?[a-z)]\.(?= |$)")


@dataclass(frozen=True)
class Definition:
    """One module, class, function or method.

    `parent` is the class of a method, the module of anything else and "" for a module; `summary` the docstring's first
    sentence ("" when there is none); `body` the source after the docstring.
    """

    kind: str
    name: str
    parent: str
    summary: str
    body: str

    @property
    def qualified_name(self) -> str:
        return f"{self.parent}.{self.name}" if self.parent else self.name


@dataclass(frozen=True)
class Module:
    """One source file: its text and every public definition in it, the module itself first."""

    name: str
    source: str
    definitions: tuple[Definition, ...]


def _summary(docstring: str | None) -> str:
    paragraph = " ".join(inspect.cleandoc(docstring or "").split("\n\n")[0].split())
    match = SENTENCE.match(paragraph)
    return match.group(0) if match else ""


def _body(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str:
    documented = ast.get_docstring(node, clean=False) is not None
    first = node.body[1 if documented and len(node.body) > 1 else 0] if node.body else None
    if first is None:
        return ""
    return "\n".join(lines[first.lineno - 1 : node.body[-1].end_lineno])


def parse_module(name: str, source: str) -> Module:
    """The public definitions of one source text.

    Args:
        name: dotted module name.
        source: its text.

    Returns:
        The module, definitions in the order of the file.

    Raises:
        SyntaxError: the text is not Python of the running version.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's files
        tree = ast.parse(source)
    lines = source.splitlines()
    found = [Definition("module", name, "", _summary(ast.get_docstring(tree)), _body(tree, lines))]

    def visit(node: ast.Module | ast.ClassDef, parent: str) -> None:
        for child in node.body:
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or child.name[0] == "_":
                continue
            member = "method" if isinstance(node, ast.ClassDef) else "function"
            kind = "class" if isinstance(child, ast.ClassDef) else member
            summary = _summary(ast.get_docstring(child))
            found.append(Definition(kind, child.name, parent, summary, _body(child, lines)))
            if isinstance(child, ast.ClassDef):
                visit(child, child.name)

    visit(tree, name)
    return Module(name, source, tuple(found))


@cache
def standard_library() -> tuple[Module, ...]:
    """Every public module of the running Python's standard library, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        package = parts[:-1] if parts[-1] == "__init__" else parts
        if not package or any(part in SKIPPED or part.startswith(("_", "config-")) for part in package):
            continue
        try:
            modules.append(parse_module(".".join(package), path.read_text(encoding="utf-8")))
        except (SyntaxError, UnicodeDecodeError):  # templates and files in older encodings are no loss
            continue
    return tuple(modules)
