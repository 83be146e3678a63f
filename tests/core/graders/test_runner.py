"""Graders as they are run: real helper processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from qerl_core.graders.runner import GradeRequest, GraderPool
from qerl_core.graders.spec import GraderSpec
from qerl_core.types import Grade
from tests.live import gone, wait_until

CASES = json.loads((Path(__file__).parents[2] / "cases" / "graders.json").read_text())
TO_SPEC = TypeAdapter(GraderSpec)


def python(source: str, timeout_s: float = 5.0):
    return TO_SPEC.validate_python({"type": "python", "source": source, "timeout_s": timeout_s})


def grade(spec, *texts, item=None):
    with GraderPool(spec) as pool:
        return pool.grade([GradeRequest(item or {}, text) for text in texts])


# `multi` comes with the remaining graders.
@pytest.mark.parametrize(
    "case", [case for case in CASES if case["grader"]["type"] != "multi"], ids=lambda case: case["why"]
)
def test_inputs_that_broke_other_products(case):
    limit = {} if case["grader"]["type"] == "string_check" else {"timeout_s": 3.0}
    spec = TO_SPEC.validate_python(case["grader"] | limit)

    [found] = grade(spec, case["sample"], item=case["item"])

    assert found.error_type == case.get("error")
    assert found.reward == case.get("reward")


def test_grades_keep_the_order_of_their_requests_though_some_take_longer():
    source = """
import time
def grade(sample, item):
    wait = float(sample["output_text"])
    time.sleep(wait)
    return wait
"""
    texts = ["0.3", "0.01", "0.2", "0.0"]

    found = grade(python(source), *texts)

    assert [one.reward for one in found] == [float(text) for text in texts]


def test_one_call_s_failure_is_its_own():
    source = "def grade(sample, item):\n    return 1 / int(sample['output_text'])\n"

    good, bad, other = grade(python(source), "2", "0", "4")

    assert (good.reward, other.reward) == (0.5, 0.25)
    assert bad.error == 'File "grader.py", line 2, in grade\nZeroDivisionError: division by zero'


def test_an_error_shows_the_user_s_lines_and_none_of_this_machine_s():
    source = "import json\ndef grade(sample, item):\n    return json.loads('{')\n"

    [found] = grade(python(source), "")

    assert "line 3, in grade" in found.error
    assert "json/decoder.py" not in found.error


def test_a_call_leaves_nothing_to_the_next():
    source = (
        "import builtins\ndef grade(sample, item):\n"
        "    seen = getattr(builtins, 'seen', 0)\n    builtins.seen = 1\n    return float(seen)\n"
    )

    assert [found.reward for found in grade(python(source), *"abcde")] == [0.0] * 5


def test_what_user_code_writes_to_our_descriptors_is_no_reply():
    source = """
import os
def grade(sample, item):
    for fd in range(3, 64):
        try:
            os.write(fd, b"\\0\\0\\0\\2{}")
        except OSError:
            pass
    return 1.0
"""

    [found] = grade(python(source), "")

    assert found.reward is None  # what it forged and what we sent are no one message
    assert found.error_type == "python_grader_runtime_error"


def test_a_forged_reply_is_not_taken():
    source = """
import json, os, struct
def grade(sample, item):
    body = json.dumps({"reward": 1.0, "nonce": "x"}).encode()
    for fd in range(3, 64):
        try:
            os.write(fd, struct.pack("!I", len(body)) + body)
        except OSError:
            pass
    os._exit(0)
"""

    [found] = grade(python(source), "")

    assert (found.reward, found.error) == (None, "its reply is not from the grader")


def test_user_code_sees_no_environment():
    source = "import os\ndef grade(sample, item):\n    return float(len(os.environ))\n"

    assert grade(python(source), "") == [Grade(0.0)]


def test_memory_is_bounded():
    [found] = grade(python("def grade(sample, item):\n    return float(len(bytearray(3 << 30)))\n"), "")

    assert "MemoryError" in found.error


@pytest.mark.parametrize("leave", ["pass", "os.setsid()"])
def test_a_late_call_is_killed_with_all_that_it_started(tmp_path, leave):
    note = tmp_path / "pid"
    source = (
        f"import os, time\ndef grade(sample, item):\n    if os.fork() == 0:\n        {leave}\n"
        f"        open({str(note)!r}, 'w').write(str(os.getpid()))\n        time.sleep(60)\n    time.sleep(60)\n"
    )

    [found] = grade(python(source, timeout_s=0.5), "")

    assert found.error_type == "unresponsive_reward_error"
    assert gone([int(note.read_text())])


def test_a_late_expression_is_wrong_and_the_others_are_graded():
    spec = TO_SPEC.validate_python({"type": "math", "reference": "7", "timeout_s": 1.0})

    late, right = grade(spec, "$7^{7^{7^{7^{7}}}}!$", "it is 7")

    assert (late.reward, right.reward) == (0.0, 1.0)


def test_a_reference_that_is_no_mathematics_is_an_error():
    [found] = grade(
        TO_SPEC.validate_python({"type": "math", "reference": "{{ item.answer }}"}), "4", item={"answer": ""}
    )

    assert found.error_type == "other_error"


def test_a_helper_that_dies_is_replaced():
    spec = python("def grade(sample, item):\n    return 1.0\n")
    with GraderPool(spec) as pool:
        pool.grade([GradeRequest({}, "")])
        os.kill(pool._helper.process.pid, signal.SIGKILL)

        assert pool.grade([GradeRequest({}, "")] * 3) == [Grade(1.0)] * 3


def test_a_thousand_string_checks_take_no_time():
    spec = TO_SPEC.validate_python(
        {"type": "string_check", "input": "{{ sample.output_text }}", "reference": "x", "operation": "eq"}
    )
    with GraderPool(spec) as pool:
        pool.grade([GradeRequest({}, "x")])
        started = time.monotonic()
        found = pool.grade([GradeRequest({}, "x" * (i % 2)) for i in range(1000)])

    assert [one.reward for one in found] == [0.0, 1.0] * 500
    assert time.monotonic() - started < 5


def test_large_batches_of_large_answers_do_not_block():
    spec = TO_SPEC.validate_python(
        {
            "type": "string_check",
            "input": "{{ sample.output_text }}",
            "reference": "{{ item.nothing }}",
            "operation": "eq",
        }
    )

    found = grade(spec, *["x" * 100_000] * 200)

    assert {one.error_type for one in found} == {"invalid_variable_error"}


def test_the_helper_ends_with_the_process_that_started_it():
    script = """
import time
from pydantic import TypeAdapter
from qerl_core.graders.runner import GraderPool, GradeRequest
from qerl_core.graders.spec import GraderSpec
source = "def grade(sample, item):\\n    return 1.0\\n"
pool = GraderPool(TypeAdapter(GraderSpec).validate_python({"type": "python", "source": source}))
pool.grade([GradeRequest({}, "")])
print(pool._helper.process.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        helper = int(process.stdout.readline())
        process.kill()

    wait_until(lambda: gone([helper]), what="the helper's end")


def test_nothing_heavy_is_imported_to_check_a_grader():
    script = """
import sys, qerl_core.graders.check, qerl_core.data.rows
heavy = {"torch", "numpy", "sympy", "math_verify", "transformers"} & sys.modules.keys()
assert not heavy, heavy
"""

    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
