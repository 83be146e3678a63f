"""What can go wrong in a run, each with a code that is part of the API.

    QerlError
    ├── BadCheckpoint        bad_checkpoint        a base model or checkpoint that is not what it claims
    ├── BadData              bad_data              rows or prompts that cannot be trained on
    ├── GraderFailed         grader_failed         too many grader errors; a reward was never guessed
    ├── NoLearningSignal     no_learning_signal    every group scores the same, so there is no gradient
    ├── NotEnoughMemory      not_enough_memory     the GPU is too small for the run; said before anything is loaded
    ├── RolloutFailed        rollout_failed        the engine gave no usable completions
    └── TrainingDiverged     training_diverged     a loss or gradient that is not finite

A wrong completion is data, not an error. `ValueError` is for a bad argument of a function.
"""


class QerlError(Exception):
    """A run that cannot go on. The message is shown to the user: no local paths, no secrets."""

    code = "qerl_error"


class BadCheckpoint(QerlError):
    """A base model or checkpoint that is missing something, or is something else."""

    code = "bad_checkpoint"


class BadData(QerlError):
    """Rows or prompts that cannot be trained on."""

    code = "bad_data"


class GraderFailed(QerlError):
    """Graders failed too often for the rewards to mean anything."""

    code = "grader_failed"


class NoLearningSignal(QerlError):
    """No group of completions has any spread in its rewards."""

    code = "no_learning_signal"


class NotEnoughMemory(QerlError):
    """The GPU is too small for the run."""

    code = "not_enough_memory"


class RolloutFailed(QerlError):
    """The rollout engine gave no usable completions."""

    code = "rollout_failed"


class TrainingDiverged(QerlError):
    """A loss or gradient is not finite."""

    code = "training_diverged"
