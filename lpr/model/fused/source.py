"""Recognises code of transformers by its source, as one form of a module occurs under a hundred names."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from functools import cache
from typing import Any


@cache
def fingerprint(function: Any) -> str:
    """16 hexadecimal digits of the statements of `function`, without docstring, annotations and `sliding_window=`.

    The window is left out because lpr's attention has it from the mask. "" if the source is not at hand.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ""
    definition: Any = tree.body[0]
    body = definition.body[1:] if ast.get_docstring(definition) else definition.body
    plain = [ast.unparse(ast.fix_missing_locations(_Plain().visit(each))) for each in body]
    return hashlib.blake2b("\n".join(plain).encode(), digest_size=8).hexdigest()


class _Plain(ast.NodeTransformer):
    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value, lineno=0) if node.value else None

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        named = [key for key in node.keywords if key.arg != "sliding_window"]
        node.keywords = sorted(named, key=lambda key: key.arg or "~")  # `**kwargs` last
        return node
