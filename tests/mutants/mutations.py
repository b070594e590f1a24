"""The mutants of a module: every place where one small slip can be put in.

    for mutant in mutants_of("dcp_objstore/checkpoint/claim.py", text):
        mutant.apply(text)          # the module's text with the slip

Not mutated: texts, annotations, assertions, decorators, what is raised or logged, `__repr__`, and
numbers with a decimal point (pauses and shares: no limit that a test could stand at) and units.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_CALLED = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
# Calls whose arguments are a collection: one may be left out.
_GATHERS = {"min", "max", "sum", "any", "all", "chain", "suppress"}
# Calls that fail, or mean nothing, with their arguments the other way round.
_ORDERED = {"isinstance", "issubclass", "cast", "TypeVar", "getattr", "range"}
# What only a failure of another kind would show, or nobody but a reader.
_NO_MATTER = {"strict", "stacklevel", "name"}
_SILENT = ("_log", "logger", "logging", "log")


@dataclass(frozen=True)
class Mutant:
    """One slip in one module.

    Attributes:
        file: the module, relative to the tree.
        function: the qualified name of the function around it, or "" in the module's body.
        line: the text of the line on which it begins.
        kind: what was done, in a word.
        change: what stood there and what stands there now.
        lines: the numbers of the lines that a test has to reach.
        around: the first and the last line of the function.
        mentions: names by which code reaches it that is run while its module is imported.
        in_signature: whether it is in a default of a function's argument.
        start: its first byte in the module; `end` is the one after its last.
        text: what stands there now.
    """

    file: str
    function: str
    line: str
    kind: str
    change: str
    lines: tuple[int, ...] = field(compare=False)
    around: tuple[int, int] = field(compare=False)
    mentions: tuple[str, ...] = field(compare=False)
    in_signature: bool = field(compare=False)
    start: int = field(compare=False)
    end: int = field(compare=False)
    text: str = field(compare=False)

    @property
    def place(self) -> str:
        """The module within the package, and the function."""
        return f"{self.file.removeprefix('dcp_objstore/')}: {self.function}".rstrip(": ")

    @property
    def name(self) -> str:
        """Eight letters that stay as long as the line and its function do."""
        key = "\n".join((self.file, self.function, self.line, self.kind, self.change))
        return hashlib.sha256(key.encode()).hexdigest()[:8]

    def apply(self, module: str) -> str:
        """The module's text with the slip."""
        data = module.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()


def mutants_of(file: str, module: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    finder = _Finder(file, module)
    finder.visit_body(ast.parse(module).body)
    found: dict[tuple[int, int, str], Mutant] = {}
    for mutant in finder.found:
        found.setdefault((mutant.start, mutant.end, mutant.text), mutant)
    numbers: dict[str, int] = {}  # of those that would have the same name
    mutants = []
    for mutant in sorted(found.values(), key=lambda mutant: mutant.start):
        number = numbers[mutant.name] = numbers.get(mutant.name, 0) + 1
        change = mutant.change if number == 1 else f"{mutant.change} ({number})"
        mutants.append(replace(mutant, change=change))
    return mutants


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, module: str) -> None:
        self.file = file
        self.data = module.encode()
        self.lines = self.data.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Mutant] = []
        self.names: list[str] = []
        self.statement: ast.stmt | None = None
        # In a default of an argument: the function's first statement.
        self.reach: ast.stmt | None = None
        # In the body of a module or a class: the names that a statement gives a value.
        self.mentions: tuple[str, ...] = ()
        self.in_function = False
        self.around = (1, len(self.lines))

    # Where things stand.

    def _start(self, node: Any) -> int:
        return self.starts[int(node.lineno) - 1] + int(node.col_offset)

    def _end(self, node: Any) -> int:
        return self.starts[int(node.end_lineno) - 1] + int(node.end_col_offset)

    def _put(
        self, kind: str, node: Any, text: str, *, after: str | None = None, reach: Any = None
    ) -> None:
        """Note a mutant in which `text` stands in the place of `node`."""
        start, end = self._start(node), self._end(node)
        before = " ".join(self.data[start:end].decode().split())
        within = None if self.reach or reach else self.statement
        reach = self.reach or reach or node
        lines = set(range(reach.lineno, reach.end_lineno + 1))
        if within is not None:
            compound = isinstance(within, (ast.Try, ast.With, ast.For, ast.While, ast.If))
            last = None if compound else within.end_lineno
            lines |= set(range(within.lineno, (last or within.lineno) + 1))
        shown = " ".join((text if after is None else after).split())
        self.found.append(
            Mutant(
                file=self.file,
                function=".".join(self.names),
                line=self.lines[node.lineno - 1].decode().strip(),
                kind=kind,
                change=f"{before[:120]} -> {shown[:120]}",
                lines=tuple(sorted(lines)),
                around=self.around,
                mentions=self.mentions if self.reach is None else (),
                in_signature=self.reach is not None,
                start=start,
                end=end,
                text=text,
            )
        )

    def _expression(self, kind: str, node: ast.expr, new: ast.expr) -> None:
        self._put(kind, node, f"({ast.unparse(new)})", after=ast.unparse(new))

    def _replaced(
        self, kind: str, node: ast.stmt, new: Sequence[ast.stmt], reach: ast.AST | None = None
    ) -> None:
        """Note a mutant with other statements in the place of one."""
        indent = " " * node.col_offset
        text = ast.unparse(ast.Module(body=list(new) or [ast.Pass()], type_ignores=[]))
        text = textwrap.indent(text, indent)[len(indent) :]
        self._put(kind, node, text, reach=reach)

    # Statements.

    def visit_body(self, body: list[ast.stmt]) -> None:
        for node in body:
            outer, self.statement = self.statement, node
            if not self.in_function:
                # The default of a field acts where its class is called.
                self.mentions = (*_names(node), *self.names[-1:])
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                self.visit(node)
            self.statement = outer

    def generic_visit(self, node: ast.AST) -> None:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                self.visit_body(value)
            elif isinstance(value, list):
                for one in value:
                    if isinstance(one, ast.AST):
                        self.visit(one)
            elif isinstance(value, ast.AST):
                self.visit(value)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.append(node.name)
        self.visit_body(node.body)
        self.names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        self.names.append(node.name)
        outer = self.in_function, self.mentions, self.around
        self.in_function, self.mentions = True, ()
        self.around = node.lineno, node.end_lineno or node.lineno
        documented = ast.get_docstring(node) is not None and len(node.body) > 1
        self.reach = node.body[documented]
        self.visit(node.args)
        self.reach = None
        self.visit_body(node.body)
        self.in_function, self.mentions, self.around = outer
        self.names.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  ast's own spelling

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Import(self, node: ast.Import) -> None:
        pass

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        pass

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replaced("removed", node, [])

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and _is_log(node.value):
            return
        if isinstance(node.value, (ast.Call, ast.Await)):
            self._replaced("removed", node, [])
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            self._replaced("removed", node, [])
        if not any(isinstance(at, ast.Name) and at.id == "__slots__" for at in node.targets):
            self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and ast.unparse(node.annotation) != "TypeAlias":
            if isinstance(node.target, ast.Attribute) and self.names[-1:] != ["__init__"]:
                self._replaced("removed", node, [])
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replaced("removed", node, [])
        swapped = _COMPUTED.get(type(node.op))
        if swapped is not None:
            new = copy.copy(node)
            new.op = swapped()
            self._replaced("computed", node, [new])
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._replaced("removed", node, [])

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self._replaced("removed", node, [])
        elif not (isinstance(node.value, ast.Constant) and not node.value.value):
            self._replaced("returned", node, [ast.Return(ast.Constant(None))])
        if node.value is not None:
            self.visit(node.value)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replaced("flow", node, [])
        self._replaced("flow", node, [ast.Break()])

    def visit_Break(self, node: ast.Break) -> None:
        self._replaced("flow", node, [])
        self._replaced("flow", node, [ast.Continue()])

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if not isinstance(node.test, (ast.Compare, ast.UnaryOp)):
            self._expression("condition", node.test, ast.UnaryOp(ast.Not(), node.test))
        for fixed in (True, False):
            self._expression("condition", node.test, ast.Constant(fixed))
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self._expression("condition", node.test, ast.Constant(False))
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        if all(item.optional_vars is None for item in node.items):
            reach = node.body[0]
            self._replaced("no with", node, node.body, reach)
        self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        first = node.body[0]
        rest = [*node.body, *node.orelse]
        if node.finalbody:
            # What was in `finally` is done where nothing is raised, or not at all.
            after = [_try(node, finalbody=[])] if node.handlers else rest
            self._replaced("no finally", node, [*after, *node.finalbody], first)
            self._replaced("no finally", node, after, first)
        for place, handler in enumerate(node.handlers):
            others = [*node.handlers[:place], *node.handlers[place + 1 :]]
            caught = handler.body[0]
            if others or node.finalbody:
                self._replaced("no except", node, [_try(node, handlers=others)], caught)
            else:
                self._replaced("no except", node, rest, caught)
            if all(isinstance(one, (ast.Pass, ast.Continue)) for one in handler.body):
                returning = copy.copy(handler)
                returning.body = [ast.Return(None)]
                handlers = [*node.handlers]
                handlers[place] = returning
                if any("." in name or name[:1].islower() or name[:1] == "_" for name in self.names):
                    self._replaced("flow", node, [_try(node, handlers=handlers)], handler)
        self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if isinstance(node.type, ast.Tuple):
            self._leave_out("no except", node.type, node.type.elts, "elts", least=2)
        if all(isinstance(one, ast.Pass) for one in node.body):
            self._replaced("flow", node.body[0], [ast.Raise()])
        self.visit_body(node.body)

    # Expressions.

    def visit_Compare(self, node: ast.Compare) -> None:
        for place, operator in enumerate(node.ops):
            new = copy.copy(node)
            new.ops = [*node.ops]
            new.ops[place] = _COMPARED[type(operator)]()
            self._expression("compared", node, new)
            if type(operator) in (ast.Lt, ast.LtE, ast.Gt, ast.GtE):
                new = copy.copy(new)
                new.ops = [*node.ops]
                opposite = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt}
                new.ops[place] = opposite[type(operator)]()
                self._expression("compared", node, new)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        new = copy.copy(node)
        new.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._expression("and/or", node, new)
        for place in range(len(node.values)):
            others = [*node.values[:place], *node.values[place + 1 :]]
            new = copy.copy(node)
            new.values = others
            self._expression("left out", node, new if len(others) > 1 else others[0])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, (ast.Not, ast.USub)):
            self._expression("not", node, node.operand)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.Pow):
            return  # a unit
        swapped = _COMPUTED.get(type(node.op))
        texts = _is_text(node.left) or _is_text(node.right)
        if swapped is not None and not texts:
            new = copy.copy(node)
            new.op = swapped()
            self._expression("computed", node, new)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._expression("constant", node, ast.Constant(not node.value))
        elif isinstance(node.value, int):
            self._expression("constant", node, ast.Constant(node.value + 1))
            if node.value > 0:
                self._expression("constant", node, ast.Constant(node.value - 1))

    def visit_IfExp(self, node: ast.IfExp) -> None:
        if _is_text(node.body) or _is_text(node.orelse):
            return
        self._expression("branch", node, node.body)
        self._expression("branch", node, node.orelse)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _is_log(node):
            return
        name = node.func.id if isinstance(node.func, ast.Name) else None
        if ast.unparse(node.func) == "contextlib.suppress":
            name = "suppress"
        if name in _CALLED:
            new = copy.copy(node)
            new.func = ast.Name(_CALLED[name])
            if name == "sorted":
                new.keywords = []
            self._expression("called", node, new)
        if name in _GATHERS and len(node.args) > 1:
            self._leave_out("left out", node, node.args, "args", least=2)
        elif name not in _ORDERED and len(node.args) > 1:
            first, second, *others = node.args
            if not any(isinstance(one, ast.Starred) for one in (first, second)):
                new = copy.copy(node)
                new.args = [second, first, *others]
                self._expression("swapped", node, new)
        for place, keyword in enumerate(node.keywords):
            if keyword.arg not in _NO_MATTER:
                new = copy.copy(node)
                new.keywords = [*node.keywords[:place], *node.keywords[place + 1 :]]
                self._expression("left out", node, new)
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in _NO_MATTER:
            self.visit(node.value)

    def visit_Tuple(self, node: ast.Tuple) -> None:
        if isinstance(node.ctx, ast.Load):
            self._leave_out("left out", node, node.elts, "elts", least=2)
            self.generic_visit(node)

    def visit_List(self, node: ast.List) -> None:
        if isinstance(node.ctx, ast.Load):
            self._leave_out("left out", node, node.elts, "elts", least=1)
            self.generic_visit(node)

    def visit_Set(self, node: ast.Set) -> None:
        self._leave_out("left out", node, node.elts, "elts", least=2)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for place in range(len(node.keys)):
            new = copy.copy(node)
            new.keys = [*node.keys[:place], *node.keys[place + 1 :]]
            new.values = [*node.values[:place], *node.values[place + 1 :]]
            self._expression("left out", node, new)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._expression("condition", test, ast.Constant(True))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.value, ast.Name) and node.value.id[:1].isupper():
            return  # a type
        self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> None:
        for side in ("lower", "upper"):
            if getattr(node, side) is not None:
                new = copy.copy(node)
                setattr(new, side, None)
                self._put("left out", node, ast.unparse(new))
        self.generic_visit(node)

    def _leave_out(
        self, kind: str, node: ast.expr, parts: Sequence[Any], name: str, *, least: int
    ) -> None:
        if len(parts) < least:
            return
        for place in range(len(parts)):
            new = copy.copy(node)
            setattr(new, name, [*parts[:place], *parts[place + 1 :]])
            self._expression(kind, node, new)


def _try(
    node: ast.Try,
    *,
    handlers: list[ast.ExceptHandler] | None = None,
    finalbody: list[ast.stmt] | None = None,
) -> ast.Try:
    handlers = node.handlers if handlers is None else handlers
    finalbody = node.finalbody if finalbody is None else finalbody
    body, orelse = [*node.body], [*node.orelse]
    if orelse and not handlers:
        body, orelse = [*body, *orelse], []
    return ast.Try(body, handlers, orelse, finalbody)


def _names(node: ast.stmt) -> tuple[str, ...]:
    """What a statement in the body of a module or a class gives a value; "" if nothing."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return tuple(target.id for target in targets if isinstance(target, ast.Name)) or ("",)


def _is_text(node: ast.expr) -> bool:
    constant = node.value if isinstance(node, ast.Constant) else None
    return isinstance(node, ast.JoinedStr) or isinstance(constant, (str, bytes))


def _is_log(node: ast.Call) -> bool:
    return (
        isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in _SILENT
    )
