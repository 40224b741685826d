"""`python -m elastic_peft.run`: another package's command, with the ELASTIC method registered."""

import sys

import pytest

from elastic_peft import run


@pytest.fixture
def command(tmp_path, monkeypatch):
    (tmp_path / "some_tool.py").write_text(
        "import sys\nfrom peft import PeftType\nprint(PeftType('ELASTIC'), *sys.argv[1:])"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return lambda *arguments: monkeypatch.setattr(sys, "argv", ["run", *arguments])


def test_the_module_runs_with_its_arguments_and_the_method(command, capsys):
    command("some_tool", "--model", "x")
    run.main()
    assert capsys.readouterr().out == "PeftType.ELASTIC --model x\n"


@pytest.mark.parametrize("arguments", [[], ["--help"]], ids=["nothing", "no_module"])
def test_without_a_module_the_usage_is_shown(command, arguments):
    command(*arguments)
    with pytest.raises(SystemExit, match=r"usage: python -m elastic_peft.run MODULE"):
        run.main()


def test_a_module_that_does_not_exist_is_an_import_error(command):
    command("no_such_tool")
    with pytest.raises(ImportError, match="no_such_tool"):
        run.main()
