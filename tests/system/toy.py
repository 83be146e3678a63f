"""A run of the service whose training is a stand-in: `python -m tests.system.toy JOB ATTEMPT`.

The first row of the data says what it does: `step_s` a step takes, `die_at` which step it is killed (in the first
attempt), `raise_at` which step it raises `error`. It leaves a process behind in a session of its own, as vLLM may.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from qerl_core.config import TrainConfig
from qerl_core.errors import TrainingDiverged
from qerl_core.observer import Observer
from worker.run import main

ERRORS = {
    "diverged": TrainingDiverged("the loss of step 3 is not finite"),
    "disk_full": OSError(28, "No space left on device", "/var/somewhere/optimizer.safetensors"),
    "bug": ZeroDivisionError("division by zero"),
}

logger = logging.getLogger(__name__)


def train(config: TrainConfig, folder: Path, observer: Observer, *, cache: Path) -> bool:
    """Count steps; the checkpoint of a step holds its number."""
    plan = json.loads(config.data.train_path.read_text().splitlines()[0])
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    observer.on_phase("preparing")
    saved = sorted(folder.glob("step-*"))
    start = int(saved[-1].name.removeprefix("step-")) if saved else -1
    observer.on_start(start)
    if start < 0:
        observer.on_step(0, {"eval/reward_mean": 0.1})
    observer.on_phase("training")
    for step in range(max(start, 0) + 1, config.num_steps + 1):
        time.sleep(plan.get("step_s", 0.02))
        if step == plan.get("die_at") and start < 0:
            logger.info("step %d reads %s", step, folder / "somewhere.bin")
            os.kill(os.getpid(), signal.SIGKILL)
        if step == plan.get("raise_at"):
            raise ERRORS[plan["error"]]
        stop = observer.on_step(step, {"reward/mean": step / 10, "tokens/trained": 7.0, "time/step_s": 0.02})
        if stop or step % config.checkpoint_every == 0 or step == config.num_steps:
            checkpoint = folder / f"step-{step:06d}"
            (checkpoint / "adapter").mkdir(parents=True)
            (checkpoint / "adapter" / "adapter_config.json").write_text(json.dumps({"step": step}))
            (checkpoint / "adapter" / "adapter_model.safetensors").write_bytes(bytes([step]) * 1000)
            observer.on_checkpoint(step, checkpoint)
        if stop:
            return step == config.num_steps
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], train))
