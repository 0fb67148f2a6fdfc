"""What an editor and `help()` say of the names that scripts use."""

from __future__ import annotations

import inspect
import pydoc

import jedi
import pytest

from drawbar import train
from drawbar.torch import TorchTrainer

HEAD = "from drawbar import train\nfrom drawbar.train.torch import TorchTrainer\n"
WANTED = {
    "train.": {"report", "get_context", "ScalingConfig", "torch", "xgboost"},
    "train.ScalingConfig(num_w": {"num_workers="},
    "TorchTrainer(": {"train_loop_config=", "scaling_config=", "torch_config="},
    "TorchTrainer(print).fit().": {"metrics", "checkpoint", "best_checkpoints", "path"},
}


@pytest.mark.parametrize("typed", WANTED)
def test_an_editor_completes(typed: str) -> None:
    offered = {each.name for each in jedi.Script(HEAD + typed).complete()}
    assert WANTED[typed] - offered == set()


@pytest.mark.parametrize(
    "thing", [train.ScalingConfig, train.RunConfig, TorchTrainer, train.report]
)
def test_help_names_each_argument(thing: object) -> None:
    text = pydoc.plain(pydoc.render_doc(thing))
    assert callable(thing)
    arguments = [name for name in inspect.signature(thing).parameters if name[0] != "_"]
    assert [name for name in arguments if f"{name}:" not in text] == []
