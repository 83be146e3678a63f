import pytest
from openai.types.fine_tuning.alpha import GraderRunResponse

from tests.app.conftest import GRADER

URL = "/v1/fine_tuning/alpha/graders"
MULTI = {"type": "multi", "name": "m", "graders": {"exact": GRADER}, "calculate_output": "2 * exact"}


def test_a_run_answers_in_openai_s_shape(client):
    body = client.post(f"{URL}/run", json={"grader": MULTI, "model_sample": "4", "item": {"answer": "4"}}).json()

    answer = GraderRunResponse.model_validate(body)
    assert (answer.reward, answer.sub_rewards) == (2.0, {"exact": 1.0})
    assert (answer.metadata.name, answer.metadata.type) == ("m", "multi")
    assert not any(value for value in body["metadata"]["errors"].values())


@pytest.mark.parametrize(
    ("grader", "kind"),
    [
        (GRADER, "invalid_variable_error"),
        ({**MULTI, "calculate_output": "1 / 0"}, "formula_parse_error"),
        ({"type": "format", "pattern": "("}, "other_error"),
        ({"type": "format", "pattern": "(a+)+b", "timeout_s": 0.2}, "unresponsive_reward_error"),
        ({"type": "python", "source": "def grade(s, i): return None"}, "python_grader_runtime_error"),
    ],
)
def test_a_grader_that_fails_is_data_without_a_reward(client, grader, kind):
    response = client.post(f"{URL}/run", json={"grader": grader, "model_sample": "a" * 40})

    assert response.status_code == 200
    body = response.json()
    assert body["reward"] is None
    assert [name for name, value in body["metadata"]["errors"].items() if value is True] == [kind]
    assert body["metadata"]["errors"]["details"]


@pytest.mark.parametrize(
    ("grader", "param"),
    [
        ({"type": "nothing"}, "grader.type"),
        ({"type": "format", "pattern": "("}, "grader.pattern"),
        ({**MULTI, "calculate_output": "other"}, "grader.calculate_output"),
        ({"type": "format"}, "grader.pattern"),
    ],
)
def test_a_malformed_grader_is_a_bad_request_that_names_the_field(client, grader, param):
    response = client.post(f"{URL}/validate", json={"grader": grader})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_good_grader_comes_back_as_it_is_understood(client):
    assert client.post(f"{URL}/validate", json={"grader": GRADER}).json() == {"grader": GRADER}
