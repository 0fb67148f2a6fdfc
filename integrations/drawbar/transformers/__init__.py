"""Hugging Face Transformers Trainer on Ray.

Example, in the training function of a `drawbar.torch.TorchTrainer`:
    ```python
    trainer = transformers.Trainer(model, args, train_dataset=...)
    trainer = prepare_trainer(trainer)
    trainer.train()
    ```
"""

from drawbar.train.backend import set_public_module
from drawbar.transformers._prepare import prepare_trainer
from drawbar.transformers._report_callback import RayTrainReportCallback

__all__ = ["RayTrainReportCallback", "prepare_trainer"]

set_public_module(globals())
