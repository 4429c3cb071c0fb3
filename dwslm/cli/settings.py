"""`dwslm settings`: every setting with its type, default and meaning, as docs/settings.md."""

import argparse
import ast
import dataclasses
import inspect
import textwrap
import typing
from typing import Any

from dwslm.data.prepare_settings import PrepareSettings


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("settings", help="print every setting with its default and meaning (docs/settings.md)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    print(document(), end="")


def document() -> str:
    """The whole of docs/settings.md, made from the dataclasses themselves."""
    from dwslm.config import RunConfig, ScoreConfig  # PyTorch comes with them

    parts = [
        "# Settings\n",
        "Made by `dwslm settings > docs/settings.md` from the code; a test keeps it current. "
        "A setting of a run is given as `name=value`, lists as `name=[a,b]`, null as `name=null`.\n",
        "## Training: `python train.py name=value ...`\n",
        *section(RunConfig),
        "## Scoring: `python eval.py name=value ...`\n",
        *section(ScoreConfig),
        "## Preparing data: `dwslm prepare --name value ...`\n",
        "Underscores become dashes; the settings under `fields` are flags of their own names.\n",
        *section(PrepareSettings),
    ]
    return "\n".join(parts)


def section(kind: type, prefix: str = "") -> list[str]:
    """A table for the plain fields of a dataclass, then a section for each nested one."""
    docs, types = field_docs(kind), typing.get_type_hints(kind)
    own: list[str] = ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
    nested: list[str] = []
    for field in dataclasses.fields(kind):
        name, doc = f"{prefix}{field.name}", docs[field.name]
        if dataclasses.is_dataclass(types[field.name]):
            assert isinstance(types[field.name], type)
            nested += [f"### {name}\n", doc + "\n", *section(types[field.name], f"{name}.")]
            continue
        shown = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
        shown = str(types[field.name]) if shown in ("list", "dict", "Optional", "Union") else shown
        for module in ("typing.", "dwslm.data.mixture.", "dwslm.data.packing_settings."):
            shown = shown.replace(module, "")
        shown = shown.replace("|", "or")
        cells = (f"`{name}`", f"`{shown}`", f"`{default(field)}`", doc.replace("|", "\\|"))
        if inner := [a for a in typing.get_args(types[field.name]) if dataclasses.is_dataclass(a)]:
            assert isinstance(inner[0], type)
            nested += [f"### {name}[i]\n", *section(inner[0])]
        own.append(f"| {' | '.join(cells)} |")
    return [*own, "", *nested] if len(own) > 2 else nested


def default(field: "dataclasses.Field[Any]") -> str:
    """The default as one would write it on the command line."""
    if field.default is not dataclasses.MISSING:
        value: Any = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "required"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(str(v) for v in value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value) or '""'


def field_docs(kind: type) -> dict[str, str]:
    """The string under each field of a dataclass, on one line.

    Raises:
        ValueError: naming a field that has none.
    """
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, after in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
            if not isinstance(text, str):
                raise ValueError(f"{kind.__name__}.{statement.target.id} has no docstring under it")
            docs[statement.target.id] = " ".join(text.split())
    return docs
