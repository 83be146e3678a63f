"""Real zygotes and real forks: what a grader can do to others, to the pool and to the machine, which is little."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from qerl_core.graders import runner
from qerl_core.graders.runner import GradeRequest, GraderPool
from qerl_core.graders.spec import GraderSpec

ROOT = Path(__file__).parents[3]
# `multi` is test_pools.py's.
CASES = [
    case
    for case in json.loads((ROOT / "tests" / "cases" / "graders.json").read_text())
    if case["grader"]["type"] != "multi"
]
SOON_S = 10.0


def spec_of(**fields):
    return TypeAdapter(GraderSpec).validate_python(fields)


def python(source, timeout_s=5.0):
    return spec_of(type="python", source=source, timeout_s=timeout_s)


def grade(spec, *texts, item=None, num_workers=2):
    with GraderPool(spec, num_workers=num_workers) as pool:
        return pool.grade([GradeRequest(item or {}, text) for text in texts])


def lives(pid):
    return Path(f"/proc/{pid}").exists()


def wait_for(condition):
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


def pids_in(folder):
    return [int(path.name) for path in folder.iterdir()]


@pytest.fixture(scope="module")
def pools():
    """A pool for each spec, shared by the tests of this file."""
    with ExitStack() as opened:
        yield cache(lambda spec: opened.enter_context(GraderPool(spec, num_workers=2)))


@pytest.mark.parametrize("case", CASES, ids=[case["why"] for case in CASES])
def test_shared_case(case, pools):
    fields = dict(case["grader"])
    if "while True" in fields.get("source", ""):
        fields["timeout_s"] = 0.5

    [found] = pools(spec_of(**fields)).grade([GradeRequest(case["item"], case["sample"])])

    assert found.reward == case.get("reward")
    assert found.error_type == case.get("error")
    assert (found.reward is None) == bool(found.error)


def test_grades_keep_the_order_of_their_requests():
    spec = python("import time\ndef grade(sample, item):\n    time.sleep(item['s'])\n    return item['i']")
    requests = [GradeRequest({"i": i, "s": 0.02 * (i % 3)}, "") for i in range(12)]

    with GraderPool(spec, num_workers=4) as pool:
        assert [found.reward for found in pool.grade(requests)] == list(range(12))
        assert pool.grade([]) == []


def test_calls_run_side_by_side():
    spec = python("import time\ndef grade(sample, item):\n    time.sleep(0.5)\n    return 1.0")
    with GraderPool(spec, num_workers=6) as pool:
        started = time.monotonic()
        found = pool.grade([GradeRequest({}, "")] * 6)

    assert time.monotonic() - started < 2.0
    assert [g.reward for g in found] == [1.0] * 6


def test_each_call_has_its_own_deadline():
    spec = python("def grade(sample, item):\n    while sample['output_text'] == 'hang': pass\n    return 1.0", 0.5)

    found = grade(spec, "hang", "a", "b", "hang", "c")

    assert [g.reward for g in found] == [None, 1.0, 1.0, None, 1.0]
    assert {g.error_type for g in found} == {None, "unresponsive_reward_error"}


def test_a_thousand_string_checks_are_quick():
    spec = spec_of(type="string_check", input="{{ sample.output_text }}", reference="{{ item.a }}", operation="eq")
    with GraderPool(spec) as pool:
        pool.grade([GradeRequest({"a": "1"}, "1")])
        started = time.monotonic()
        found = pool.grade([GradeRequest({"a": str(i)}, str(i % 500)) for i in range(1000)])

    assert [g.reward for g in found] == [1.0] * 500 + [0.0] * 500
    assert time.monotonic() - started < 2.0


@pytest.mark.parametrize(
    ("operation", "text", "reference", "reward"),
    [
        ("eq", "4", "4", 1), ("eq", "4 ", "4", 0), ("eq", "A", "a", 0), ("ne", "4", "5", 1), ("ne", "4", "4", 0),
        ("neq", "4", "4", 0), ("like", "a.c", "a.c", 1), ("like", "abc", "a.c", 0), ("like", "ABC", "b", 0),
        ("ilike", "ABC", "b", 1), ("ilike", "STRASSE", "straße", 1), ("ilike", "abc", "_", 0),
    ],
)  # fmt: skip
def test_string_check_by_hand(operation, text, reference, reward):
    spec = spec_of(type="string_check", input="{{ sample.output_text }}", reference=reference, operation=operation)

    assert [g.reward for g in grade(spec, text)] == [reward]


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        ("1", 1.0), ("-2.5", -2.5), ("float('inf')", None), ("10 ** 400", None), ("''", None), ("[]", None),
        ("{'score': 1}", None), ("1 + 2j", None), ("b'1'", None), ("sample", None), ("grade", None),
        ("__import__('fractions').Fraction(1, 2)", 0.5), ("__import__('decimal').Decimal('0.5')", None),
        ("np.int64(3)", 3.0), ("np.float64(0.5)", 0.5), ("np.float16(0.5)", 0.5), ("np.bool_(True)", None),
        ("np.array([0.5])", None), ("np.nan", None), ("np.float32('inf')", None), ("np.complex64(1)", None),
    ],
)  # fmt: skip
def test_only_a_finite_number_is_a_reward(returned, reward, pools):
    source = f"import numpy as np\ndef grade(sample, item):\n    return {returned}\n"
    spec = python("import numpy\ndef grade(sample, item):\n    space = {}\n    exec(item['source'], space)\n"
                  "    return space['grade'](sample, item)\n")  # fmt: skip

    [found] = pools(spec).grade([GradeRequest({"source": source}, "")])

    assert found.reward == reward
    assert (found.error_type == "python_grader_runtime_error") == (reward is None)


def test_an_exception_comes_with_the_user_s_frames_and_no_local_paths():
    source = (
        "import json\ndef inner(text):\n    return json.loads(text)\ndef grade(sample, item):\n    return inner('{')\n"
    )

    [found] = grade(python(source), "")

    assert found.error_type == "python_grader_runtime_error"
    assert 'File "<grader>", line 5, in grade' in found.error
    assert 'File "<grader>", line 3, in inner' in found.error
    assert "return inner('{')" in found.error
    assert "json/decoder.py" in found.error
    assert "JSONDecodeError" in found.error
    assert "qerl" not in found.error
    assert str(Path(sys.prefix)) not in found.error
    assert '"/' not in found.error


def test_a_chain_of_exceptions_is_told_whole():
    source = (
        "def grade(sample, item):\n    try: {}['k']\n    except KeyError as error: raise ValueError('v') from error\n"
    )

    [found] = grade(python(source), "")

    assert "KeyError: 'k'" in found.error
    assert "direct cause" in found.error
    assert found.error.endswith("ValueError: v")


@pytest.mark.parametrize(
    "source",
    [
        "def grade(sample, item):\n    return grade(sample, item)",
        "def grade(sample, item):\n    raise ValueError('x' * 10_000_000)",
        "def grade(sample, item):\n    raise ValueError('\\ud800 \\0')",
        "def grade(sample, item):\n    raise SystemExit(0)",
        "def grade(sample, item):\n    raise KeyboardInterrupt",
        "class Bad(Exception):\n    def __str__(self): raise self\ndef grade(sample, item):\n    raise Bad",
        "def grade(sample, item):\n    return bytearray(3 << 30)[0]",
        "def grade(sample, item):\n    open('f', 'wb').write(bytes(65 << 20)); return 1.0",
        "def grade(sample, item):\n    [open('/dev/null') for _ in range(300)]; return 1.0",
        "def grade(sample, item):\n    import os; os.kill(os.getpid(), 11)",
        "def grade(sample, item):\n    import os; os.kill(os.getpid(), 40)",
        "def grade(sample, item):\n    import sys; sys.exit('bye')",
        "import nothing_of_this_name\ndef grade(sample, item):\n    return 1.0",
        "1 / 0\ndef grade(sample, item):\n    return 1.0",
        "def grade(sample):\n    return 1.0",
        "async def grade(sample, item):\n    return 1.0",
        "def grade(sample, item):\n    yield 1.0",
    ],
)
def test_whatever_goes_wrong_in_user_code_is_a_runtime_error(source):
    [found] = grade(python(source), "")

    assert found.reward is None
    assert found.error_type == "python_grader_runtime_error"
    assert 0 < len(found.error) <= 10_000
    assert "\0" not in found.error
    found.error.encode()


@pytest.mark.parametrize("source", ["def grade(sample, item)\n    return 1", "a\0b", "grade = 1.0"])
def test_a_source_that_makes_no_function_is_a_server_error(source):
    [found] = grade(python(source), "")

    assert found.error_type == "python_grader_server_error"


def test_a_call_sees_nothing_of_the_one_before():
    source = (
        "import json, os, random\nseen = []\n"
        "def grade(sample, item):\n"
        "    seen.append(1); json.spoilt = getattr(json, 'spoilt', 0) + 1\n"
        "    entries = os.listdir(); open('left', 'w').write('x'); os.makedirs('a/b')\n"
        "    return len(seen) + json.spoilt + len(entries)\n"
    )

    assert [g.reward for g in grade(python(source), *"abcdef")] == [2.0] * 6


def test_a_call_inherits_no_environment_and_no_descriptors(monkeypatch):
    monkeypatch.setenv("QERL_SECRET", "s3cret")
    source = (
        "import os, sys\n"
        "def grade(sample, item):\n"
        "    fds = sorted(int(fd) for fd in os.listdir('/proc/self/fd'))\n"
        "    raise ValueError([sorted(os.environ), fds[:4], len(fds), sys.stdin.read(), os.getcwd() == sys.path[0]])\n"
    )

    [found] = grade(python(source), "")

    # The fifth is the listing's own.
    assert "['MKL_NUM_THREADS', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS'], [0, 1, 2, 3], 5, '', False]" in found.error


def test_the_completion_s_json_is_in_the_sample():
    spec = python("def grade(sample, item):\n    return sample['output_json']['score']")

    good, bad = grade(spec, '{"score": 0.5}', "half")

    assert good.reward == 0.5
    assert "TypeError" in bad.error


def test_dataclasses_work_in_a_grader():
    source = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Score:\n    value: float\n"
        "def grade(sample, item):\n    return Score(0.5).value\n"
    )

    assert [g.reward for g in grade(python(source), "")] == [0.5]


def test_the_same_set_has_the_same_order_in_every_call_and_pool():
    spec = python("def grade(sample, item):\n    return float(list({'a', 'b', 'c', 'd', 'e'}).index('c'))")

    assert len({g.reward for _ in range(3) for g in grade(spec, "", "")}) == 1


SPAWNING = """
import os, subprocess, time
def note(folder):
    open(f"{folder}/{os.getpid()}", "w").close()
def grade(sample, item):
    folder = item["folder"]
    note(folder)
    ready, tell = os.pipe()
    if os.fork() == 0:  # in the group
        note(folder); os.write(tell, b"."); time.sleep(60); os._exit(0)
    if os.fork() == 0:  # out of the session, and an orphan
        os.setsid()
        if os.fork() == 0:
            note(folder); os.write(tell, b"."); time.sleep(60)
        os._exit(0)
    os.wait()
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    open(f"{folder}/{child.pid}", "w").close()
    while len(os.listdir(folder)) < 4 or len(os.read(ready, 1)) < 1: time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("ending", "error_type"),
    [
        ("    return 1.0\n", None),
        ("    os._exit(3)\n", "python_grader_runtime_error"),
        ("    while True: pass\n", "unresponsive_reward_error"),
    ],
)
def test_a_call_leaves_no_process_behind_however_it_ends(ending, error_type, tmp_path):
    with GraderPool(python(SPAWNING + ending, 2.0)) as pool:
        [found] = pool.grade([GradeRequest({"folder": str(tmp_path)}, "")])

        assert found.error_type == error_type
        assert len(pids_in(tmp_path)) == 4
        assert [pid for pid in pids_in(tmp_path) if lives(pid)] == []


def test_a_call_s_strays_go_while_another_call_s_stay(tmp_path):
    (tmp_path / "own").mkdir()
    source = SPAWNING.replace("def grade", "def spawn") + (
        "def grade(sample, item):\n"
        "    if sample['output_text'] == 'spawn':\n        spawn(sample, item); return 1.0\n"
        "    child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "    time.sleep(1.0)\n    return float(child.poll() is None)\n"
    )

    found = grade(python(source), "other", "spawn", item={"folder": str(tmp_path / "own")})

    assert [g.reward for g in found] == [1.0, 1.0]


FORGERIES = {
    "a frame without the nonce": "frame(b'{\"reward\": 1.0}')",
    "a guess at the nonce": 'frame(b\'{"nonce": "0", "reward": 1.0}\')',
    "no frame": "b'1.0\\n' * 100",
    "a frame too large": "struct.pack('>I', 1 << 30) + b'x' * 100_000",
    "no json": "frame(b'\\xff')",
    "json that is no object": "frame(b'[1.0]')",
    "deep json": "frame(b'[' * 100_000)",
    "an infinite reward": "frame(b'{\"reward\": Infinity}')",
}


@pytest.mark.parametrize("data", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_reply_is_an_error(data, pools):
    spec = python(
        "import os, struct\ndef frame(body): return struct.pack('>I', len(body)) + body\n"
        "def grade(sample, item):\n"
        "    data = eval(item['data'])\n"
        "    for fd in range(64):\n"
        "        try: os.write(fd, data)\n"
        "        except OSError: pass\n"
        "    return 0.5\n"
    )

    [found] = pools(spec).grade([GradeRequest({"data": data}, "")])

    assert found.error_type == "python_grader_runtime_error"
    assert "reply channel" in found.error


def test_a_grader_that_closes_its_reply_channel_is_an_error_at_once():
    spec = python(
        "import os, time\ndef grade(sample, item):\n    os.closerange(0, 64); time.sleep(0.2); return 1.0", 60
    )

    [found] = grade(spec, "")

    assert found.error_type == "python_grader_runtime_error"


def test_an_end_is_noticed_though_a_child_holds_the_reply_channel():
    spec = python(
        "import os, time\ndef grade(sample, item):\n    if os.fork() == 0: time.sleep(60)\n    os._exit(0)", 60
    )

    [found] = grade(spec, "")

    assert "exit status 0" in found.error


KILLS_ITS_PARENT = """
import os, signal
def grade(sample, item):
    if not os.path.exists(item["flag"]):
        if sample["output_text"] == "once": open(item["flag"], "w").close()
        os.kill(os.getppid(), signal.SIGKILL)
    return 1.0
"""


def test_a_zygote_that_dies_is_started_again(tmp_path):
    found = grade(python(KILLS_ITS_PARENT), *["once"] * 5, item={"flag": str(tmp_path / "flag")}, num_workers=1)

    assert [g.reward for g in found] == [1.0] * 5


def test_a_zygote_that_dies_twice_makes_errors_and_the_next_batch_a_new_one(tmp_path):
    flag = tmp_path / "flag"
    with GraderPool(python(KILLS_ITS_PARENT), num_workers=2) as pool:
        lost = pool.grade([GradeRequest({"flag": str(flag)}, "always")] * 5)
        flag.touch()
        found = pool.grade([GradeRequest({"flag": str(flag)}, "always")] * 5)

    assert [(g.reward, g.error_type) for g in lost] == [(None, "other_error")] * 5
    assert "-9" in lost[0].error
    assert [g.reward for g in found] == [1.0] * 5


def test_a_zygote_that_died_between_batches_costs_nothing():
    with GraderPool(python("def grade(sample, item):\n    return os.getppid()\nimport os")) as pool:
        [before] = pool.grade([GradeRequest({}, "")])
        os.kill(int(before.reward), signal.SIGKILL)
        wait_for(lambda: not lives(int(before.reward)))
        [after] = pool.grade([GradeRequest({}, "")])

    assert after.reward not in (None, before.reward)


def test_leaving_the_pool_leaves_nothing(tmp_path):
    spec = python(
        "import os\n"
        "def grade(sample, item):\n"
        "    open(item['file'], 'w').write(f'{os.getppid()} {os.getcwd()}'); return 1\n"
    )
    file = tmp_path / "file"

    grade(spec, "", item={"file": str(file)})

    zygote, folder = file.read_text().split()
    assert not lives(zygote)
    assert not Path(folder).parent.exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_killed_parent(how, tmp_path):
    script = (
        "import sys\nfrom qerl_core.graders.runner import GraderPool, GradeRequest\n"
        "from qerl_core.graders.spec import PythonSpec\n"
        "spec = PythonSpec(type='python', timeout_s=60, source=sys.argv[1])\n"
        "with GraderPool(spec, num_workers=2) as pool: pool.grade([GradeRequest({'folder': sys.argv[2]}, '')])\n"
    )
    source = SPAWNING.replace(
        "    note(folder)\n", "    note(folder); open(f'{folder}/{os.getppid()}', 'w').close()\n", 1
    )
    source = source.replace("< 4", "< 5") + "    open(item['folder'] + '/0', 'w').close()\n    while True: pass\n"
    parent = subprocess.Popen([sys.executable, "-c", script, source, str(tmp_path)], cwd=ROOT)
    wait_for(lambda: (tmp_path / "0").exists())
    pids = [pid for pid in pids_in(tmp_path) if pid]
    assert len(pids) == 5
    assert all(map(lives, pids))
    zygotes_folder = min((Path(f"/proc/{pid}/cwd").readlink() for pid in pids), key=lambda path: len(path.parts))
    assert zygotes_folder.name.startswith("qerl-grader-")

    parent.send_signal(how)
    parent.wait()

    wait_for(lambda: not any(map(lives, pids)))
    assert not zygotes_folder.exists()


def test_a_row_that_is_no_json_is_an_error_of_its_own():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    spec = python("def grade(sample, item):\n    return 1.0")
    with GraderPool(spec) as pool:
        found = pool.grade([GradeRequest({"a": value}, "") for value in (1, float("nan"), {1}, deep, "\ud800")])

    while deep:  # so deep a list is taken apart by hand
        deep = deep[0]
    assert [g.reward for g in found] == [1.0, None, None, None, 1.0]
    assert {g.error_type for g in found} == {None, "other_error"}


def test_large_rows_and_completions_pass_both_ways():
    spec = python("def grade(sample, item):\n    return len(sample['output_text']) + len(item['text'])")
    with GraderPool(spec, num_workers=4) as pool:
        found = pool.grade([GradeRequest({"text": "é" * 1_000_000}, "x" * i) for i in range(8)])

    assert [g.reward for g in found] == [1_000_000.0 + i for i in range(8)]


def test_threads_may_share_a_pool():
    with GraderPool(python("def grade(sample, item):\n    return float(sample['output_text'])")) as pool:
        found = {}

        def work(i):
            found[i] = [g.reward for g in pool.grade([GradeRequest({}, str(i))] * 5)]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert found == {i: [float(i)] * 5 for i in range(4)}


def test_an_interrupted_batch_does_not_answer_the_next():
    spec = python("import time\ndef grade(sample, item):\n    time.sleep(0.2); return float(sample['output_text'])")
    with GraderPool(spec, num_workers=2) as pool:
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pool.grade([GradeRequest({}, "1")] * 50)
        timer.join()

        assert [g.reward for g in pool.grade([GradeRequest({}, "2")] * 2)] == [2.0, 2.0]


def test_a_request_starts_while_others_run():
    spec = python("import time\ndef grade(sample, item):\n    time.sleep(float(sample['output_text'])); return 1.0")
    with GraderPool(spec, num_workers=2) as pool:
        slow = pool.submit(GradeRequest({}, "3"))
        time.sleep(0.5)
        quick = pool.submit(GradeRequest({}, "0"))

        assert quick.result(2.0).reward == 1.0
        assert not slow.done()
        assert slow.result().reward == 1.0


def test_what_is_cancelled_before_its_turn_is_not_graded(tmp_path):
    source = (
        "import time\ndef grade(sample, item):\n"
        "    open(item['folder'] + '/' + sample['output_text'], 'w').close(); time.sleep(0.2); return 1.0\n"
    )
    with GraderPool(python(source), num_workers=1) as pool:
        first, second, third = (pool.submit(GradeRequest({"folder": str(tmp_path)}, text)) for text in "123")
        wait_for(lambda: pids_in(tmp_path))
        assert second.cancel()

        assert [first.result().reward, third.result().reward] == [1.0, 1.0]
    assert sorted(pids_in(tmp_path)) == [1, 3]


def test_leaving_the_pool_cancels_what_is_left():
    spec = python("import time\ndef grade(sample, item):\n    time.sleep(60)", 60)
    with GraderPool(spec, num_workers=2) as pool:
        futures = [pool.submit(GradeRequest({}, "")) for _ in range(4)]
        time.sleep(0.5)
        started = time.monotonic()

    assert time.monotonic() - started < SOON_S / 2
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(0)
    with pytest.raises(ValueError, match="not open"):
        pool.submit(GradeRequest({}, ""))


def test_pools_may_be_left_as_soon_as_they_are_entered():
    spec = spec_of(type="string_check", input="x", reference="x", operation="eq")
    for i in range(8):
        with GraderPool(spec) as pool:
            future = pool.submit(GradeRequest({}, "")) if i % 2 else None
        assert future is None or future.done()
        assert not pool._thread.is_alive()


def test_a_process_that_cannot_be_started_is_told_to_those_who_wait(monkeypatch, tmp_path):
    spec = python(KILLS_ITS_PARENT)
    with GraderPool(spec, num_workers=1) as pool:
        monkeypatch.setattr(runner, "zygote_command", lambda channel, folder: [str(tmp_path / "nothing")])
        with pytest.raises(FileNotFoundError):
            pool.grade([GradeRequest({"flag": str(tmp_path / "flag")}, "once")])
        monkeypatch.undo()

        assert pool.grade([GradeRequest({"flag": str(tmp_path / "flag")}, "once")])[0].reward == 1.0


def test_a_zygote_that_was_started_again_stays(tmp_path):
    flag = {"flag": str(tmp_path / "flag")}
    with GraderPool(python(KILLS_ITS_PARENT), num_workers=1) as pool:
        pool.grade([GradeRequest(flag, "once")])
        again = pool._zygote
        time.sleep(0.2)

        assert pool.grade([GradeRequest(flag, "once")])[0].reward == 1.0
        assert pool._zygote is again
