"""The examples of docs/guide/trainers.md run: marked as they are, the tests of the documents leave them to these."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.filterwarnings("default", "error:.*backward passes and no weight update")
PAGE = Path(__file__).parent.parent.parent / "docs/guide/trainers.md"
BLOCKS = re.findall(r"## (.*?)\n.*?```python integrations\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("block", [block for _, block in BLOCKS], ids=[title for title, _ in BLOCKS])
def test_examples_run(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, PAGE.name, "exec"), {"__name__": PAGE.name})


def test_there_is_one_for_each_trainer():
    assert len(BLOCKS) == PAGE.read_text(encoding="utf-8").count("```python")
    assert {"Lightning", "Accelerate", "The Trainer of transformers"} <= {title for title, _ in BLOCKS}
