"""`/v1/fine_tuning/alpha/graders`: try a grader, by the same code as in training."""

import threading
import time

from fastapi import APIRouter

from app.errors import BadRequest, Unavailable
from app.graders.schemas import RunAnswer, RunRequest, ValidateAnswer, ValidateRequest, run_answer
from qerl_core.graders.check import check_grader
from qerl_core.graders.pools import open_pool
from qerl_core.graders.runner import GradeRequest

MAX_RUNS = 4
PATIENCE_S = 30.0
_runs = threading.BoundedSemaphore(MAX_RUNS)

router = APIRouter(prefix="/v1/fine_tuning/alpha/graders", tags=["graders"])


@router.post("/run")
def run_grader(request: RunRequest) -> RunAnswer:
    """Grade one completion. A grader that fails is data: `reward` is null, and `metadata.errors` says why."""
    if not _runs.acquire(timeout=PATIENCE_S):
        raise Unavailable(f"{MAX_RUNS} graders are running already: try again.", code="graders_busy")
    try:
        began = time.monotonic()
        with open_pool(request.grader, num_workers=1) as pool:
            [grade] = pool.grade([GradeRequest(request.item or {}, request.model_sample)])
        return run_answer(request.grader, grade, seconds=time.monotonic() - began)
    finally:
        _runs.release()


@router.post("/validate")
def validate_grader(request: ValidateRequest) -> ValidateAnswer:
    """Check a grader without running it; what cannot work is a bad request that names the field."""
    for problem in check_grader(request.grader):
        param = f"grader.{problem.field}"
        raise BadRequest(f"{param}: {problem.message}.", param=param, code="invalid_grader")
    return ValidateAnswer(grader=request.grader.model_dump(mode="json"))
