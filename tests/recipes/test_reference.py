"""The API reference: every public name says what it takes and gives, in one order, and the pages are built."""

import inspect
import re
from importlib import import_module

import pytest
import reference


SECTIONS = ["Args", "Attributes", "Returns", "Raises", "Numerics", "Source"]


def find_public_names():
    for module in map(import_module, reference.MODULES):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        for name in getattr(module, "__all__", [name for name in own if not name.startswith("_")]):
            yield pytest.param(getattr(module, name), id=f"{module.__name__}.{name}")


PUBLIC_NAMES = list(find_public_names())
FUNCTIONS = [name for name in PUBLIC_NAMES if inspect.isfunction(name.values[0])]
CLASSES = [name for name in PUBLIC_NAMES if inspect.isclass(name.values[0])]


def sections(documented):
    """Section to its text, in the order of the docstring."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):", inspect.getdoc(documented), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def described(documented, section):
    return re.findall(r"^    \**(\w+): ", sections(documented).get(section, ""), flags=re.MULTILINE)


@pytest.mark.parametrize("documented", PUBLIC_NAMES)
def test_sections_come_in_one_order(documented):
    found = list(sections(documented))
    assert found == sorted(found, key=SECTIONS.index)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_describes_its_arguments_in_their_order(function):
    assert described(function, "Args") == list(inspect.signature(function).parameters)


@pytest.mark.parametrize("documented", CLASSES)
def test_a_class_describes_what_must_be_given_and_nothing_else(documented):
    parameters = inspect.signature(documented).parameters
    needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    assert needed <= {*described(documented, "Args"), *described(documented, "Attributes")}
    assert set(described(documented, "Args")) <= set(parameters)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_a_function_returns_is_described(function):
    # Context managers are used for what they do.
    returns_nothing = inspect.signature(function).return_annotation in ("None", "Iterator[None]", None)
    assert ("Returns" in sections(function)) is not returns_nothing


def test_pages_show_every_public_name(tmp_path):
    pytest.importorskip("pdoc", reason="pdoc is not installed: pip install 'elastic_peft[docs]'")
    reference.main(["--output-dir", str(tmp_path)])
    folder = tmp_path / "reference"
    missing = []
    for name in reference.MODULES:
        page = (folder / f"{name.replace('.', '/')}.html").read_text(encoding="utf-8")
        missing += [public for public in getattr(import_module(name), "__all__", []) if f'id="{public}"' not in page]
    assert missing == []
