"""A hash of the kernel code that a result was measured with, which tells whether the result is still of today's code.

The code of an operation is its device code: what the GPU runs. Comments, docstrings, imports and messages do not count.
"""

import ast
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Operations that have no device code of their own run another one's.
DEVICE_CODE = {"geglu": "linear", "swiglu": "linear"}
OPERATIONS = (
    "attention", "conv2d", "denoise", "from_int8", "geglu", "group_norm", "layer_norm", "linear", "merge_lora",
    "rotary", "scale_input", "swiglu", "to_fp8",
)  # fmt: skip
ON_CPU = ("cpu", "models_cpu", "png", "precision_pictures", "text_to_image_cpu")  # no Triton kernel runs there


def code_hash(result: str) -> str | None:
    """Return the hash of the code behind `benchmarks/results/<result>.json`; None where no kernel runs.

    A result that is no operation's, such as a whole model's, depends on all device code.
    """
    paths = (ROOT / "kernels" / "device").rglob("*.py")
    return hash_of(
        result, (path.relative_to(ROOT).as_posix() for path in paths), lambda name: (ROOT / name).read_text()
    )


def hash_of(result: str, paths: Iterable[str], read: Callable[[str], str]) -> str | None:
    """Return the same hash for the files `paths` of a checkout, whose text `read` returns."""
    if result in ON_CPU:
        return None
    operation = next((name for name in OPERATIONS if result.startswith(name)), None)
    stem = DEVICE_CODE.get(operation, operation) if operation else ""
    chosen = sorted(path for path in paths if Path(path).name.startswith((stem, "math")) and "language" not in path)
    code = "\n".join(f"{path}\n{_bare(read(path))}" for path in chosen)
    return hashlib.sha256(code.encode()).hexdigest()[:12]


class _Bare(ast.NodeTransformer):
    """Drops docstrings and imports, and empties messages."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant(value="")  # Python's versions write f-strings in different ways


def _bare(source: str) -> str:
    return ast.unparse(_Bare().visit(ast.parse(source)))
