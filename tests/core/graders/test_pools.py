"""Graders of ours in real worker processes, and formulas over them."""

import json
import threading
import time
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from qerl_core.graders import text_similarity
from qerl_core.graders.check import check_grader, item_paths
from qerl_core.graders.pools import open_pool
from qerl_core.graders.runner import GradeRequest
from qerl_core.graders.spec import GraderSpec
from tests.live import processes

CASES = json.loads((Path(__file__).parents[2] / "cases" / "graders.json").read_text())
MULTI = [case for case in CASES if case["grader"]["type"] == "multi"]
EXACT = {"type": "string_check", "input": "{{ sample.output_text }}", "reference": "{{ item.a }}", "operation": "eq"}
LONG = {"type": "format", "pattern": "(?s).{4,}"}
HANGS = {"type": "format", "pattern": "(a+)+b", "timeout_s": 0.5}


def spec_of(**fields):
    return TypeAdapter(GraderSpec).validate_python(fields)


def grade(spec, *texts, item=None):
    with open_pool(spec, num_workers=2) as pool:
        return pool.grade([GradeRequest(item or {}, text) for text in texts])


def similarity(metric, **more):
    return spec_of(type="text_similarity", input="{{ sample.output_text }}", reference="{{ item.a }}",
                   evaluation_metric=metric, **more)  # fmt: skip


@pytest.mark.parametrize("case", MULTI, ids=[case["why"] for case in MULTI])
def test_shared_case(case):
    [found] = grade(spec_of(**case["grader"]), case["sample"], item=case["item"])

    assert found.reward == case.get("reward")
    assert found.error_type == case.get("error")
    assert (found.reward is None) == bool(found.error)


CAT, SAT = "the cat sat on the mat", "the cat sat on a mat"


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("fuzzy_match", 2 * 19 / 42),  # 19 characters stay in order of 22 + 20
        ("rouge_1", 2 * 5 / 12),  # 5 of 6 words
        ("rouge_2", 2 * 3 / 10),  # the cat, cat sat, sat on
        ("rouge_3", 2 * 2 / 8),
        ("rouge_4", 2 * 1 / 6),
        ("rouge_5", 0.0),
        ("rouge_l", 2 * 5 / 12),
        ("gleu", (5 + 3 + 2 + 1) / (6 + 5 + 4 + 3)),
        ("bleu", (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25),
        # nltk gives `the` to the last of its like, so 5 matches are 3 chunks: harmonic mean 5/6, penalty 0.5 (3/5)^3
        ("meteor", 5 / 6 * (1 - 0.5 * (3 / 5) ** 3)),
    ],
)
def test_similarity_by_hand(metric, value):
    [found] = grade(similarity(metric), SAT, item={"a": CAT})

    assert found.reward == pytest.approx(value, abs=1e-9)


METRICS = ["fuzzy_match", "bleu", "gleu", "meteor", "rouge_1", "rouge_2", "rouge_l"]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("reference", ["", " ", "4", "the cat", "Straße 猫が座る", "!?", "é" * 500])
def test_equal_texts_are_alike_and_all_others_are_between_0_and_1(metric, reference):
    texts = [reference, "", "other", "the cat the cat", "猫", "\ud800", "?", reference + " x"]

    values = [text_similarity.similarity(text, reference, metric) for text in texts]

    assert values[0] == 1.0
    assert all(0.0 <= value <= 1.0 for value in values)
    assert values == [text_similarity.similarity(text, reference, metric) for text in texts]


def test_scripts_without_spaces_and_word_stems_count():
    assert 0 < text_similarity.similarity("猫が座る", "犬が座る", "rouge_1") < 1
    assert text_similarity.similarity("two cats sitting", "two cat sits", "meteor") > 0.9


def test_a_threshold_makes_it_pass_or_fail():
    found = grade(similarity("fuzzy_match", pass_threshold=0.9), SAT, CAT, item={"a": CAT})

    assert [grade.reward for grade in found] == [1.0, 1.0]
    assert [g.reward for g in grade(similarity("fuzzy_match", pass_threshold=0.91), SAT, item={"a": CAT})] == [0.0]


@pytest.mark.parametrize(
    ("pattern", "text", "reward"),
    [
        (r"<think>.*</think>\d+", "<think>a</think>42", 1), (r"<think>.*</think>\d+", "<think>a\nb</think>42", 0),
        (r"(?s)<think>.*</think>\d+", "<think>a\nb</think>42", 1), (r"\d+", "42\n", 0), (r"\d+", "x42", 0),
        (r"(?i)yes|no", "NO", 1),
    ],
)  # fmt: skip
def test_format_matches_all_of_the_text(pattern, text, reward):
    assert [g.reward for g in grade(spec_of(type="format", pattern=pattern), text)] == [reward]


def test_a_catastrophic_pattern_is_an_error_and_the_next_call_gets_its_reward():
    began = time.monotonic()

    found = grade(spec_of(**HANGS), "a" * 40, "aab", "a" * 40, "b")

    assert [g.reward for g in found] == [None, 1.0, None, 0.0]
    assert {g.error_type for g in found} == {"unresponsive_reward_error", None}
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("spec", [HANGS, {"type": "multi", "graders": {"h": HANGS}, "calculate_output": "h"}])
def test_leaving_a_pool_at_work_leaves_no_process_and_no_thread(spec):
    import os

    with open_pool(spec_of(**{**spec, "timeout_s": 30} if "timeout_s" in spec else spec), num_workers=1) as pool:
        futures = [pool.submit(GradeRequest({}, "a" * 60)) for _ in range(3)]
        deadline = time.monotonic() + 10
        while not processes(os.getpid(), "graders.serve"):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    assert not processes(os.getpid(), "graders.serve")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("qerl-graders")]
    for future in futures:
        assert future.done()
        with suppress(CancelledError):
            assert future.result().reward is None
    with pytest.raises(ValueError, match="not open"):
        pool.submit(GradeRequest({}, ""))


def test_a_worker_that_is_killed_is_started_again():
    import os

    with open_pool(spec_of(**LONG), num_workers=1) as pool:
        pool.grade([GradeRequest({}, "")])
        [pid] = processes(os.getpid(), "graders.serve")
        os.kill(pid, 9)
        assert [g.reward for g in pool.grade([GradeRequest({}, "long")] * 2)] == [1.0, 1.0]


def test_a_multi_has_its_graders_grades_as_parts():
    spec = spec_of(type="multi", graders={"exact": EXACT, "long": LONG}, calculate_output="0.75 * exact + 0.25 * long")

    found = grade(spec, "right", "wrong", "no", item={"a": "right"})

    assert [g.reward for g in found] == [1.0, 0.25, 0.0]
    assert [{name: part.reward for name, part in g.parts.items()} for g in found] == [
        {"exact": 1.0, "long": 1.0}, {"exact": 0.0, "long": 1.0}, {"exact": 0.0, "long": 0.0},
    ]  # fmt: skip


def test_a_failed_part_fails_what_reads_it_and_nothing_else():
    graders = {"exact": EXACT, "hangs": HANGS}
    reads = grade(spec_of(type="multi", graders=graders, calculate_output="exact + 0 * hangs"), "a" * 40,
                  item={"a": ""})  # fmt: skip
    ignores = grade(spec_of(type="multi", graders=graders, calculate_output="1 - exact"), "a" * 40, item={"a": ""})

    assert (reads[0].reward, reads[0].error_type) == (None, "unresponsive_reward_error")
    assert reads[0].error.startswith("hangs: no answer within 0.5 s")
    assert ignores[0].reward == 1.0
    assert ignores[0].parts["hangs"].reward is None


def test_a_multi_is_read_from_a_dict_a_list_and_a_single_grader():
    named = {**EXACT, "name": "exact"}
    shapes = [{"exact": named}, [named], named]

    specs = [spec_of(type="multi", graders=shape, calculate_output="exact") for shape in shapes]

    assert specs[0] == specs[1] == specs[2]
    assert TypeAdapter(GraderSpec).validate_json(specs[0].model_dump_json()) == specs[0]


@pytest.mark.parametrize(
    ("graders", "about"),
    [
        ([EXACT], "needs a name"), ([{**EXACT, "name": "x"}] * 2, "two have the name 'x'"), ({"a-b": EXACT}, "'a-b'"),
        ({"min": EXACT}, "'min'"), ({"é": EXACT}, "'é'"), ({"1a": EXACT}, "'1a'"), ({}, "at least 1"), ([], "at least"),
        ({"m": {"type": "multi", "graders": {"a": EXACT}, "calculate_output": "a"}}, "multi"), ("x", "dictionary"),
    ],
)  # fmt: skip
def test_names_that_a_formula_cannot_use_are_refused(graders, about):
    with pytest.raises(ValidationError, match=about):
        spec_of(type="multi", graders=graders, calculate_output="1")


@pytest.mark.parametrize(
    ("fields", "field", "about"),
    [
        ({"type": "format", "pattern": "(a"}, "pattern", "not a regular expression"),
        ({"type": "format", "pattern": "a", "input": "{{ x }}"}, "input", "unknown"),
        ({"type": "multi", "graders": {"a": EXACT}, "calculate_output": "a +"}, "calculate_output", "not a formula"),
        ({"type": "multi", "graders": {"a": EXACT}, "calculate_output": "b"}, "calculate_output", "known are a"),
        ({"type": "multi", "graders": {"a": {"type": "format", "pattern": "["}}, "calculate_output": "a"},
         "graders.a.pattern", "not a regular expression"),
        ({"type": "reasoning_gym", "dataset": "leg_count"}, "dataset", "leg_counting"),
    ],
)  # fmt: skip
def test_a_grader_that_cannot_work_is_told_before_it_runs(fields, field, about):
    [problem] = check_grader(spec_of(**fields))

    assert problem.field == field
    assert about in problem.message


def test_the_fields_of_a_multi_s_graders_are_known():
    spec = spec_of(type="multi", graders={"e": EXACT, "f": LONG}, calculate_output="e")

    assert item_paths(spec) == {"a": "graders.e.reference"}
    assert check_grader(spec) == []


def test_reasoning_gym_scores_its_own_entries():
    gym = pytest.importorskip("reasoning_gym")
    entry = json.loads(json.dumps(gym.create_dataset("leg_counting", size=1, seed=1)[0]))
    spec = spec_of(type="reasoning_gym", dataset="leg_counting")
    assert check_grader(spec) == []

    right, tagged, wrong, empty = grade(
        spec, entry["answer"], f"hm <answer> {entry['answer']}\n</answer>", "none", "", item=entry
    )
    [lacking] = grade(spec, "4", item={"answer": "4"})

    assert (right.reward, tagged.reward) == (1.0, 1.0)
    assert wrong.reward < 0.5
    assert empty.reward < 0.5
    assert (lacking.reward, lacking.error_type) == (None, "invalid_variable_error")
    assert "metadata" in lacking.error
