"""Who may import whom, checked on source text."""

import ast
from dataclasses import dataclass, field

from tests.contract.package_tree import FOLDERS

FRONT_DOOR = "twinstream"
_EXECUTOR = "twinstream.executor"
SCHEDULE = "twinstream.schedule"
LAYERS = (SCHEDULE, *(f"twinstream.{folder}" for folder in FOLDERS))

_DESCRIPTIONS = {SCHEDULE, "twinstream.models", "twinstream.hardware_profiles"}
MAY_IMPORT = {
    SCHEDULE: {SCHEDULE},
    "twinstream.models": {SCHEDULE, "twinstream.models"},
    "twinstream.hardware_profiles": {SCHEDULE, "twinstream.hardware_profiles"},
    "twinstream.planner": {*_DESCRIPTIONS, "twinstream.planner"},
    "twinstream.simulator": {*_DESCRIPTIONS, "twinstream.simulator"},
    _EXECUTOR: {*_DESCRIPTIONS, _EXECUTOR},
    FRONT_DOOR: {*LAYERS, FRONT_DOOR},
}


def layer_of(module: str) -> str:
    """The layer that a full module name belongs to."""
    return next((layer for layer in LAYERS if f"{module}.".startswith(f"{layer}.")), FRONT_DOOR)


def violations(module: str, source: str) -> list[str]:
    """What the imports of one module break, as `line N: ...`."""
    scan = _ImportScan(layer_of(module))
    scan.visit(ast.parse(source))
    return scan.found


@dataclass
class _ImportScan(ast.NodeVisitor):
    layer: str
    found: list[str] = field(default_factory=list)
    function_depth: int = 0

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.function_depth += 1
        self.generic_visit(node)
        self.function_depth -= 1

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._check(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level:
            self._add(node, "a relative import; use the full name")
            return
        for alias in node.names:
            self._check(f"{node.module}.{alias.name}", node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else None
        called = node.func.id if isinstance(node.func, ast.Name) else called
        if called in ("import_module", "__import__"):
            match node.args:
                case [ast.Constant(value=str(target)), *_]:
                    self._check(target, node)
                case [ast.JoinedStr(values=[ast.Constant(value=str(package)), *_]), *_]:
                    self._check(package, node)
                case _:
                    self._add(node, "imports a name that only the run knows")
        self.generic_visit(node)

    def _check(self, target: str, node: ast.AST) -> None:
        root = target.split(".")[0]
        if not root:
            self._add(node, f"imports {target}, which is relative; use the full name")
        elif root in FOLDERS:
            self._add(node, f"imports {target} by its short name; use twinstream.{root}")
        elif not self._allows(target, root):
            self._add(node, f"{self.layer} imports {target}")

    def _allows(self, target: str, root: str) -> bool:
        if root == "twinstream":
            return layer_of(target) in MAY_IMPORT[self.layer]
        if root == "torch":
            in_function = self.function_depth > 0
            return self.layer == _EXECUTOR or (self.layer == FRONT_DOOR and in_function)
        return True

    def _add(self, node: ast.AST, problem: str) -> None:
        self.found.append(f"line {getattr(node, 'lineno', 0)}: {problem}")
