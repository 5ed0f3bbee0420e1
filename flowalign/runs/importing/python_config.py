"""Evaluate Python configurations in the style of ml_collections without running them.

The source is parsed, and only assignments, arithmetic, conditions, loops and calls of functions of
the file are interpreted. Everything else is an error with its line.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

_GPUS = ("gpu_number", "n_gpus", "num_gpus", "gpu_num")
"""Names of variables that hold the number of GPUs."""
_MOST_STEPS = 10_000
_OPERATORS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


class SettingsTree(dict[str, Any]):
    """Nested configuration that notes the keys that were assigned after its creation."""

    def __init__(self, values: Mapping[str, Any] | None = None):
        super().__init__(_copy(values or {}))
        self.assigned: set[str] = set()

    def assigned_tree(self) -> dict[str, Any]:
        """Return the assigned part of the configuration."""
        found: dict[str, Any] = {}
        for key, value in self.items():
            inner = value.assigned_tree() if isinstance(value, SettingsTree) else {}
            if inner or key in self.assigned:
                found[key] = inner or value
        return found


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {k: SettingsTree(v) if isinstance(v, Mapping) else v for k, v in tree.items()}


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "min": min,
    "max": max,
    "round": round,
    "abs": abs,
    "len": len,
    "dict": dict,
    "list": list,
    "tuple": tuple,
    "os.path.join": lambda *parts: "/".join(str(part) for part in parts if part),
    "os.getcwd": lambda: "",
    "ml_collections.ConfigDict": SettingsTree,
    "ConfigDict": SettingsTree,
}


class _Returned(Exception):
    def __init__(self, value: Any):
        self.value = value


class _Broke(Exception):
    pass


class PythonConfig:
    """Functions of a file that return configurations.

    `base` is the configuration that functions named `get_config` of other modules return.
    """

    def __init__(self, source: str, base: Mapping[str, Any]):
        tree = ast.parse(source)
        self.functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
        self._base, self._steps = base, 0
        self.gpus: int | None = None
        """Number of GPUs in a variable of the file. None: no such variable."""

    def names(self) -> list[str]:
        """Return the functions that need no argument, without helpers."""
        return [
            name
            for name, node in self.functions.items()
            if not node.args.args and not name.startswith("_")
        ]

    def evaluate(self, name: str) -> SettingsTree:
        """Return the nested configuration of a function.

        Raises:
            ValueError: The function does not exist, or has a statement that is not understood.
        """
        if name not in self.functions:
            raise ValueError(f"--function is {name!r}; the file has {', '.join(self.names())}")
        try:
            result = self._call(self.functions[name], [], {})
        except (TypeError, KeyError, AttributeError, ArithmeticError, IndexError) as error:
            raise ValueError(f"function {name} cannot be evaluated: {error!r}") from error
        if not isinstance(result, SettingsTree):
            raise ValueError(f"function {name} returns {type(result).__name__}, no configuration")
        return result

    def _call(self, node: ast.FunctionDef, args: list[Any], named: dict[str, Any]) -> Any:
        known = [a.arg for a in node.args.args]
        defaults = node.args.defaults
        scope = {
            name: self._value(default, {})
            for name, default in zip(known[len(known) - len(defaults) :], defaults, strict=True)
        }
        scope |= dict(zip(known, args, strict=False)) | named
        self._note_gpus(scope)
        try:
            self._run(node.body, scope)
        except _Returned as returned:
            return returned.value
        return None

    def _note_gpus(self, scope: Mapping[str, Any]) -> None:
        counts = [scope[name] for name in _GPUS if isinstance(scope.get(name), int)]
        self.gpus = counts[0] if counts else self.gpus

    def _run(self, body: list[ast.stmt], scope: dict[str, Any]) -> None:
        for node in body:
            self._steps += 1
            if self._steps > _MOST_STEPS:
                raise ValueError(f"line {node.lineno}: more than {_MOST_STEPS} statements")
            self._execute(node, scope)

    def _execute(self, node: ast.stmt, scope: dict[str, Any]) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                found = self._value(value, scope)
                for target in targets:
                    self._assign(target, found, scope)
            case ast.AugAssign(target=target, op=op, value=value):
                before = self._value(target, scope)
                found = _OPERATORS[type(op)](before, self._value(value, scope))
                self._assign(target, found, scope)
            case ast.Assert() | ast.Pass() | ast.Import() | ast.ImportFrom():
                pass
            case ast.Expr(value=ast.Constant()):
                pass
            case _:
                self._branch(node, scope)

    def _branch(self, node: ast.stmt, scope: dict[str, Any]) -> None:
        match node:
            case ast.If(test=test, body=body, orelse=orelse):
                self._run(body if self._value(test, scope) else orelse, scope)
            case ast.While(test=test, body=body):
                try:
                    while self._value(test, scope):
                        self._run(body, scope)
                except _Broke:
                    pass
            case ast.Break():
                raise _Broke
            case ast.Return(value=value):
                raise _Returned(None if value is None else self._value(value, scope))
            case _:
                raise _not_understood(node)

    def _assign(self, target: ast.expr, value: Any, scope: dict[str, Any]) -> None:
        match target:
            case ast.Name(id=name):
                scope[name] = value
                self._note_gpus(scope)
            case ast.Attribute(value=owner, attr=name):
                _set(self._value(owner, scope), name, value)
            case ast.Subscript(value=owner, slice=key):
                _set(self._value(owner, scope), self._value(key, scope), value)
            case _:
                raise _not_understood(target)

    def _value(self, node: ast.expr, scope: Mapping[str, Any]) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in scope:
                return scope[name]
            case ast.Attribute(value=owner, attr=name):
                return self._value(owner, scope)[name]
            case ast.Subscript(value=owner, slice=key):
                return self._value(owner, scope)[self._value(key, scope)]
            case ast.BinOp(left=left, op=op, right=right):
                return _OPERATORS[type(op)](self._value(left, scope), self._value(right, scope))
            case ast.UnaryOp(op=op, operand=operand):
                return _OPERATORS[type(op)](self._value(operand, scope))
            case ast.Call():
                return self._call_value(node, scope)
        return self._compound(node, scope)

    def _compound(self, node: ast.expr, scope: Mapping[str, Any]) -> Any:
        match node:
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._value(body if self._value(test, scope) else orelse, scope)
            case ast.BoolOp(op=op, values=values):
                found = [self._value(value, scope) for value in values]
                return all(found) if isinstance(op, ast.And) else any(found)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return _OPERATORS[type(op)](self._value(left, scope), self._value(right, scope))
        return self._literal(node, scope)

    def _literal(self, node: ast.expr, scope: Mapping[str, Any]) -> Any:
        match node:
            case ast.List(elts=items):
                return [self._value(item, scope) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self._value(item, scope) for item in items)
            case ast.Dict(keys=keys, values=values) if all(keys):
                pairs = zip(keys, values, strict=True)
                return {self._value(k, scope): self._value(v, scope) for k, v in pairs if k}
            case ast.JoinedStr(values=values):
                return "".join(str(self._value(value, scope)) for value in values)
            case ast.FormattedValue(value=value):
                return self._value(value, scope)
        raise _not_understood(node)

    def _call_value(self, node: ast.Call, scope: Mapping[str, Any]) -> Any:
        name = ast.unparse(node.func)
        args = [self._value(arg, scope) for arg in node.args]
        named = {key.arg: self._value(key.value, scope) for key in node.keywords if key.arg}
        if name in self.functions:
            return self._call(self.functions[name], args, named)
        if name.rpartition(".")[2] == "get_config":
            return SettingsTree(self._base)
        if name in _FUNCTIONS:
            return _FUNCTIONS[name](*args, **named)
        raise _not_understood(node)


def _set(owner: dict[str, Any], name: str, value: Any) -> None:
    owner[name] = value
    if isinstance(owner, SettingsTree):
        owner.assigned.add(name)


def _not_understood(node: ast.stmt | ast.expr) -> ValueError:
    text = ast.unparse(node).splitlines()[0][:60]
    return ValueError(f"line {node.lineno}: {text!r} is not understood; write a constant instead")
