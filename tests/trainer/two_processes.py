"""Trains the tiny model, in one process or under a launcher; each process writes what it ended with."""

import json
import sys
from pathlib import Path

from safetensors.torch import save_file
from trainer.tiny import GradientRecorder, dataset, router_weights, trainer


def main(output_dir, options):
    run = trainer(
        output_dir,
        train_dataset=dataset(8, tasks=("qa", "qa", "code", "qa")),
        eval_dataset=dataset(8, seed=5),
        max_steps=3,
        max_grad_norm=1e9,
        **options,
    )
    recorder = GradientRecorder()
    run.add_callback(recorder)
    run.train()
    metrics = run.evaluate()
    rank = run.args.process_index
    tensors = {
        **{f"multipliers.{name}": tensor for name, tensor in run.multipliers.state_dict().items()},
        **{f"gradient.{name}": tensor for name, tensor in recorder.steps[0].items()},
        **{f"weight.{name}": tensor for name, tensor in router_weights(run.model).items()},
        **{f"buffer.{name}": tensor for name, tensor in run.model.named_buffers() if "standardizer" in name},
    }
    save_file(tensors, Path(output_dir, f"rank{rank}.safetensors"))
    Path(output_dir, f"rank{rank}.json").write_text(json.dumps([*run.state.log_history[:3], metrics]))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
