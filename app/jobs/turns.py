"""Whose turn it is: higher priority first, then the owners in turn, then the older job.

Among owners that wait at one priority, who has fewer jobs running comes first, then who was served longer ago: an
owner with a thousand jobs holds up nobody else's first. The order is made of counts, so that it costs the same
whatever the jobs' number.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.callers import ALL_OWNERS
from app.jobs.models import Job
from app.jobs.state import JobState


@dataclass(frozen=True, slots=True)
class Turn:
    """Where a job that waits stands."""

    position: int | None
    """1 is the next; None for a job that is paused."""
    reason: str
    """Why it waits."""


@dataclass(frozen=True, slots=True)
class _Line:
    """What the order is made of."""

    waiting: dict[int, dict[str, int]]
    """Queued jobs by priority and owner."""
    running: dict[str, int]
    """Running jobs by owner."""
    served_at: dict[str, float]
    """When a job of the owner was last started for the first time."""

    def rank(self, owner: str, place: int) -> tuple[int, float, str]:
        """What decides between the owners' jobs, each the `place`-th of its owner's. Smaller comes first."""
        return self.running.get(owner, 0) + place, self.served_at.get(owner, 0.0), owner


def _line(session: Session) -> _Line:
    everyone = {ALL_OWNERS: True}
    queued = select(Job.priority, Job.owner, func.count()).where(Job.state == JobState.QUEUED)
    waiting: dict[int, dict[str, int]] = {}
    for priority, owner, count in session.execute(
        queued.group_by(Job.priority, Job.owner).execution_options(**everyone)
    ):
        waiting.setdefault(priority, {})[owner] = count
    owners = {owner for counts in waiting.values() for owner in counts}
    running = select(Job.owner, func.count()).where(Job.state == JobState.RUNNING).group_by(Job.owner)
    served = select(Job.owner, func.max(Job.started_at)).where(Job.owner.in_(owners)).group_by(Job.owner)
    return _Line(
        waiting,
        {owner: count for owner, count in session.execute(running.execution_options(**everyone))},
        {owner: at or 0.0 for owner, at in session.execute(served.execution_options(**everyone))},
    )


def first(session: Session) -> str | None:
    """The id of the job whose turn it is; None if none is queued."""
    line = _line(session)
    if not line.waiting:
        return None
    priority = max(line.waiting)
    owner = min(line.waiting[priority], key=lambda owner: line.rank(owner, 1))
    oldest = select(Job.id).where(Job.state == JobState.QUEUED, Job.priority == priority, Job.owner == owner)
    return session.scalar(oldest.order_by(Job.id).limit(1).execution_options(**{ALL_OWNERS: True}))


def order(session: Session) -> list[str]:
    """The ids of everyone's queued jobs as they would be taken if nobody's job ended meanwhile."""
    line, places = _line(session), Counter[tuple[int, str]]()
    queued = select(Job.id, Job.priority, Job.owner).where(Job.state == JobState.QUEUED).order_by(Job.id)
    ranked = []
    for job_id, priority, owner in session.execute(queued.execution_options(**{ALL_OWNERS: True})):
        places[priority, owner] += 1
        ranked.append((-priority, line.rank(owner, places[priority, owner]), job_id))
    return [job_id for _, _, job_id in sorted(ranked)]


class Turns:
    """Where jobs stand among everyone's, as of the first that is asked for."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @cached_property
    def _line(self) -> _Line:
        return _line(self._session)

    def of(self, job: Job) -> Turn | None:
        """The turn of a queued job, or why a paused one waits; None for others."""
        if job.state == JobState.PAUSED:
            return Turn(None, f"It is paused ({job.stop_reason}): resume it.")
        return _turn(self._session, self._line, job) if job.state == JobState.QUEUED else None


def _turn(session: Session, line: _Line, job: Job) -> Turn:
    own = (Job.state == JobState.QUEUED, Job.priority == job.priority, Job.owner == job.owner)
    before = select(func.count()).select_from(Job).where(*own, Job.id < job.id)
    place = session.execute(before.execution_options(**{ALL_OWNERS: True})).scalar_one()
    mine = line.rank(job.owner, place + 1)
    ahead = place + sum(
        count for priority, counts in line.waiting.items() if priority > job.priority for count in counts.values()
    )
    for owner, count in line.waiting.get(job.priority, {}).items():
        if owner != job.owner:
            running, *tie = line.rank(owner, 0)
            ahead += max(0, min(count, mine[0] - running - (1 if tie > list(mine[1:]) else 0)))
    if ahead:
        jobs = "a job is" if ahead == 1 else f"{ahead} jobs are"
        return Turn(ahead + 1, f"It waits for a worker, and {jobs} ahead of it.")
    return Turn(1, "It waits for a worker, and is next.")
