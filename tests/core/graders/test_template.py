import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl_core.graders.template import Sample, TemplateError, render, variables

ITEM = {"answer": "4", "n": 4, "x": 4.5, "yes": True, "none": None, "deep": {"a": [{"b": "c"}]}, "evil": "{{ item.n }}"}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ item.answer }}", "4"),
        ("{{item.answer}}{{  item.n }}", "44"),
        ("{{ item.x }} {{ item.yes }} {{ item.none }}", "4.5 true null"),
        ("{{ item.deep.a.0.b }} {{ item.deep.a[0].b }}", "c c"),
        ("{{ item.deep }}", '{"a":[{"b":"c"}]}'),
        ("{{ item.evil }}", "{{ item.n }}"),
        ("{{ sample.output_text }}", '{"k": [1, 2]}'),
        ("{{ sample.output_json.k.1 }}", "2"),
        ("no name, { one } brace, \\frac{1}{2}}", "no name, { one } brace, \\frac{1}{2}}"),
    ],
)
def test_names_are_replaced_by_what_they_stand_for(template, text):
    assert render(template, ITEM, Sample('{"k": [1, 2]}')) == text


@pytest.mark.parametrize(
    ("template", "error_type"),
    [
        ("{{ item.anwser }}", "invalid_variable_error"),
        ("{{ item.deep.a.7 }}", "invalid_variable_error"),
        ("{{ item.answer.x }}", "invalid_variable_error"),
        ("{{ user.name }}", "invalid_variable_error"),
        ("{{ item.__class__ }}", "invalid_variable_error"),
        ("{{ }}", "invalid_variable_error"),
        ("{{ sample.output_json.k }}", "sample_parse_error"),
    ],
)
def test_a_name_that_stands_for_nothing_is_an_error(template, error_type):
    with pytest.raises(TemplateError) as caught:
        render(template, ITEM, Sample("not json"))

    assert caught.value.error_type == error_type


def test_an_unknown_name_is_named():
    with pytest.raises(TemplateError, match=r"item\.anwser"):
        render("{{ item.anwser }}", ITEM, Sample(""))


def test_variables_are_the_names_in_order():
    assert variables("{{ item.b }} {{ sample.output_text }} {{item.a.0}}") == [
        "item.b",
        "sample.output_text",
        "item.a.0",
    ]


@given(st.text())
def test_text_that_is_put_in_is_never_looked_at_again(text):
    assert render("<{{ item.t }}>", {"t": text}, Sample("")) == f"<{text}>"
