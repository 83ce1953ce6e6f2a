"""What the examples that publish results share: files that are whole or not there, and pages with marked places."""

import os
import re


def put(text, blocks):
    """A page with blocks between their marks: <!-- name --> and <!-- /name -->."""
    for name, block in blocks.items():
        pattern = rf"(?s)(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text, found = re.subn(pattern, lambda marks, block=block: f"{marks[1]}\n{block}\n\n{marks[2]}", text)
        if not found:
            raise SystemExit(f"the page has no place for {name}: <!-- {name} --> and <!-- /{name} -->")
    return text


def atomically(write, path):
    part = path.with_name(f"{path.name}.part")
    write(part)
    os.replace(part, path)  # whole or not at all
