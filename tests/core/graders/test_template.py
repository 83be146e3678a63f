import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl_core.graders.failure import GradeFailure
from qerl_core.graders.template import render, variables

ITEM = {
    "answer": "4", "number": 4, "float": 4.5, "yes": True, "nothing": None, "object": {"v": 4, "ä": [1, "2"]},
    "list": [{"a": "x"}, "y"], "my-key": "dash", "0": "zero",
}  # fmt: skip


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("", ""),
        ("plain } }} { text", "plain } }} { text"),
        ("{{item.answer}}", "4"),
        ("{{ item.answer }}", "4"),
        ("{{\n\titem.answer\n}}", "4"),
        ("<{{ item.answer }}|{{ sample.output_text }}>", "<4|out>"),
        ("{{ item.number }} {{ item.float }} {{ item.yes }} {{ item.nothing }}", "4 4.5 true null"),
        ("{{ item.object }}", '{"v":4,"ä":[1,"2"]}'),
        ("{{ item.object.v }}", "4"),
        ("{{ item.list.0.a }}{{ item.list[1] }}{{ item.object.ä[1] }}", "xy2"),
        ("{{ item.my-key }}{{ item.0 }}", "dashzero"),
        (r"\frac{{{ item.answer }}}{2}", None),
        (r"x^{2^{3}} = {{ item.answer }}", r"x^{2^{3}} = 4"),
    ],
)
def test_names_are_replaced_and_all_else_is_text(template, text):
    if text is None:
        with pytest.raises(GradeFailure):
            render(template, item=ITEM, output_text="out")
    else:
        assert render(template, item=ITEM, output_text="out") == text


def test_text_that_was_put_in_is_not_rendered_again():
    item = {"answer": "{{ item.secret }}", "secret": "x"}

    assert render("{{ item.answer }}", item=item, output_text="") == "{{ item.secret }}"
    assert render("{{ sample.output_text }}", item=item, output_text="{{ item.secret }}") == "{{ item.secret }}"


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{{ item.anwser }}", "item.anwser"),
        ("{{ item.object.w }}", "item.object.w"),
        ("{{ item.list.2 }}", "item.list.2"),
        ("{{ item.list.-1 }}", "item.list.-1"),
        ("{{ item.list.a }}", "item.list.a"),
        ("{{ item.list." + "9" * 5000 + " }}", "item.list.9"),
        ("{{ item.answer.0 }}", "item.answer.0"),
        ("{{ sample.output_texts }}", "sample.output_texts"),
        ("{{ sample.output_text.x }}", "sample.output_text.x"),
        ("{{ sample }}", "sample"),
        ("{{ answer }}", "answer"),
        ("{{ item.answer | upper }}", "item.answer | upper"),
        ("{{ item['answer'] }}", "item['answer']"),
        ("{{ }}", "''"),
        ("{{ item..answer }}", "item..answer"),
        ("a {{ item.answer", "{{ item.answer"),
        ("{{ item.__class__ }}", "item.__class__"),
    ],
)
def test_an_unknown_name_is_an_error_that_names_it(template, named):
    with pytest.raises(GradeFailure) as caught:
        render(template, item=ITEM, output_text="out")

    assert caught.value.error_type == "invalid_variable_error"
    assert named in str(caught.value)
    assert len(str(caught.value)) < 600


def test_the_error_says_what_the_row_has():
    with pytest.raises(GradeFailure, match="the row has question, answer"):
        render("{{ item.anwser }}", item={"question": "q", "answer": "4"}, output_text="")


def test_output_json_is_the_completion_parsed():
    text = '{"k": {"n": [1, 2]}, "s": "t"}'

    assert render("{{ sample.output_json.k.n[1] }}{{ sample.output_json.s }}", item={}, output_text=text) == "2t"
    assert render("{{ sample.output_json }}", item={}, output_text="[1, 2]") == "[1,2]"


@pytest.mark.parametrize("text", ["", "four", '{"a": 1', "NaN", "[1e999]", "[" * 100_000, "9" * 5000])
def test_a_completion_that_is_no_json_is_an_error_of_its_own(text):
    with pytest.raises(GradeFailure) as caught:
        render("{{ sample.output_json.k }}", item={}, output_text=text)

    assert caught.value.error_type == "sample_parse_error"


def test_the_completion_is_not_parsed_unless_asked_for():
    assert render("{{ sample.output_text }}", item={}, output_text="{") == "{"


def test_variables_are_dotted_and_each_once():
    template = "{{ item.a[0].b }} {{item.c}} {{ sample.output_json.k }} {{ item.c }} {{ item }}"

    assert variables(template) == ["item.a.0.b", "item.c", "sample.output_json.k", "item"]


KEYS = st.text(st.characters(blacklist_categories=("Cs", "Zs", "Cc", "Zl", "Zp")), min_size=1).filter(
    lambda key: not set(key) & set(".[]{}|()'\"") and not any(c.isspace() for c in key)
)
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5)


@given(item=st.dictionaries(KEYS, JSON, max_size=4), before=st.text(), after=st.text())
def test_every_field_of_a_row_can_be_named(item, before, after):
    before, after = before.replace("{", ""), after.replace("{", "")
    for key, value in item.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        template = f"{before}{{{{ item.{key} }}}}{after}"

        assert render(template, item=item, output_text="") == before + text + after
        assert variables(template) == [f"item.{key}"]


@given(st.text(alphabet="{} item.sample_[]0ab\n"), st.text())
def test_any_text_renders_or_is_a_named_error(template, output_text):
    try:
        rendered = render(template, item={"a": "b"}, output_text=output_text)
    except GradeFailure as failure:
        assert failure.error_type in ("invalid_variable_error", "sample_parse_error")  # noqa: PT017
    else:
        assert "{{" in template or rendered == template
