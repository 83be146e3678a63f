"""What can be said of a grader before anything is graded: no user code runs, nothing is imported for it."""

import ast
from dataclasses import dataclass

from qerl_core.graders.spec import GraderSpec, MathSpec, PythonSpec, StringCheckSpec
from qerl_core.graders.template import TemplateError, variables


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a field of a grader, and what would mend it."""

    field: str
    message: str


def check_grader(spec: GraderSpec) -> list[Problem]:
    """Everything that would make each grade an error."""
    if isinstance(spec, PythonSpec):
        return _check_source(spec.source)
    problems = []
    for field, template in _templates(spec).items():
        try:
            variables(template)
        except TemplateError as error:
            problems.append(Problem(field, str(error)))
    return problems


def item_paths(spec: GraderSpec) -> dict[str, str]:
    """The fields of a row that the grader's templates read: dotted path without `item.`, and the grader's field."""
    return {
        name.removeprefix("item."): field
        for field, template in _templates(spec).items()
        for name in variables(template)
        if name.startswith("item.")
    }


def _templates(spec: GraderSpec) -> dict[str, str]:
    if isinstance(spec, StringCheckSpec):
        return {"input": spec.input, "reference": spec.reference}
    return {"reference": spec.reference} if isinstance(spec, MathSpec) else {}


def _check_source(source: str) -> list[Problem]:
    try:
        tree = ast.parse(source)
        compile(tree, "grader.py", "exec")
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else "it does not compile: "
        return [Problem("source", where + error.msg)]
    except (ValueError, RecursionError, MemoryError) as error:
        return [Problem("source", f"it does not compile: {error or type(error).__name__}")]
    for node in tree.body:
        if isinstance(node, ast.AsyncFunctionDef) and node.name == "grade":
            return [Problem("source", "grade is async; write a plain function")]
        if isinstance(node, ast.FunctionDef) and node.name == "grade":
            return [] if _takes_two(node.args) else [Problem("source", "grade must take two arguments: sample, item")]
        names = [alias.asname or alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        targets = [target.id for target in _targets(node) if isinstance(target, ast.Name)]
        if "grade" in names or "grade" in targets:
            return []
    return [Problem("source", "it defines no function grade(sample, item) at its top level")]


def _targets(node: ast.stmt) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else []


def _takes_two(arguments: ast.arguments) -> bool:
    places = len(arguments.posonlyargs) + len(arguments.args)
    required = places - len(arguments.defaults)
    needs_names = any(default is None for default in arguments.kw_defaults)
    return required <= 2 and (places >= 2 or arguments.vararg is not None) and not needs_names
