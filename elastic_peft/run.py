"""Runs another package's command with the ELASTIC method registered.

    python -m elastic_peft.run lm_eval --model elastic --model_args pretrained=MODEL,peft=ADAPTER --tasks longbench_e

Tools that load adapters through PEFT do not import this package, without which PEFT does not know the method.
"""

from __future__ import annotations

import runpy
import sys


def main() -> None:
    """Runs `python -m MODULE ARGUMENTS...`; lm_eval knows the model `elastic` then."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m elastic_peft.run MODULE [ARGUMENTS ...]")
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "lm_eval":
        from .evaluation.lm_eval_model import report_routing

        report_routing()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
