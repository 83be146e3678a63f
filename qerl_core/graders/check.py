"""What can be known about a grader before it runs: no user code is executed here."""

import ast
import json
import subprocess
import sys
import warnings
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

from qerl_core.graders import formula, template
from qerl_core.graders.failure import GradeFailure
from qerl_core.graders.format import compiled
from qerl_core.graders.reasoning_gym import INSTALL
from qerl_core.graders.spec import (
    FormatSpec,
    GraderSpec,
    MathSpec,
    MultiSpec,
    PythonSpec,
    ReasoningGymSpec,
    StringCheckSpec,
    TextSimilaritySpec,
)


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a grader cannot work."""

    field: str
    """The field of the grader's spec; dotted inside a `multi`."""
    message: str


def check_grader(spec: GraderSpec) -> list[Problem]:
    """Everything that would make each of its calls fail; empty if nothing is found."""
    problems = []
    if isinstance(spec, MultiSpec):
        for name, part in spec.graders.items():
            problems += [Problem(f"graders.{name}.{inner.field}", inner.message) for inner in check_grader(part)]
    own = _own_problem(spec)
    if own:
        problems.append(own)
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
    if isinstance(spec, MultiSpec):
        for name, part in spec.graders.items():
            for path, field in item_paths(part).items():
                paths.setdefault(path, f"graders.{name}.{field}")
    if isinstance(spec, ReasoningGymSpec):
        paths = {"answer": "dataset", "metadata": "dataset"}
    for field, text in _templates(spec).items():
        for name in template.variables(text):
            root, _, path = name.partition(".")
            if root == "item" and path:
                paths.setdefault(path, field)
    return paths


def _templates(spec: GraderSpec) -> dict[str, str]:
    if isinstance(spec, StringCheckSpec | TextSimilaritySpec):
        return {"input": spec.input, "reference": spec.reference}
    if isinstance(spec, FormatSpec | ReasoningGymSpec):
        return {"input": spec.input}
    return {"reference": spec.reference} if isinstance(spec, MathSpec) else {}


def _own_problem(spec: GraderSpec) -> Problem | None:
    """What is wrong with a grader apart from its templates."""
    try:
        match spec:
            case PythonSpec(source=source):
                problem = _python_problem(source)
                return Problem("source", problem) if problem else None
            case FormatSpec(pattern=pattern):
                compiled(pattern)
            case MultiSpec(calculate_output=text, graders=graders):
                unknown = sorted(formula.names(text) - graders.keys())
                if unknown:
                    known = ", ".join(graders)
                    return Problem("calculate_output", f"{unknown[0]} is not a grader; known are {known}")
            case ReasoningGymSpec(dataset=dataset):
                return _dataset_problem(dataset)
    except GradeFailure as failure:
        return Problem("pattern" if isinstance(spec, FormatSpec) else "calculate_output", str(failure))
    return None


def _dataset_problem(dataset: str) -> Problem | None:
    if find_spec("reasoning_gym") is None:
        return Problem("type", INSTALL)
    known = _datasets()
    if dataset in known:
        return None
    near = [name for name in known if dataset.lower() in name or name in dataset.lower()][:5] or known[:5]
    return Problem("dataset", f"reasoning_gym has no {dataset!r}; it has {', '.join(near)} and others")


@cache
def _datasets() -> tuple[str, ...]:
    """Asked of another process: the package is large."""
    source = "import json; from qerl_core.graders.reasoning_gym import datasets; print(json.dumps(datasets()))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, check=True, timeout=120)
    return tuple(json.loads(done.stdout.splitlines()[-1]))


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
