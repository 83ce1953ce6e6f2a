"""What mkdocstrings is told of the package: docstrings as `docstrings` completes them, with links to public names."""

import re
import sys
from copy import copy
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
from docstrings import completed

CONVERT = "convert.convert"  # where the function is that hides the folder of its name


class Completed(griffe.Extension):
    """Rewrites the docstrings of public names when all of the package has been read."""

    def on_package(self, *, pkg: griffe.Module, **others: Any) -> None:
        show_as_function(pkg[CONVERT])
        public = public_names(pkg)
        written = {path.rpartition(".")[2]: each.docstring.value for path, each in public.items()}
        for each in public.values():
            for part in (each, *each.members.values()):
                if not part.is_alias and part.docstring is not None:
                    part.docstring.value = linked(completed(part.docstring.value, written.__getitem__), list(public))


def show_as_function(module: griffe.Module) -> None:
    """`convert` is an object that is called; it is shown as the function that it is for its users."""
    function = copy(module["Convert.__call__"])
    function.name = "convert"
    function.parameters = griffe.Parameters(*list(function.parameters)[1:])
    module.set_member("convert", function)


def public_names(package: griffe.Module) -> dict[str, Any]:
    """The classes and functions of the package and of its public modules, by their paths in the reference."""
    found: dict[str, Any] = {f"streamnorm.{CONVERT}.convert": package[CONVERT]["convert"]}
    for module in (package, package["backends"], package["functional"]):
        for name in map(str, module.exports or ()):
            member = module.members.get(name)
            target = member.final_target if member is not None and member.is_alias else member
            if target is not None and (target.is_class or target.is_function):
                found[f"{module.path}.{name}"] = target
    return found


def linked(docstring: str, paths: list[str]) -> str:
    """`StreamingNorm` leads to its place in the reference; not in examples."""
    places = {path.rpartition(".")[2]: path for path in paths}
    text, mark, example = docstring.partition("Examples:\n")
    names = "|".join(sorted(places, key=len, reverse=True))
    return re.sub(rf"(?<![`\[])`({names})`(?!`)", lambda m: f"[{m[0]}][{places[m[1]]}]", text) + mark + example
