"""`calculate_output`: arithmetic over graders' rewards. Parsed by `ast`, of which a few node types are let through.

    + - * / ^ (or **, to the right: -a^2 is -(a^2)), parentheses, numbers, names, and FUNCTIONS

Every value is a finite float, so no operation takes long; what is not finite or not defined is an error, never a 0.
"""

import ast
import math
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache

from qerl_core.graders.failure import GradeFailure

MAX_NODES = 500
MAX_DEPTH = 50
MAX_EXPONENT = 100.0
KIND = "formula_parse_error"

FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "min": min, "max": max, "abs": abs, "floor": math.floor, "ceil": math.ceil, "exp": math.exp, "sqrt": math.sqrt,
    "log": math.log,
}  # fmt: skip
_SEVERAL = frozenset({"min", "max"})


def names(formula: str) -> frozenset[str]:
    """The graders that a formula reads. GradeFailure `formula_parse_error` if it is not one."""
    called = {id(node.func) for node in ast.walk(_parse(formula)) if isinstance(node, ast.Call)}
    return frozenset(
        node.id for node in ast.walk(_parse(formula)) if isinstance(node, ast.Name) and id(node) not in called
    )


def evaluate(formula: str, values: Mapping[str, float]) -> float:
    """The value of a formula; finite. GradeFailure `formula_parse_error` if it has none for these values."""
    return _value(_parse(formula), values)


@lru_cache(maxsize=64)
def _parse(formula: str) -> ast.expr:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(formula.strip().replace("^", "**"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise GradeFailure(KIND, f"{_shown(formula)} is not a formula") from None
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise GradeFailure(KIND, f"the formula has more than {MAX_NODES} parts")
    _check(tree, depth=0)
    return tree


def _check(node: ast.expr, *, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise GradeFailure(KIND, f"the formula is nested deeper than {MAX_DEPTH}")
    match node:
        case ast.Constant(value=value):
            _number(value, node)
        case ast.Name(id=name):
            if name in FUNCTIONS:
                raise GradeFailure(KIND, f"{name} is a function: write {name}(...)")
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            _check(operand, depth=depth + 1)
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.Pow(), left=left, right=right):
            _check(left, depth=depth + 1)
            _check(right, depth=depth + 1)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            if not arguments or (len(arguments) > 1 and name not in _SEVERAL):
                raise GradeFailure(KIND, f"{name} takes {'numbers' if name in _SEVERAL else 'one number'}")
            for argument in arguments:
                _check(argument, depth=depth + 1)
        case _:
            known = ", ".join(FUNCTIONS)
            raise GradeFailure(
                KIND, f"{_shown(ast.unparse(node))} is not allowed: use numbers, graders' names, + - * / ^ and {known}"
            )


def _value(node: ast.expr, values: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=value):
            return _number(value, node)
        case ast.Name(id=name):
            if name not in values:
                known = ", ".join(values) or "none"
                raise GradeFailure(KIND, f"{name} is not a grader; known are {known}")
            return values[name]
        case ast.UnaryOp(op=op, operand=operand):
            inner = _value(operand, values)
            return -inner if isinstance(op, ast.USub) else inner
        case ast.Call(func=ast.Name(id=name), args=arguments):
            given = [_value(argument, values) for argument in arguments]
            if name in _SEVERAL:
                return FUNCTIONS[name](given)
            return _finite(node, lambda: float(FUNCTIONS[name](*given)))
        case ast.BinOp(left=left, op=op, right=right):
            return _finite(node, lambda: _apply(op, _value(left, values), _value(right, values)))
    raise AssertionError(node)


def _apply(op: ast.operator, left: float, right: float) -> float:
    match op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
    if abs(right) > MAX_EXPONENT:
        raise GradeFailure(KIND, f"the exponent {right:g} is beyond {MAX_EXPONENT:g}")
    return math.pow(left, right)


def _finite(node: ast.expr, work: Callable[[], float]) -> float:
    try:
        value = work()
    except ZeroDivisionError:
        raise GradeFailure(KIND, f"{_shown(ast.unparse(node))} divides by zero") from None
    except (ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise GradeFailure(KIND, f"{_shown(ast.unparse(node))} has no finite value")
    return value


def _number(value: object, node: ast.expr) -> float:
    if type(value) in (int, float):
        try:
            number = float(value)  # type: ignore[arg-type]
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise GradeFailure(KIND, f"{_shown(ast.unparse(node))} is not a finite number")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "...").replace("**", "^")
