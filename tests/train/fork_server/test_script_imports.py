"""Imports at the top of a script that can be done before it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from drawbar._fork_server.script_imports import find_imports, find_script_files


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch", "import torch"),
        ('"""Docstring."""\n\nimport os, torch\n', "\n\nimport os, torch"),
        (
            "from __future__ import annotations\nimport sys; import torch\nSEED = 1\n"
            "from torch.utils import (\n    data,\n)\nimport numpy as np\nprint(1)\n"
            "import torch.fx",
            "\nimport torch\n\nfrom torch.utils import data\n\n\nimport numpy as np",
        ),
        ("import os\nos.environ['X'] = '1'\nimport torch", None),
        ("from drawbar import train\nfrom tqdm.auto import tqdm\nimport torch", "\n\nimport torch"),
        ("from drawbar import tune\nimport torch", None),
        ("import torch\nimport unknown\nimport numpy", "import torch"),
        ("import torch, unknown", None),
        ("from . import sibling\nimport torch", None),
        ("import local\nimport torch", None),
        ("import colorsys\nimport torch", None),  # a local file has this name
        ("SEED = int('1')\nimport torch", None),
        ("try:\n    import torch\nexcept ImportError:\n    pass", None),
        ("if True:\n    import torch", None),
        ("@decorator\ndef function():\n    import torch", None),
        ("not Python", None),
        ("x = '\\d'\nimport torch", "\nimport torch"),
        ("# coding: latin-1\nimport torch  # \xe9", "\nimport torch"),
    ],
)
def test_find_imports_returns_those_that_nothing_can_influence(
    tmp_path: Path, source: str, expected: str | None, recwarn: pytest.WarningsRecorder
) -> None:
    script = tmp_path / "script.py"
    script.write_text(source, encoding="latin-1")
    for name in ("local.py", "colorsys.py"):
        (tmp_path / name).touch()
    (tmp_path / "numpy").mkdir()  # without __init__.py, it does not hide the installed package
    imports = find_imports([str(script)], str(tmp_path), {"torch", "numpy"})
    assert imports.get(str(script)) == expected
    assert not recwarn.list


def test_find_imports_of_module_begins_with_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package" / "inner"
    package.mkdir(parents=True)
    first, second, module = (
        str(package.parent / "__init__.py"),
        str(package / "__main__.py"),
        str(package / "module.py"),
    )
    Path(first).write_text("import torch")
    Path(second).write_text("import numpy")
    Path(module).write_text("import torch.nn")
    monkeypatch.chdir(tmp_path)
    assert find_script_files(["-m", "package.inner"]) == [first, second]
    files = find_script_files(["-m", "package.inner.module"])
    assert files == [first, module]
    imports = find_imports(files, str(tmp_path), {"torch"})
    assert imports == {first: "import torch", module: "import torch.nn"}
    Path(first).write_text("import os; os.environ['X'] = '1'")
    assert not find_imports(files, str(tmp_path), {"torch"})
    assert find_script_files(["-m", "missing.module"]) == []


@pytest.mark.parametrize(
    ("source", "is_reader"),
    [
        ("import os; RANK = os.environ.get('RANK')", True),
        ("import os; HAS_RANK = 'LOCAL_RANK' in os.environ", True),
        ("import os; RANK = os.getenv('RANK', 0)", True),
        ("import os; RANK = os.environb.get(b'RANK')", True),
        ("import os; ALL = dict(os.environ)", True),
        ("import os; HOME = os.environ.get('HOME'); os.environ['RANKS'] = '1'", False),
        ("import tqdm", False),
    ],
)
def test_rank_reads_names_modules_that_read_variables_of_the_rank(
    tmp_path: Path, source: str, is_reader: bool
) -> None:
    (tmp_path / "reader.py").write_text(source)
    code = """
import os, sys
from drawbar._fork_server.rank_reads import track_rank_reads
with track_rank_reads() as readers:
    import reader
print(*readers)
assert type(os.environ) is type(os.environb) is os._Environ
assert dict(os.environ)["HOME"] == "/home" and os.environ.get("RANK") is None
"""
    variables = {"HOME": "/home", "PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])}
    done = subprocess.run([sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE)
    assert done.returncode == 0
    assert done.stdout.split() == [b"reader"] * is_reader
