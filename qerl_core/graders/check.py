"""What can be known about a grader before it runs: no user code is executed here."""

import ast
import warnings
from dataclasses import dataclass

from qerl_core.graders import template
from qerl_core.graders.failure import GradeFailure
from qerl_core.graders.spec import GraderSpec, MathSpec, PythonSpec, StringCheckSpec


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a grader cannot work."""

    field: str
    """The field of the grader's spec."""
    message: str


def check_grader(spec: GraderSpec) -> list[Problem]:
    """Everything that would make each of its calls fail; empty if nothing is found."""
    if isinstance(spec, PythonSpec):
        problem = _python_problem(spec.source)
        return [Problem("source", problem)] if problem else []
    problems = []
    for field, text in _templates(spec).items():
        try:
            template.variables(text)
        except GradeFailure as failure:
            problems.append(Problem(field, str(failure)))
    return problems


def item_paths(spec: GraderSpec) -> dict[str, str]:
    """The fields of a row that the grader's templates read: dotted path without `item.`, and the grader's field.

    GradeFailure if a template does not parse.
    """
    paths: dict[str, str] = {}
    for field, text in _templates(spec).items():
        for name in template.variables(text):
            root, _, path = name.partition(".")
            if root == "item" and path:
                paths.setdefault(path, field)
    return paths


def _templates(spec: GraderSpec) -> dict[str, str]:
    if isinstance(spec, StringCheckSpec):
        return {"input": spec.input, "reference": spec.reference}
    return {"reference": spec.reference} if isinstance(spec, MathSpec) else {}


def _python_problem(source: str) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as an invalid escape in the user's source
            tree = ast.parse(source)
            compile(tree, "<grader>", "exec", dont_inherit=True)  # finds a `return` outside a function, and the like
    except SyntaxError as error:
        where = f" (line {error.lineno})" if error.lineno else ""
        return f"the source does not compile: {error.msg}{where}"
    except (RecursionError, MemoryError):
        return "the source does not compile: it is nested too deeply"
    except ValueError as error:
        return f"the source does not compile: {error}"
    definition = None
    for statement in tree.body:
        for node in ast.walk(statement) if isinstance(statement, _BRANCHES) else (statement,):
            if _binds_grade(node):
                definition = node
    if definition is None:
        return "the source does not define grade(sample, item) at its top level"
    if isinstance(definition, ast.AsyncFunctionDef):
        return "grade must be a plain function, not async"
    if isinstance(definition, ast.ClassDef):
        return "grade must be a function, not a class"
    if isinstance(definition, ast.FunctionDef) and not _takes_two(definition.args):
        return "grade must take two positional arguments: sample and item"
    return None


_BRANCHES = (ast.If, ast.Try, ast.With, ast.For, ast.While)


def _binds_grade(node: ast.AST) -> bool:
    match node:
        case ast.FunctionDef(name="grade") | ast.AsyncFunctionDef(name="grade") | ast.ClassDef(name="grade"):
            return True
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return any((alias.asname or alias.name) in ("grade", "*") for alias in names)
        case ast.Assign() | ast.AnnAssign():
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names_of = (name for target in targets for name in ast.walk(target))
            return any(isinstance(name, ast.Name) and name.id == "grade" for name in names_of)
    return False


def _takes_two(arguments: ast.arguments) -> bool:
    places = len(arguments.posonlyargs) + len(arguments.args)
    required = places - len(arguments.defaults)
    keyword_only = any(default is None for default in arguments.kw_defaults)
    return required <= 2 <= (places if arguments.vararg is None else 2) and not keyword_only
