"""A job's states and the moves between them: plain Python."""

from enum import StrEnum


class JobState(StrEnum):
    """What the row says; OpenAI's `status` has the same names."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


MOVES: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.PAUSED, JobState.CANCELLED}),
    JobState.RUNNING: frozenset(
        {JobState.QUEUED, JobState.PAUSED, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}
    ),
    JobState.PAUSED: frozenset({JobState.QUEUED, JobState.CANCELLED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}

SOURCES: dict[JobState, frozenset[JobState]] = {
    state: frozenset(source for source, targets in MOVES.items() if state in targets) for state in JobState
}
"""The states from which one may be entered."""

ENDED = frozenset(state for state, targets in MOVES.items() if not targets)
