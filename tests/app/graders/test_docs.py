import json
import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[3] / "docs" / "graders.md").read_text()
EXAMPLES = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)]


@pytest.mark.parametrize("example", EXAMPLES, ids=[example["grader"]["name"] for example in EXAMPLES])
def test_an_example_of_the_documentation_gives_its_reward(client, example):
    reward = example.pop("reward")

    answer = client.post("/v1/fine_tuning/alpha/graders/run", json=example).json()

    assert answer["reward"] == pytest.approx(reward)
