"""Small faults for a module's source, as changes of its tree; `tests.mutants` runs the tests with each of them."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "reversed": "list", "sorted": "list"}


@dataclass(frozen=True)
class Mutant:
    """One change of a tree: `owner.field`, or an item of it, becomes `new`."""

    owner: ast.AST
    field: str
    index: int | None
    new: ast.AST | None
    statement: ast.stmt
    scope: str

    def swap(self, new: object) -> object:
        """Put `new` there, and return what was."""
        place, key = (
            (vars(self.owner), self.field) if self.index is None else (vars(self.owner)[self.field], self.index)
        )
        old, place[key] = place[key], new
        return old

    def compiled(self, tree: ast.Module, path: Path) -> CodeType:
        """The module with the change."""
        self.swap(self.new)
        return compile(ast.fix_missing_locations(tree), str(path), "exec")

    @property
    def label(self) -> str:
        """Where it is, and the statement before and after, without its body."""
        before = _first_line(self.statement)
        old = self.swap(self.new)
        after = _first_line(self.new if isinstance(self.new, ast.stmt) else self.statement)
        self.swap(old)
        return f"{self.scope}: {before} => {after}"


def _first_line(statement: ast.stmt) -> str:
    lines = ast.unparse(statement).splitlines()
    return next(line for line in lines if not line.startswith("@")).strip()


def mutants_of(node: ast.AST, statement: ast.stmt | None = None, scope: str = "") -> Iterator[Mutant]:
    """Every mutant of a module, or of what is within a statement of it, in the order of the lines."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_comment", "ctx"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or _is_left_alone(child):
                continue
            inner = child if isinstance(child, ast.stmt) else statement
            assert inner is not None
            name = getattr(child, "name", "") if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else ""
            path = ".".join(filter(None, (scope, name)))
            for new in _changes(child):
                yield Mutant(node, field, index, new, inner, path)
            yield from mutants_of(child, inner, path)


def _is_left_alone(node: ast.AST) -> bool:
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.JoinedStr, ast.AnnAssign)):
        return not isinstance(node, ast.AnnAssign) or node.value is None
    if isinstance(node, ast.keyword) and node.arg == "strict":  # of `zip`: a check, which nothing is meant to fail
        return True
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)  # documentation


def _changes(node: ast.AST) -> Iterator[ast.AST | None]:
    """What `node` may become instead."""
    if type(node) in SWAPS:
        yield SWAPS[type(node)]()
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node.operand
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in NAMES:
        yield ast.Name(NAMES[node.id], ast.Load())
    elif isinstance(node, (ast.Raise, ast.AugAssign)) or (isinstance(node, ast.Expr) and not _yields(node)):
        yield ast.Pass()
    elif isinstance(node, ast.Assign) and not isinstance(node.targets[0], (ast.Name, ast.Tuple)):
        yield ast.Pass()  # of an attribute or an item; without a name the next line fails
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, (ast.Break, ast.Continue)):
        yield ast.Continue() if isinstance(node, ast.Break) else ast.Break()
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)) and not isinstance(node.test, (ast.Compare, ast.UnaryOp)):
        yield type(node)(**{**dict(ast.iter_fields(node)), "test": ast.UnaryOp(ast.Not(), node.test)})


def _yields(node: ast.Expr) -> bool:
    return isinstance(node.value, (ast.Yield, ast.YieldFrom))


def marked(tree: ast.Module, path: Path, module: str) -> CodeType:
    """The module with a call of `__ran__` with `module:line` before each statement of its functions."""
    tree = copy.deepcopy(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            _mark(node, module)
    return compile(ast.fix_missing_locations(tree), str(path), "exec")


def _mark(node: ast.AST, module: str) -> None:
    for field in ("body", "orelse", "finalbody", "handlers"):
        inner = [child for child in getattr(node, field, []) if isinstance(child, (ast.stmt, ast.ExceptHandler))]
        for child in inner:
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                _mark(child, module)
        if field != "handlers" and inner:
            setattr(node, field, [part for child in inner for part in (_mark_of(child, module), child)])


def _mark_of(statement: ast.AST, module: str) -> ast.stmt:
    call = ast.Call(ast.Name("__ran__", ast.Load()), [ast.Constant(f"{module}:{statement.lineno}")], [])
    return ast.copy_location(ast.Expr(call), statement)
