"""What Ray Train keeps under `huggingface`."""

from drawbar.train.huggingface import transformers as transformers
